"""The Muon update on lists of plain tensors: what ``Muon.step`` calls, and what other stacks can reuse.

    M ← μ·M + G;  U ← G + μ·M (Nesterov) or M;  O ← NS(U);  W ← W·(1 − lr·wd) − lr·s·O

``dmuon_core.formulas`` has them on one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dmuon_core import fused_passes, passes
from dmuon_core.coefficients import CoefficientsLike
from dmuon_core.formulas import LearningRate, lr_scale
from dmuon_core.newton_schulz import NewtonSchulz
from dmuon_core.targets import Options, Target
from dmuon_core.views import MatrixView

__all__ = ["LearningRate", "lr_scale", "muon_update_"]


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
    copies: Sequence[Tensor | None] | None = None,
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
        copies: for each weight None, or a tensor of its shape that takes the new weight, rounded to that tensor's
            dtype: what a forward computes with, written while the weight is at hand.

    Kernels that take all of this in three passes run where they can: half-precision Newton-Schulz on a GPU, not
    deterministic, contiguous weights, buffers and copies in float32, float16 or bfloat16, everything on one device.

    Raises:
        ValueError: lists of different length, a weight twice, shapes that differ, a weight that its view cannot read,
            or an ``lr`` with more than one element or on another device.
    """
    ns = newton_schulz if newton_schulz is not None else NewtonSchulz()
    nothing = [None] * len(weights)
    parsed = [MatrixView.parse(view) for view in (nothing if views is None else views)]
    present, copied = nothing if presence is None else presence, nothing if copies is None else copies
    _check_lists(weights, grads, buffers, parsed, present, copied)
    _check_lr(lr, weights)
    schedule = ns.schedule(ns_steps, ns_coefficients)
    options = Options(lr, weight_decay, momentum, nesterov, adjust_lr_fn)
    parts = zip(weights, grads, buffers, parsed, present, copied, strict=True)
    targets = [Target(*each) for each in parts]
    others: list[Target] = []
    for device, here in _by_device(targets).items():
        fns = ns.update_fns(device)
        fused: list[Target] = []
        for target in here:
            (fused if fns is not None and fused_passes.takes(target) else others).append(target)
        if fns is not None and fused:
            fused_passes.update_(fused, options, ns, schedule, fns)
    passes.update_(others, options, ns, schedule)


def _check_lr(lr: LearningRate, weights: Sequence[Tensor]) -> None:
    if not isinstance(lr, Tensor):
        return
    if lr.numel() != 1:
        raise ValueError(f"lr must be a number or a one-element tensor, got shape {tuple(lr.shape)}")
    others = {str(weight.device) for weight in weights} - {str(lr.device)}
    if lr.device.type != "cpu" and others:
        raise ValueError(
            f"lr is on {lr.device}, weights are on {', '.join(sorted(others))}: give a number or a CPU tensor"
        )


def _by_device(targets: Sequence[Target]) -> dict[torch.device, list[Target]]:
    found: dict[torch.device, list[Target]] = {}
    for target in targets:
        found.setdefault(target.weight.device, []).append(target)
    return found


def _check_lists(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    buffers: Sequence[Tensor],
    views: Sequence[MatrixView],
    presence: Sequence[Tensor | None],
    copies: Sequence[Tensor | None],
) -> None:
    lists = weights, grads, buffers, views, presence, copies
    if len({len(each) for each in lists}) > 1:
        raise ValueError(
            f"weights, grads, buffers, views, presence and copies must have one entry a parameter, got "
            f"{', '.join(str(len(each)) for each in lists)}"
        )
    if len({id(weight) for weight in weights}) < len(weights):
        raise ValueError("weights has one tensor twice: give every parameter once")
    for i, (weight, grad, buffer, view) in enumerate(zip(weights, grads, buffers, views, strict=True)):
        if not weight.shape == grad.shape == buffer.shape:
            raise ValueError(
                f"weights[{i}], its gradient and its buffer must have one shape, got "
                f"{tuple(weight.shape)}, {tuple(grad.shape)}, {tuple(buffer.shape)}"
            )
        copy = copies[i]
        if copy is not None and copy.shape != weight.shape:
            raise ValueError(f"copies[{i}] must have its weight's shape {tuple(weight.shape)}, got {tuple(copy.shape)}")
        view.check(weight.shape, f"weights[{i}]")
