"""Fixtures of all tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ranks.harness import run_ranks


@pytest.fixture
def ranks() -> Callable[..., list[Any]]:
    """``ranks(world_size, fn, *args, **kwargs)``: the results of fn on each rank. See ranks/harness.py."""
    return run_ranks
