"""The private names of torch that dmuon-core uses, all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def norms_in_fp64(tensors: Sequence[Tensor]) -> Tensor:
    """The 2-norm of every tensor, ``[len(tensors)]`` in fp64, in one pass where they are of one dtype and dense.

    ``torch.linalg.vector_norm(dtype=torch.float64)`` would write a copy in fp64 first. Gradient clipping in torch uses
    the same function.
    """
    return torch.stack(torch._foreach_norm(list(tensors), 2, torch.float64))
