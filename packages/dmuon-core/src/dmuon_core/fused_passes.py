"""The update in fused kernels, batch by batch: two passes over memory before Newton-Schulz, one after it.

A step sends the addresses of its tensors to the device, all in one table, and runs its plan.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from dmuon_core.fused_plans import Call, FusedPlan
from dmuon_core.newton_schulz import NewtonSchulz, Schedule
from dmuon_core.syrk.contract import TABLE, UpdateFns
from dmuon_core.targets import Inputs, Options

_ALIGNMENT = 16


def update_(
    plan: FusedPlan, inputs: Inputs, options: Options, ns: NewtonSchulz, schedule: Schedule, fns: UpdateFns
) -> None:
    """One step on the plan's parameters, whose tensors are shaped and laid out as when it was made."""
    if torch.compiler.is_compiling():
        # What the kernels write, they find by addresses: a compiler does not see it. Asked for late, since it imports
        # the compiler.
        torch.compiler.disable(_update)(plan, inputs, options, ns, schedule, fns)
    elif plan.batches:
        _update(plan, inputs, options, ns, schedule, fns)


def _update(
    plan: FusedPlan, inputs: Inputs, options: Options, ns: NewtonSchulz, schedule: Schedule, fns: UpdateFns
) -> None:
    grads = list(inputs.grads)
    for i in plan.strided:
        grads[i] = grads[i].contiguous()
    rows = plan.table(inputs, grads)
    unaligned = (rows[:, : TABLE.index("presence")] % _ALIGNMENT != 0).any(1)
    device = inputs.weights[plan.indices[0]].device
    # torch keeps pinned memory until the copy, for which the host does not wait, is done.
    table = (rows.pin_memory() if device.type == "cuda" else rows).to(device, non_blocking=True)
    # torch does not see what is written: autograd must refuse a backward through the weights of before.
    written = (inputs.weights, inputs.buffers, inputs.copies)
    increment_version([x for column in written for x in plan.of(column) if x is not None])
    for batch in plan.batches:
        launches = [_Launch(call, table, aligned=not unaligned[call.start : call.stop].any()) for call in batch.calls]

        def fill(outs: Sequence[Tensor], launches: Sequence[_Launch] = launches) -> None:
            for each in launches:
                each.direct(fns, outs, options)

        with ns.factors_of(batch.parts, schedule, device, fill) as factors:
            for each in launches:
                each.apply(fns, factors, options)


class _Launch:
    """A call of each pass, with its rows of this step's table."""

    def __init__(self, call: Call, table: Tensor, *, aligned: bool) -> None:
        self._call = call
        self._rows = table[call.start : call.stop]
        self._aligned = aligned

    def direct(self, fns: UpdateFns, outs: Sequence[Tensor], options: Options) -> None:
        out = outs[self._call.part]
        momentum, nesterov = options.momentum, options.nesterov
        fns.direct(self._rows, self._call.kind, out, momentum=momentum, nesterov=nesterov, aligned=self._aligned)

    def apply(self, fns: UpdateFns, factors: Sequence[Tensor], options: Options) -> None:
        factor = factors[self._call.part]
        lr, decay = options.lr, options.weight_decay
        fns.apply(self._rows, self._call.kind, factor, lr=lr, weight_decay=decay, aligned=self._aligned)
