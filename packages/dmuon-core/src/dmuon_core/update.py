"""The Muon update on lists of plain tensors: what ``Muon.step`` calls, and what other stacks can reuse.

    M ← μ·M + G;  U ← G + μ·M (Nesterov) or M;  O ← NS(U);  W ← W·(1 − lr·wd) − lr·s·O

``dmuon_core.formulas`` has them on one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch
from torch import Tensor

from dmuon_core import fused_passes, passes
from dmuon_core.coefficients import CoefficientsLike
from dmuon_core.formulas import LearningRate, lr_scale
from dmuon_core.newton_schulz import NewtonSchulz
from dmuon_core.targets import Inputs, Options
from dmuon_core.update_plans import plan_of
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
    inputs = Inputs.of(weights, grads, buffers, views, presence, copies)
    plan = plan_of(inputs, adjust_lr_fn, ns)
    _check_lr(lr, plan.devices)
    schedule = ns.schedule(ns_steps, ns_coefficients)
    options = Options(lr, weight_decay, momentum, nesterov, adjust_lr_fn)
    others = list(plan.others)
    for device, indices in plan.fusible.items():
        fns = ns.update_fns(device)
        if fns is None:
            others += indices
        else:
            fused_passes.update_(plan.fused(device, inputs, ns), inputs, options, ns, schedule, fns)
    passes.update_([inputs.target(i, plan.views[i]) for i in sorted(others)], options, ns, schedule)


def _check_lr(lr: LearningRate, devices: Set[torch.device]) -> None:
    if not isinstance(lr, Tensor):
        return
    if lr.numel() != 1:
        raise ValueError(f"lr must be a number or a one-element tensor, got shape {tuple(lr.shape)}")
    others = {str(device) for device in devices} - {str(lr.device)}
    if lr.device.type != "cpu" and others:
        raise ValueError(
            f"lr is on {lr.device}, weights are on {', '.join(sorted(others))}: give a number or a CPU tensor"
        )
