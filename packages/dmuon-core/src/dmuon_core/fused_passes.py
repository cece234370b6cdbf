"""The update in fused kernels, batch by batch: two passes over memory before Newton-Schulz, one after it.

A step sends the addresses of its tensors to the device, all in one table, and runs its plan.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    if not plan.batches:
        return
    grads = list(inputs.grads)
    for i in plan.strided:
        grads[i] = grads[i].contiguous()
    rows = plan.table(inputs, grads)
    odd = (rows[:, : TABLE.index("presence")] % _ALIGNMENT != 0).any(1)
    device = inputs.weights[plan.indices[0]].device
    # torch keeps pinned memory until the copy, for which the host does not wait, is done.
    table = (rows.pin_memory() if device.type == "cuda" else rows).to(device, non_blocking=True)
    # torch does not see what is written: autograd must refuse a backward through the weights of before.
    written = (inputs.weights, inputs.buffers, inputs.copies)
    increment_version([x for column in written for x in plan.of(column) if x is not None])
    for batch in plan.batches:
        lots = [(call, table[call.start : call.stop], not odd[call.start : call.stop].any()) for call in batch.calls]

        def fill(outs: Sequence[Tensor], lots: Sequence[tuple[Call, Tensor, bool]] = lots) -> None:
            momentum, nesterov = options.momentum, options.nesterov
            for call, part, aligned in lots:
                fns.direct(part, call.kind, outs[call.part], momentum=momentum, nesterov=nesterov, aligned=aligned)

        with ns.factors_of(batch.parts, schedule, device, fill) as factors:
            for call, part, aligned in lots:
                factor, decay = factors[call.part], options.weight_decay
                fns.apply(part, call.kind, factor, lr=options.lr, weight_decay=decay, aligned=aligned)
