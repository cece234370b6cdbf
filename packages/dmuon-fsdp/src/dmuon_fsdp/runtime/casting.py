"""Dtypes of what enters and leaves a boundary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dmuon_fsdp.compat import tree_map


def cast_floats(tree: Any, dtype: torch.dtype | None) -> Any:
    """Every floating-point tensor of a module's input or output in ``dtype``; None changes nothing."""
    if dtype is None:
        return tree

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return tree_map(cast, tree)
