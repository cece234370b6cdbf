"""What an update works on: parameters with their gradients and momentum, and the options that they share."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dmuon_core.batching import Stack
from dmuon_core.formulas import LearningRate
from dmuon_core.views import MatrixView

Facts = list[tuple[object, ...]]
"""What tensors look like, an entry a parameter: see :meth:`Inputs.facts`."""


@dataclass(frozen=True)
class Options:
    """Of one call of ``muon_update_``, which describes them."""

    lr: LearningRate
    weight_decay: float
    momentum: float
    nesterov: bool
    adjust_lr_fn: str | None


@dataclass(frozen=True, eq=False)
class Inputs:
    """The lists of one call of ``muon_update_``, which describes them: one entry a parameter."""

    weights: Sequence[Tensor]
    grads: Sequence[Tensor]
    buffers: Sequence[Tensor]
    views: Sequence[MatrixView | str | None]
    presence: Sequence[Tensor | None]
    copies: Sequence[Tensor | None]

    @classmethod
    def of(
        cls,
        weights: Sequence[Tensor],
        grads: Sequence[Tensor],
        buffers: Sequence[Tensor],
        views: Sequence[MatrixView | str | None] | None,
        presence: Sequence[Tensor | None] | None,
        copies: Sequence[Tensor | None] | None,
    ) -> Inputs:
        """None stands for a list of None."""
        nothing = [None] * len(weights)
        return cls(
            weights,
            grads,
            buffers,
            nothing if views is None else views,
            nothing if presence is None else presence,
            nothing if copies is None else copies,
        )

    def facts(self) -> Facts:
        """All that is planned by, an entry a parameter: everything but values and where they lie.

        This runs for every parameter in every step, so it is written for speed.
        """
        return [
            (
                view, w.shape, w.stride(), w.dtype, w.device, g.shape, g.stride(), g.dtype, g.device, g.is_neg(),
                b.shape, b.stride(), b.dtype, b.device, None if p is None else (p.dtype, p.device),
                None if c is None else (c.shape, c.stride(), c.dtype, c.device),
            )
            for w, g, b, view, p, c in zip(
                self.weights, self.grads, self.buffers, self.views, self.presence, self.copies, strict=True
            )
        ]  # fmt: skip

    def target(self, i: int, view: MatrixView) -> Target:
        return Target(self.weights[i], self.grads[i], self.buffers[i], view, self.presence[i], self.copies[i])


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
        return matrix_shapes(self.view, self.weight.shape)

    @property
    def stacks(self) -> list[Stack]:
        return [Stack(*shape, self.buffer.dtype, self.weight.device) for shape in self.shapes]

    def blocks(self, x: Tensor) -> list[Tensor]:
        """The matrices of ``x``, one of the tensors above, as blocks ``[count, m, n]``, m ≤ n."""
        return [block.mT if block.shape[1] > block.shape[2] else block for block in self.view.to_matrices(x)]


@functools.lru_cache(maxsize=4096)
def matrix_shapes(view: MatrixView, shape: torch.Size) -> tuple[tuple[int, int, int], ...]:
    """(count, rows, columns) of every block of matrices that a view reads in a parameter of this shape."""
    return view.matrix_shapes(shape)
