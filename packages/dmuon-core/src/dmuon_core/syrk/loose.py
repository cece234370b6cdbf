"""The kernel that a backend brings where D need not equal its transpose bitwise: loaded, checked, and kept."""

from __future__ import annotations

import torch

from dmuon_core.syrk.contract import SyrkFn, SyrkSpec
from dmuon_core.syrk.extras import CheckedExtras

_extras: CheckedExtras[SyrkFn] = CheckedExtras()


def loose_kernel(spec: SyrkSpec, device: torch.device) -> SyrkFn | None:
    """What ``spec.load_loose`` gives; None where there is none, or it fails or computes wrong values on ``device``."""
    if spec.load_loose is None:
        return None
    warning = f"the inexact form of kernel {spec.name!r} is left out on {device}"
    return _extras.get(spec, device, spec.load_loose, lambda fn: _complaint(fn, device), warning=warning)


def _complaint(fn: SyrkFn, device: torch.device) -> str | None:
    """As at the load of an exact kernel: small integers, exact in half precision. All of C counts, so it is whole."""
    generator = torch.Generator().manual_seed(0)
    a, half = (torch.randint(-2, 3, (2, 144, k), device="cpu", generator=generator).float() for k in (64, 144))
    c = half + half.mT
    got = fn(a.to(device, torch.float16), None, c.to(device, torch.float16), alpha=1.0, beta=2.0)
    wrong = int((got.cpu().float() != a @ a.mT + 2 * c).sum())
    return f"it computes wrong values ({wrong} in the check at load)" if wrong else None
