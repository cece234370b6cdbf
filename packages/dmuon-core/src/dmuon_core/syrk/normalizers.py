"""The fused norm and cast that a backend brings: loaded, checked against core's own, and kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dmuon_core.normalize import normalize_into
from dmuon_core.syrk.contract import NormalizeFn, SyrkSpec
from dmuon_core.syrk.extras import CheckedExtras

_extras: CheckedExtras[NormalizeFn] = CheckedExtras()


def normalizer_of(specs: Iterable[SyrkSpec], device: torch.device) -> NormalizeFn:
    """The norm and cast of the first of ``specs`` that brings one which loads and computes right, else core's own."""
    for spec in specs:
        fused = _load_checked(spec, device)
        if fused is not None:
            return _with_fp64(fused)
    return normalize_into


def _with_fp64(fused: NormalizeFn) -> NormalizeFn:
    def normalize(matrices: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
        wide = any(x.dtype == torch.float64 for x in matrices)
        (normalize_into if wide else fused)(matrices, outs)

    return normalize


def _load_checked(spec: SyrkSpec, device: torch.device) -> NormalizeFn | None:
    if spec.normalize is None:
        return None
    warning = f"the fused norm and cast of {spec.name!r} is left out on {device}"
    return _extras.get(spec, device, spec.normalize, lambda fused: _complaint(fused, device), warning=warning)


def _complaint(fused: NormalizeFn, device: torch.device) -> str | None:
    """Why the result for two small stacks, one of them transposed, with padding and a zero matrix, is not core's."""
    x_BMN = torch.randn(3, 20, 40, dtype=torch.float32, device="cpu", generator=torch.Generator().manual_seed(0)).to(
        device
    )
    x_BMN[1] = 0
    matrices = [x_BMN, x_BMN.mT]
    got, want = (
        [torch.full((3, 48, 48), float("nan"), dtype=torch.float16, device=device) for _ in matrices] for _ in range(2)
    )
    fused(matrices, got)
    normalize_into(matrices, want)
    # Of entries around 1/28 in half precision, 1e-4 is three roundings.
    right = all(torch.allclose(a, b, rtol=0.0, atol=1e-4) for a, b in zip(got, want, strict=True))
    return None if right else "it computes wrong values in the check at load"
