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
    """Why two small stacks, one of them transposed, one without a gradient, do not come out as core computes them."""
    if fns is None:
        return None
    generator = torch.Generator().manual_seed(0)
    weight, grad, buffer = torch.randn(3, 3, 20, 40, generator=generator).to(device)
    absent = torch.zeros((), device=device)
    got, want = ([weight.clone(), buffer.clone(), buffer.clone()] for _ in range(2))
    outs, right = ([torch.empty(3, 32, 48, dtype=torch.float16, device=device) for _ in range(2)] for _ in range(2))
    copy = torch.empty_like(weight, dtype=torch.float16)

    fns.direct(
        [grad, grad.mT], [got[1], got[2].mT], [outs[0], outs[1].view(3, 48, 32)],
        momentum=0.9, nesterov=True, presence=[None, absent],
    )  # fmt: skip
    fns.apply([got[0]], [outs[0][:, :20, :40]], [copy], lr=0.5, weight_decay=0.1, scales=[2.0], presence=[None])

    directions = [
        momentum_(want[1], grad, momentum=0.9, nesterov=True),
        momentum_(want[2], grad, momentum=0.9, nesterov=True, presence=absent).mT,
    ]
    normalize_into(directions, [right[0], right[1].view(3, 48, 32)])
    apply_(want[0], outs[0][:, :20, :40], lr=0.5, weight_decay=0.1, scale=2.0)
    # Entries of outs are around 1/28 in half precision, the others around 1 in float32: a few roundings.
    close = all(torch.allclose(a, b, rtol=0.0, atol=1e-4) for a, b in zip(outs, right, strict=True))
    close = close and all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(got, want, strict=True))
    exact = torch.equal(got[2], buffer) and torch.equal(copy, got[0].to(torch.float16))
    return None if close and exact else "it computes wrong values in the check at load"
