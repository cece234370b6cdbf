"""The formulas of an update on one tensor, in torch.

M is stored as torch.optim.Muon stores it, scaled by (1 − μ): a positive factor, which Newton-Schulz divides out.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

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
        buffer.lerp_(grad, (_wide(presence, buffer) * (1 - momentum)).to(buffer.dtype))
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
    rate = lr if presence is None else lr * _wide(presence, weight)
    weight.mul_(1 - rate * weight_decay)
    if isinstance(rate, Tensor):
        weight.sub_(update.to(weight.dtype) * (rate * scale))
    else:
        weight.add_(update, alpha=-rate * scale)


def _wide(presence: Tensor, of: Tensor) -> Tensor:
    """0 and 1 are exact in any dtype; what they are multiplied by is not."""
    return presence.to(torch.promote_types(of.dtype, torch.float32))
