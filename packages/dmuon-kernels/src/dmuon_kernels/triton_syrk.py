"""The Triton backend: symmetric products by the two Triton kernels.

Legend: B matrices, M rows, K columns.
"""

from __future__ import annotations

import contextlib
import functools

import torch
from torch import Tensor

from dmuon_core.syrk.contract import Scalar, check_operands, check_scalars
from dmuon_kernels.probes import has_tma, triton_rejects
from dmuon_kernels.routes import lasting_compiler_complaint, run
from dmuon_kernels.triton_config import AnyConfig, parse_config
from dmuon_kernels.triton_launch import Operands, Scalars, choose, plan

_INTERPRETED_SMS = 4
"""Multiprocessors that the interpreter's device has, so that small products have tiles to split."""


def triton_syrk(
    a: Tensor,
    b: Tensor | None = None,
    c: Tensor | None = None,
    *,
    alpha: Scalar = 1.0,
    beta: Scalar = 0.0,
    out: Tensor | None = None,
    sms: int | None = None,
    config: AnyConfig | str | None = None,
    tile_step: int = 1,
) -> Tensor:
    """``alpha * a @ b.mT + beta * c`` for fp16 and bf16, as ``dmuon_core.syrk.contract`` says.

    Args:
        a: [*, M, K], K- or M-major.
        b: as ``a``; None for ``a`` itself.
        c: [*, M, M], any strides; only its lower triangle is read.
        alpha: a float, or an fp32 tensor on a's device: 0-d, or one value per batch item.
        beta: likewise.
        out: [*, M, M], its own memory or ``c`` itself.
        sms: only so many programs run as fit on that many multiprocessors; they then loop over the tiles.
        config: instead of the configuration for this shape; or its label.
        tile_step: permutes the order of the tiles; prime to their number. For tests.

    Raises:
        ValueError: operands outside the contract, or that ``triton_rejects`` names, or that ``config`` cannot take.
    """
    check_operands(a, b, c, beta, out)
    check_scalars(a, alpha, beta)
    refusal = triton_rejects(a, b, c)
    if refusal is not None:
        raise ValueError(f"syrk: the Triton kernel {refusal}")
    if sms is not None and sms < 1:
        raise ValueError(f"syrk: sms must be at least 1, got {sms}")
    batch, m = a.shape[:-2], a.shape[-2]
    d = a.new_empty((*batch, m, m)) if out is None else out
    if d.numel() == 0:
        return d
    reads_c = isinstance(beta, Tensor) or beta != 0.0
    a_BMK, d_BMM = _as_batch(a), _stored(d)
    b_BMK = None if b is None else _as_batch(b)
    c_BMM = _as_batch(c) if c is not None and reads_c else None
    operands = Operands(a_BMK, b_BMK, c_BMM, d_BMM, Scalars.of(alpha, beta))
    if isinstance(config, str):
        config = parse_config(config)
    config = config or choose(operands, descriptors=has_tma(a.device))
    launch = plan(operands, config, _multiprocessors(a.device), sms=sms, tile_step=tile_step)
    with _on_device(a.device):
        run(launch, a.device)
    if d_BMM.data_ptr() != d.data_ptr():
        d.copy_(d_BMM.view(d.shape))
    return d


def _as_batch(x: Tensor) -> Tensor:
    """[*, M, N] as [B, M, N]: a view where the leading dimensions collapse into one, else a copy."""
    return x if x.ndim == 3 else x.reshape(x.shape[:-2].numel(), *x.shape[-2:])


def _stored(d: Tensor) -> Tensor:
    """``d`` as [B, M, M], or other memory for the result where no kernel stores into ``d``."""
    if d.is_cuda and d.stride(-1) != 1 and lasting_compiler_complaint() is not None:
        return d.new_empty((d.shape[:-2].numel(), *d.shape[-2:]))
    return _as_batch(d)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Kernels are launched on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
