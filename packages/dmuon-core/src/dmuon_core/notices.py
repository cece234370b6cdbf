"""What users are told outside of exceptions: once per process, and on rank 0 alone where there are ranks."""

from __future__ import annotations

import functools
import warnings

import torch.distributed as dist


@functools.cache
def warn_once(text: str) -> None:
    """Issue ``text`` as a RuntimeWarning the first time it comes, on rank 0."""
    if dist.is_available() and dist.is_initialized() and dist.get_rank() != 0:
        return
    warnings.warn(text, RuntimeWarning, stacklevel=3)
