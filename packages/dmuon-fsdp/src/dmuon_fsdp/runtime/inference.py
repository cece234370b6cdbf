"""Work whose tensors outlive ``torch.inference_mode``, called inside of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def outside_inference_mode(function: Callable[P, T]) -> Callable[P, T]:
    """Run ``function`` as under ``torch.no_grad`` where it is called in ``torch.inference_mode``.

    In that mode DTensors cannot be detached, and no later step may write what is made.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():  # leaving it turns gradients on
            return function(*args, **kwargs)

    return run
