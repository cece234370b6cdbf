"""The whole products that a backend brings: loaded, checked in the configuration that is to run, and kept."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from dmuon_core.syrk.contract import ProductSpec
from dmuon_core.syrk.extras import CheckedExtras

_extras: CheckedExtras[Callable[..., Tensor]] = CheckedExtras()


def checked_product(
    name: str,
    product: ProductSpec,
    config: str,
    *,
    dtype: torch.dtype,
    columns: tuple[bool, bool],
    device: torch.device,
) -> Callable[..., Tensor] | None:
    """``fn(a, b, out=...)`` in this configuration, or None where it fails or computes wrong values on ``device``.

    Args:
        name: the backend's, for the warning.
        columns: whether B is column-major, and whether the result is. Each layout may be another kernel.
    """
    return _extras.get(
        (product, config, dtype, columns),
        device,
        lambda: functools.partial(product.load(), config=config),
        lambda fn: _complaint(fn, dtype, columns, device),
        warning=f"the product of {name!r} in {config} is left out on {device}",
    )


def _complaint(
    fn: Callable[..., Tensor], dtype: torch.dtype, columns: tuple[bool, bool], device: torch.device
) -> str | None:
    """A product that any right kernel gets: ones, zeros and minus ones, whose sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(0)
    a, b = (
        torch.randint(-1, 2, (2, *shape), device="cpu", generator=generator).float()
        for shape in ((264, 136), (136, 280))
    )
    want = a @ b
    b, out = b.to(device, dtype), torch.full((2, 264, 280), float("nan"), dtype=dtype, device=device)
    b, out = (x.mT.contiguous().mT if turned else x for x, turned in zip((b, out), columns, strict=True))
    fn(a.to(device, dtype), b, out=out)
    wrong = int((out.float().cpu() != want).sum())
    return f"it computes wrong values ({wrong} of {want.numel()} in the check at load)" if wrong else None
