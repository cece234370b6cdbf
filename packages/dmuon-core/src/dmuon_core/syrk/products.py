"""The whole products that a backend brings: loaded, checked in the configuration that is to run, and kept."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from dmuon_core.notices import warn_once
from dmuon_core.syrk.contract import ProductSpec
from dmuon_core.syrk.discovery import describe_error

_checked: dict[tuple[ProductSpec, str, torch.dtype, bool, str], Callable[..., Tensor] | None] = {}
_checking = threading.Lock()


def checked_product(
    name: str, product: ProductSpec, config: str, *, dtype: torch.dtype, by_columns: bool, device: torch.device
) -> Callable[..., Tensor] | None:
    """``fn(a, b, out=...)`` in this configuration, or None where it fails or computes wrong values on ``device``.

    Args:
        name: the backend's, for the warning.
        by_columns: whether B and the result are column-major.
    """
    key = (product, config, dtype, by_columns, str(device))
    with _checking:
        if key not in _checked:
            try:
                fn = functools.partial(product.load(), config=config)
                complaint = _complaint(fn, dtype, by_columns, device)
            except Exception as error:
                complaint = f"it failed: {describe_error(error)}"
            if complaint is not None:
                warn_once(f"dmuon: the product of {name!r} in {config} is left out on {device}: {complaint}")
            _checked[key] = None if complaint else fn
        return _checked[key]


def _complaint(fn: Callable[..., Tensor], dtype: torch.dtype, by_columns: bool, device: torch.device) -> str | None:
    """A product that any right kernel gets: ones, zeros and minus ones, whose sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-1, 2, (2, *shape), generator=generator).float() for shape in ((264, 136), (136, 280)))
    want = a @ b
    b, out = b.to(device, dtype), torch.full((2, 264, 280), float("nan"), dtype=dtype, device=device)
    if by_columns:
        b, out = b.mT.contiguous().mT, out.mT.contiguous().mT
    fn(a.to(device, dtype), b, out=out)
    wrong = int((out.float().cpu() != want).sum())
    return f"it computes wrong values ({wrong} of {want.numel()} in the check at load)" if wrong else None
