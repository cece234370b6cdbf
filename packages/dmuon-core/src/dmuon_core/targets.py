"""What an update works on: parameters with their gradients and momentum, and the options that they share."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from dmuon_core.batching import Stack
from dmuon_core.formulas import LearningRate
from dmuon_core.views import MatrixView


@dataclass(frozen=True)
class Options:
    """Of one call of ``muon_update_``, which describes them."""

    lr: LearningRate
    weight_decay: float
    momentum: float
    nesterov: bool
    adjust_lr_fn: str | None


@dataclass(frozen=True, eq=False)
class Target:
    """One parameter.

    Attributes:
        weight, grad, buffer: of one shape.
        view: how its matrices are read.
        presence: None, or 0-dim, 0 where no rank had a gradient.
        copy: None, or where the new weight goes once more, in the dtype of that tensor.
    """

    weight: Tensor
    grad: Tensor
    buffer: Tensor
    view: MatrixView
    presence: Tensor | None
    copy: Tensor | None

    @property
    def shapes(self) -> tuple[tuple[int, int, int], ...]:
        """(count, rows, columns) of every block of matrices."""
        return _matrix_shapes(self.view, self.weight.shape)

    @property
    def stacks(self) -> list[Stack]:
        return [Stack(*shape, self.buffer.dtype, self.weight.device) for shape in self.shapes]

    def blocks(self, x: Tensor) -> list[Tensor]:
        """The matrices of ``x``, one of the tensors above, as blocks ``[count, m, n]``, m ≤ n."""
        return [block.mT if block.shape[1] > block.shape[2] else block for block in self.view.to_matrices(x)]


@functools.lru_cache(maxsize=4096)
def _matrix_shapes(view: MatrixView, shape: torch.Size) -> tuple[tuple[int, int, int], ...]:
    return view.matrix_shapes(shape)
