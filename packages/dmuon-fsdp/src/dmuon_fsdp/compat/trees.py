"""Nested arguments and outputs, taken apart and put together: `torch.utils.pytree` is not in torch 2.11."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = ["tensors_with_grad", "tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"]


def tensors_with_grad(tree: Any) -> list[Tensor]:
    """Every tensor of a module's input or output that takes part in autograd; dataclasses and mappings included."""
    found: list[Tensor] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[Tensor]) -> None:
    if isinstance(tree, Tensor):
        if tree.requires_grad:
            found.append(tree)
    elif isinstance(tree, Mapping):
        for value in tree.values():
            _collect(value, found)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            _collect(value, found)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for entry in dataclasses.fields(tree):
            _collect(getattr(tree, entry.name), found)
