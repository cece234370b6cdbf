"""Fixtures of all tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ranks.harness import run_ranks

if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    # Workers that each use every core for their oracles take the cores from each other.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])))


@pytest.fixture
def ranks() -> Callable[..., list[Any]]:
    """``ranks(world_size, fn, *args, **kwargs)``: the results of fn on each rank. See ranks/harness.py."""
    return run_ranks
