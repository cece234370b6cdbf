"""The Muon update on lists of plain tensors: what ``Muon.step`` calls, and what other stacks can reuse.

    M ← μ·M + G;  U ← G + μ·M (Nesterov) or M;  O ← NS(U);  W ← W·(1 − lr·wd) − lr·s·O

M is stored as torch.optim.Muon stores it, scaled by (1 − μ): a positive factor, which Newton-Schulz divides out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dmuon_core.batching import Batch, Piece, Stack
from dmuon_core.coefficients import CoefficientsLike
from dmuon_core.newton_schulz import NewtonSchulz
from dmuon_core.views import MatrixView

LearningRate = float | Tensor

_LR_SCALES: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "spectral_unclamped": lambda rows, columns: math.sqrt(rows / columns),
}


def lr_scale(adjust_lr_fn: str | None, rows: int, columns: int) -> float:
    """The factor s on the learning rate of a ``[rows, columns]`` matrix.

    Args:
        adjust_lr_fn: ``"original"`` (also None), √max(1, rows/columns), Keller Jordan; ``"match_rms_adamw"``,
            0.2·√max(rows, columns), Moonshot AI, arXiv 2502.16982; ``"spectral_unclamped"``, √(rows/columns).

    Raises:
        ValueError: another name.
    """
    name = adjust_lr_fn or "original"
    if name not in _LR_SCALES:
        raise ValueError(
            f"adjust_lr_fn must be None or one of {', '.join(map(repr, _LR_SCALES))}, got {adjust_lr_fn!r}"
        )
    return _LR_SCALES[name](rows, columns)


def momentum_(
    buffer: Tensor, grad: Tensor, *, momentum: float, nesterov: bool, presence: Tensor | None = None
) -> Tensor:
    """Update ``buffer`` in place; return the direction to orthogonalize, in its dtype (may alias it).

    Args:
        presence: 0-dim, 0 leaves the buffer as it is; None is 1.
    """
    grad = grad.to(buffer.dtype)
    if presence is None:
        buffer.lerp_(grad, 1 - momentum)
    else:
        buffer.lerp_(grad, (presence * (1 - momentum)).to(buffer.dtype))
    return grad.lerp(buffer, momentum) if nesterov else buffer


def apply_(
    weight: Tensor,
    update: Tensor,
    *,
    lr: LearningRate,
    weight_decay: float,
    scale: float,
    presence: Tensor | None = None,
) -> None:
    """W ← W·(1 − lr·weight_decay) − lr·scale·update, in place. A tensor ``lr`` stays on its device.

    Args:
        presence: 0-dim, 0 leaves the weight as it is; None is 1.
    """
    if isinstance(lr, Tensor):
        lr = lr.reshape(())
    rate = lr if presence is None else lr * presence
    weight.mul_(1 - rate * weight_decay)
    if isinstance(rate, Tensor):
        weight.sub_(update.to(weight.dtype) * (rate * scale))
    else:
        weight.add_(update, alpha=-rate * scale)


@torch.no_grad()
def muon_update_(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    buffers: Sequence[Tensor],
    *,
    lr: LearningRate,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    newton_schulz: NewtonSchulz | None = None,
    ns_steps: int | None = None,
    ns_coefficients: CoefficientsLike = None,
    adjust_lr_fn: str | None = None,
    views: Sequence[MatrixView | str | None] | None = None,
    presence: Sequence[Tensor | None] | None = None,
) -> None:
    """One Muon step on whole matrices, in place. Matrices of equal shape, up to transposition, go as one batch.

    Args:
        weights: the parameters, plain tensors of any real floating dtype.
        grads: same shapes.
        buffers: momentum, same shapes, updated in place; zeros before the first step.
        lr: number, or a one-element tensor on the CPU or the weights' device (never read by the host).
        weight_decay: decoupled; multiplies the unscaled lr.
        newton_schulz: None makes one with the defaults; keep one where calls repeat.
        ns_steps, ns_coefficients: None takes those of ``newton_schulz``.
        adjust_lr_fn: see :func:`lr_scale`; rows and columns are those of the matrix in the view.
        views: one for each weight; None reads every weight as one matrix.
        presence: for each weight None, or a 0-dim tensor on its device that is 0 where no rank had a gradient: then
            momentum and weight stay bitwise as they are, without the host knowing.

    Raises:
        ValueError: lists of different length, shapes that differ, or a weight that its view cannot read.
    """
    ns = newton_schulz if newton_schulz is not None else NewtonSchulz()
    parsed = [MatrixView.parse(view) for view in (views if views is not None else [None] * len(weights))]
    present = presence if presence is not None else [None] * len(weights)
    _check_lists(weights, grads, buffers, parsed)
    schedule = ns.schedule(ns_steps, ns_coefficients)
    shapes = [_matrix_shapes(view, weight.shape) for weight, view in zip(weights, parsed, strict=True)]

    def directions(i: int) -> tuple[Tensor, ...]:
        u = momentum_(buffers[i], grads[i], momentum=momentum, nesterov=nesterov, presence=present[i])
        return parsed[i].to_matrices(u)

    def apply(i: int, blocks: Sequence[Tensor]) -> None:
        scales = [lr_scale(adjust_lr_fn, rows, columns) for _, rows, columns in shapes[i]]
        if len(set(scales)) > 1:
            wide = torch.promote_types(ns.dtype, torch.float32)
            blocks = [block.to(wide) * scale for block, scale in zip(blocks, scales, strict=True)]
            scales = [1.0]
        update = parsed[i].from_matrices(blocks, weights[i].shape)
        apply_(weights[i], update, lr=lr, weight_decay=weight_decay, scale=scales[0], presence=present[i])

    places = [(i, j) for i, blocks in enumerate(shapes) for j in range(len(blocks))]
    pending = _Pending(shapes, places, directions, apply)
    for batch in ns.batches([Stack(*shapes[i][j], buffers[i].dtype, weights[i].device) for i, j in places]):
        with ns.factors([pending.matrices(piece) for piece in batch], schedule) as factors:
            pending.add(batch, factors)


def _check_lists(
    weights: Sequence[Tensor], grads: Sequence[Tensor], buffers: Sequence[Tensor], views: Sequence[MatrixView]
) -> None:
    if not len(weights) == len(grads) == len(buffers) == len(views):
        raise ValueError(
            f"weights, grads, buffers and views must have one entry a parameter, got "
            f"{len(weights)}, {len(grads)}, {len(buffers)} and {len(views)}"
        )
    for i, (weight, grad, buffer, view) in enumerate(zip(weights, grads, buffers, views, strict=True)):
        if not weight.shape == grad.shape == buffer.shape:
            raise ValueError(
                f"weights[{i}], its gradient and its buffer must have one shape, got "
                f"{tuple(weight.shape)}, {tuple(grad.shape)}, {tuple(buffer.shape)}"
            )
        view.check(weight.shape, f"weights[{i}]")


@functools.lru_cache(maxsize=4096)
def _matrix_shapes(view: MatrixView, shape: torch.Size) -> tuple[tuple[int, int, int], ...]:
    return view.matrix_shapes(shape)


class _Pending:
    """The parameters of one step, each applied when the factors of all its matrices are there.

    Batches cut across parameters, and a batch's factors are there for a moment only. So momentum is taken when a
    parameter's first matrix is due, and its update is applied with its last: no more directions and factors exist at a
    time than a batch needs.
    """

    def __init__(
        self,
        shapes: Sequence[Sequence[tuple[int, int, int]]],
        places: Sequence[tuple[int, int]],
        directions: Callable[[int], tuple[Tensor, ...]],
        apply: Callable[[int, Sequence[Tensor]], None],
    ) -> None:
        self._places = places
        self._left = [sum(count for count, _, _ in blocks) for blocks in shapes]
        self._tall = [[rows > columns for _, rows, columns in blocks] for blocks in shapes]
        self._factors: list[list[list[Tensor]]] = [[[] for _ in blocks] for blocks in shapes]
        self._directions: dict[int, tuple[Tensor, ...]] = {}
        self._take = directions
        self._apply = apply

    def matrices(self, piece: Piece) -> Tensor:
        """``[count, m, n]``, m ≤ n, of the direction."""
        i, j = self._places[piece.stack]
        if i not in self._directions:
            self._directions[i] = self._take(i)
        block = self._directions[i][j]
        return (block.mT if self._tall[i][j] else block)[piece.start : piece.stop]

    def add(self, batch: Batch, factors: Sequence[Tensor]) -> None:
        """Take the factors of a batch: apply what is complete, keep the others."""
        added = []
        for piece, factor in zip(batch, factors, strict=True):
            i, j = self._places[piece.stack]
            self._factors[i][j].append(factor.mT if self._tall[i][j] else factor)
            self._left[i] -= piece.stop - piece.start
            added.append((i, j))
        for i, j in dict.fromkeys(added):
            if self._left[i]:
                self._factors[i][j][-1] = self._factors[i][j][-1].clone()
        for i in dict.fromkeys(i for i, _ in added):
            if not self._left[i]:
                self._apply(i, [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in self._factors[i]])
                self._factors[i] = []
                del self._directions[i]
