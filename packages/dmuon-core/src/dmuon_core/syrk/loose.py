"""The kernel that a backend brings where D need not equal its transpose bitwise: loaded, checked, and kept."""

from __future__ import annotations

import threading

import torch

from dmuon_core.notices import warn_once
from dmuon_core.syrk.contract import SyrkFn, SyrkSpec
from dmuon_core.syrk.discovery import describe_error
from dmuon_core.syrk.products import is_capturing

_checked: dict[tuple[SyrkSpec, str], SyrkFn | None] = {}
_checking = threading.Lock()


def loose_kernel(spec: SyrkSpec, device: torch.device) -> SyrkFn | None:
    """What ``spec.load_loose`` gives; None where there is none, or it fails or computes wrong values on ``device``."""
    if spec.load_loose is None:
        return None
    key = (spec, str(device))
    with _checking:
        if key not in _checked and is_capturing(device):
            return None
        if key not in _checked:
            try:
                fn = spec.load_loose()
                complaint = _complaint(fn, device)
            except Exception as error:
                complaint = f"its inexact kernel failed: {describe_error(error)}"
            if complaint is not None:
                warn_once(f"dmuon: kernel {spec.name!r} is always exact on {device}: {complaint}")
            _checked[key] = None if complaint else fn
        return _checked[key]


def _complaint(fn: SyrkFn, device: torch.device) -> str | None:
    """As at the load of an exact kernel: small integers, exact in half precision. All of C counts, so it is whole."""
    generator = torch.Generator().manual_seed(0)
    a, half = (torch.randint(-2, 3, (2, 144, k), generator=generator).float() for k in (64, 144))
    c = half + half.mT
    got = fn(a.to(device, torch.float16), None, c.to(device, torch.float16), alpha=1.0, beta=2.0)
    wrong = int((got.cpu().float() != a @ a.mT + 2 * c).sum())
    return f"its inexact kernel computes wrong values ({wrong} in the check at load)" if wrong else None
