"""The fused passes of an update that a backend brings: loaded, checked against core's own, and kept."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from dmuon_core.formulas import apply_, momentum_
from dmuon_core.normalize import normalize_into
from dmuon_core.syrk.contract import SyrkSpec, UpdateFns
from dmuon_core.syrk.extras import CheckedExtras

_extras: CheckedExtras[UpdateFns | None] = CheckedExtras()


def update_of(specs: Iterable[SyrkSpec], device: torch.device) -> UpdateFns | None:
    """The fused passes of the first of ``specs`` that brings some which load and compute right."""
    for spec in specs:
        if spec.update is not None:
            warning = f"the fused update of {spec.name!r} is left out on {device}"
            found = _extras.get(spec, device, spec.update, lambda fns: _complaint(fns, device), warning=warning)
            if found is not None:
                return found
    return None


def _complaint(fns: UpdateFns | None, device: torch.device) -> str | None:
    """Why stacks of small matrices do not come out as core computes them.

    Both layouts, padding, two scales, a learning rate on the device, and each pass once for a parameter that nobody has
    a gradient for.
    """
    if fns is None:
        return None
    generator = torch.Generator().manual_seed(0)
    shape = (3, 3, 20, 40)
    weight, grad, buffer = torch.randn(shape, dtype=torch.float32, device="cpu", generator=generator).to(device)
    presence = [None, torch.zeros((), dtype=torch.float32, device=device)]
    lr = torch.full((), 0.5, dtype=torch.float32, device=device)
    got, want = ([buffer.clone(), buffer.clone(), weight.clone(), weight.clone(), weight.clone()] for _ in range(2))
    outs, right = ([torch.empty(3, 32, 48, dtype=torch.float16, device=device) for _ in range(2)] for _ in range(2))
    copies = [torch.empty_like(weight, dtype=torch.float16) for _ in range(2)]

    fns.direct(
        [grad, grad.mT], [got[0], got[1].mT], [outs[0], outs[1].view(3, 48, 32)],
        momentum=0.9, nesterov=True, presence=presence,
    )  # fmt: skip
    factor = outs[0][:, :20, :40]
    fns.apply(
        [got[2], got[3].mT, got[4]], [factor, factor.mT, factor], [copies[0], None, copies[1]],
        lr=lr, weight_decay=0.1, scales=[2.0, 3.0, 2.0], presence=[None, None, presence[1]],
    )  # fmt: skip

    directions = [
        momentum_(want[i], grad, momentum=0.9, nesterov=True, presence=each) for i, each in enumerate(presence)
    ]
    normalize_into([directions[0], directions[1].mT], [right[0], right[1].view(3, 48, 32)])
    for i, scale in ((2, 2.0), (3, 3.0)):
        apply_(want[i], factor, lr=lr, weight_decay=0.1, scale=scale)

    # Entries of outs are around 1/28 in half precision, the others around 1 in float32: a few roundings.
    close = all(torch.allclose(a, b, rtol=0.0, atol=1e-4) for a, b in zip(outs, right, strict=True))
    close = close and all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(got, want, strict=True))
    exact = torch.equal(got[1], buffer) and torch.equal(got[4], weight)
    exact = exact and all(torch.equal(a, b.half()) for a, b in zip(copies, (got[2], got[4]), strict=True))
    return None if close and exact else "it computes wrong values in the check at load"
