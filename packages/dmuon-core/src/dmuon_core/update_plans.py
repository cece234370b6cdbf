"""The plan of an update: inputs are checked and sorted once, and the plan is found again while they look the same."""

from __future__ import annotations

import weakref
from collections import defaultdict

import torch

from dmuon_core import fused_plans
from dmuon_core.newton_schulz import NewtonSchulz
from dmuon_core.targets import Facts, Inputs
from dmuon_core.views import MatrixView

_KEPT = 256  # plans of one NewtonSchulz; an optimizer has one for each of its groups

_plans: weakref.WeakKeyDictionary[NewtonSchulz, tuple[UpdatePlan, ...]] = weakref.WeakKeyDictionary()
"""The latest first. Replaced whole, never changed: threads may share a NewtonSchulz."""


class UpdatePlan:
    """Of one list of parameters.

    Attributes:
        views: parsed.
        devices: of the weights.
        fusible: by device the parameters that fused passes take.
        others: those that they do not.
    """

    def __init__(self, inputs: Inputs, facts: Facts, adjust_lr_fn: str | None) -> None:
        self.views = [MatrixView.parse(view) for view in inputs.views]
        _check_shapes(inputs, self.views)
        self.facts = facts
        self.adjust_lr_fn = adjust_lr_fn
        self.devices = {weight.device for weight in inputs.weights}
        self.fusible: dict[torch.device, list[int]] = defaultdict(list)
        self.others: list[int] = []
        for i, weight in enumerate(inputs.weights):
            where = self.fusible[weight.device] if fused_plans.takes(inputs, i) else self.others
            where.append(i)
        self._fused: dict[torch.device, fused_plans.FusedPlan] = {}

    def fused(self, device: torch.device, inputs: Inputs, ns: NewtonSchulz) -> fused_plans.FusedPlan:
        """Of the parameters that are fusible on ``device``."""
        if device not in self._fused:
            indices = self.fusible[device]
            self._fused[device] = fused_plans.fuse(inputs, indices, self.views, self.adjust_lr_fn, ns)
        return self._fused[device]


def plan_of(inputs: Inputs, adjust_lr_fn: str | None, ns: NewtonSchulz) -> UpdatePlan:
    """The plan for inputs that look like these.

    Raises:
        ValueError: lists of different length, a weight twice, shapes that differ, or a view that cannot be read.
    """
    _check_lists(inputs)
    facts = inputs.facts()
    known = _plans.get(ns, ())
    for plan in known:
        if plan.adjust_lr_fn == adjust_lr_fn and plan.facts == facts:
            return plan
    plan = UpdatePlan(inputs, facts, adjust_lr_fn)
    _plans[ns] = (plan, *known)[:_KEPT]
    return plan


def _check_lists(inputs: Inputs) -> None:
    lists = inputs.weights, inputs.grads, inputs.buffers, inputs.views, inputs.presence, inputs.copies
    if len({len(each) for each in lists}) > 1:
        raise ValueError(
            f"weights, grads, buffers, views, presence and copies must have one entry a parameter, got "
            f"{', '.join(str(len(each)) for each in lists)}"
        )
    if len(set(map(id, inputs.weights))) < len(inputs.weights):
        raise ValueError("weights has one tensor twice: give every parameter once")


def _check_shapes(inputs: Inputs, views: list[MatrixView]) -> None:
    for i, (weight, grad, buffer) in enumerate(zip(inputs.weights, inputs.grads, inputs.buffers, strict=True)):
        if not weight.shape == grad.shape == buffer.shape:
            raise ValueError(
                f"weights[{i}], its gradient and its buffer must have one shape, got "
                f"{tuple(weight.shape)}, {tuple(grad.shape)}, {tuple(buffer.shape)}"
            )
        copy = inputs.copies[i]
        if copy is not None and copy.shape != weight.shape:
            raise ValueError(f"copies[{i}] must have its weight's shape {tuple(weight.shape)}, got {tuple(copy.shape)}")
        views[i].check(weight.shape, f"weights[{i}]")
