"""The Muon update on lists of plain tensors: what ``Muon.step`` calls, and what other stacks can reuse.

    M ← μ·M + G;  U ← G + μ·M (Nesterov) or M;  O ← NS(U);  W ← W·(1 − lr·wd) − lr·s·O

M is stored as torch.optim.Muon stores it, scaled by (1 − μ): a positive factor, which Newton-Schulz divides out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dmuon_core.coefficients import CoefficientsLike
from dmuon_core.newton_schulz import NewtonSchulz, Schedule
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
    directions = [
        momentum_(buffer, grad, momentum=momentum, nesterov=nesterov, presence=p)
        for buffer, grad, p in zip(buffers, grads, present, strict=True)
    ]
    updates = orthogonalize_all(directions, parsed, ns, ns.schedule(ns_steps, ns_coefficients))
    for weight, blocks, view, p in zip(weights, updates, parsed, present, strict=True):
        if not weight.numel():
            continue
        scales = [lr_scale(adjust_lr_fn, block.shape[-2], block.shape[-1]) for block in blocks]
        if len(set(scales)) > 1:
            wide = torch.promote_types(ns.dtype, torch.float32)
            blocks = [block.to(wide) * scale for block, scale in zip(blocks, scales, strict=True)]
            scales = [1.0]
        update = view.from_matrices(blocks, weight.shape)
        apply_(weight, update, lr=lr, weight_decay=weight_decay, scale=scales[0], presence=p)


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


@dataclass(frozen=True)
class _Place:
    """Where a block came from, and how it stands in its batch."""

    parameter: int
    block: int
    tall: bool


def orthogonalize_all(
    directions: Sequence[Tensor], views: Sequence[MatrixView], ns: NewtonSchulz, schedule: Schedule
) -> list[list[Tensor]]:
    """The orthogonal factors of every direction's matrices, ``[count, m, n]`` a block, batched by shape."""
    batches: dict[tuple[object, ...], list[tuple[_Place, Tensor]]] = defaultdict(list)
    results: list[list[Tensor]] = []
    for i, (direction, view) in enumerate(zip(directions, views, strict=True)):
        blocks = view.to_matrices(direction)
        results.append(list(blocks))
        for j, block in enumerate(blocks):
            tall = block.shape[-2] > block.shape[-1]
            wide = block.mT if tall else block
            key = (*wide.shape[-2:], wide.dtype, wide.device)
            batches[key].append((_Place(i, j, tall), wide))
    for members in batches.values():
        counts = [wide.shape[0] for _, wide in members]
        stacked = members[0][1] if len(members) == 1 else torch.cat([wide for _, wide in members])
        factors = torch.split(ns.orthogonalize(stacked, schedule), counts)
        for (place, _), factor in zip(members, factors, strict=True):
            results[place.parameter][place.block] = factor.mT if place.tall else factor
    return results
