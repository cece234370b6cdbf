"""The host side of the Triton kernels. Importing this module imports triton.

Legend: B matrices, M rows, K columns.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dmuon_core.syrk.contract import Scalar, check_operands, check_scalars
from dmuon_kernels.arrivals import arrival_counters
from dmuon_kernels.probes import has_tma, tma_complaint, triton_rejects
from dmuon_kernels.tma_kernel import syrk_tma_kernel
from dmuon_kernels.triton_config import (
    AnyConfig,
    TmaConfig,
    TritonConfig,
    choose_config,
    choose_tma_config,
    count_tiles,
    parse_config,
)
from dmuon_kernels.triton_kernel import syrk_kernel

_INTERPRETED = not isinstance(syrk_kernel, triton.JITFunction)
_LARGEST_GRID = 2**31 - 1
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
    a_BMK, d_BMM = _as_batch(a), _as_batch(d)
    b_BMK = None if b is None else _as_batch(b)
    c_BMM = _as_batch(c) if c is not None and reads_c else None
    operands = _Operands(a_BMK, b_BMK, c_BMM, d_BMM, _Scalars.of(alpha, beta))
    _launch(operands, parse_config(config) if isinstance(config, str) else config, sms, tile_step)
    if d_BMM.data_ptr() != d.data_ptr():
        # The leading dimensions of ``out`` do not collapse into one: the result is in a copy.
        d.copy_(d_BMM.view(d.shape))
    return d


@dataclass(frozen=True)
class _Scalars:
    """alpha and beta as the kernels take them: a float, or a pointer with a stride per batch item."""

    alpha: Scalar
    alpha_stride: int
    beta: Scalar
    beta_stride: int

    @classmethod
    def of(cls, alpha: Scalar, beta: Scalar) -> _Scalars:
        return cls(*_kernel_scalar(alpha), *_kernel_scalar(beta))


def _kernel_scalar(scalar: Scalar) -> tuple[Scalar, int]:
    if not isinstance(scalar, Tensor):
        return float(scalar), 0
    if scalar.ndim == 0:
        return scalar, 0
    flat_B = scalar.reshape(-1)
    return flat_B, flat_B.stride(0)


@dataclass(frozen=True)
class _Operands:
    """What one launch reads and writes. b: None for a. c: None where it is not read."""

    a: Tensor  # [B, M, K]
    b: Tensor | None  # [B, M, K]
    c: Tensor | None  # [B, M, M]
    d: Tensor  # [B, M, M]
    scalars: _Scalars


def _as_batch(x: Tensor) -> Tensor:
    """[*, M, N] as [B, M, N]: a view where the leading dimensions collapse into one, else a copy."""
    return x if x.ndim == 3 else x.reshape(x.shape[:-2].numel(), *x.shape[-2:])


def _launch(x: _Operands, config: AnyConfig | None, sms: int | None, tile_step: int) -> None:
    if config is None:
        config = _choose(x)
    with _on_device(x.d.device):
        if isinstance(config, TritonConfig):
            _launch_pointers(x, config, sms, tile_step)
        else:
            _launch_tma(x, config, sms, tile_step)


def _choose(x: _Operands) -> AnyConfig:
    batch, m, k = x.a.shape
    if has_tma(x.d.device) and tma_complaint(x.a, x.b, x.c, x.d) is None:
        config = choose_tma_config(m, k, batch)
        if config is not None:
            return config
    return choose_config(x.a.dtype, m, k, batch, aligned=_all_aligned(x))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _launch_pointers(x: _Operands, config: TritonConfig, sms: int | None, tile_step: int) -> None:
    batch, m, k = x.a.shape
    b = x.a if x.b is None else x.b
    # Without C the kernel gets a pointer and strides that it does not use.
    c = x.d if x.c is None else x.c
    tiles = count_tiles(config, m, batch)
    syrk_kernel[(min(tiles, sms or _LARGEST_GRID),)](
        x.a,
        b,
        c,
        x.d,
        x.scalars.alpha,
        x.scalars.beta,
        m,
        k,
        tiles,
        *x.a.stride(),
        *b.stride(),
        *c.stride(),
        *x.d.stride(),
        x.scalars.alpha_stride,
        x.scalars.beta_stride,
        HAS_C=x.c is not None,
        ALPHA_ON_DEVICE=isinstance(x.scalars.alpha, Tensor),
        BETA_ON_DEVICE=isinstance(x.scalars.beta, Tensor),
        # In the interpreter a stride of 1 is not a constant, so it could not be told from a multiple of 8.
        ALIGNED=not _INTERPRETED and _all_aligned(x),
        EVEN_K=k % config.tile_k == 0,
        TILE_M=config.tile_m,
        TILE_K=config.tile_k,
        STAGES=config.stages,
        TILE_STEP=tile_step,
        EMULATE=_INTERPRETED,
        num_warps=config.warps,
        # Triton is about to change its default; said here, both versions round alike.
        enable_fp_fusion=True,
    )


def _all_aligned(x: _Operands) -> bool:
    return all(_is_aligned(y) for y in (x.a, x.b, x.c, x.d) if y is not None)


def _is_aligned(x: Tensor) -> bool:
    """Whether x can be loaded and stored in vectors of eight entries."""
    sizes_and_strides = (*x.shape[-2:], *(stride for stride in x.stride() if stride != 1))
    return x.data_ptr() % 16 == 0 and all(number % 8 == 0 for number in sizes_and_strides)


def _launch_tma(x: _Operands, config: TmaConfig, sms: int | None, tile_step: int) -> None:
    complaint = tma_complaint(x.a, x.b, x.c, x.d)
    if complaint is not None:
        raise ValueError(f"syrk: {config.label} {complaint}")
    batch, m, k = x.a.shape
    tiles = count_tiles(config, m, batch)
    whole = config.whole_tiles(tiles, _multiprocessors(x.d.device))
    units = whole + (tiles - whole) * config.split
    partials, arrivals = _workspace(x.d.device, config, tiles - whole)
    b = x.a if x.b is None else x.b
    one_descriptor = x.b is None and config.tile_m == config.tile_n
    c_desc = None if x.c is None else _describe(x.c, config.tile_m, config.chunk)
    syrk_tma_kernel[(_programs(x.d.device, config, units, sms),)](
        _describe_factor(x.a, config.tile_m, config.tile_k),
        None if one_descriptor else _describe_factor(b, config.tile_n, config.tile_k),
        c_desc,
        _describe(x.d, config.tile_m, config.chunk),
        _describe(x.d, config.chunk, config.tile_m),
        x.d,
        partials,
        arrivals,
        x.scalars.alpha,
        x.scalars.beta,
        m,
        k,
        whole,
        units,
        int(not _is_shared(x.a)),
        int(not _is_shared(b)),
        int(x.c is not None and not _is_shared(x.c)),
        x.d.stride(0),
        x.d.stride(1),
        x.scalars.alpha_stride,
        x.scalars.beta_stride,
        HAS_C=x.c is not None,
        ALPHA_ON_DEVICE=isinstance(x.scalars.alpha, Tensor),
        BETA_ON_DEVICE=isinstance(x.scalars.beta, Tensor),
        A_K_MAJOR=x.a.stride(-1) == 1,
        B_K_MAJOR=b.stride(-1) == 1,
        TILE_M=config.tile_m,
        TILE_N=config.tile_n,
        TILE_K=config.tile_k,
        CHUNK=config.chunk,
        GROUP=config.group,
        STAGES=config.stages,
        SPLIT=config.split if whole < tiles else 1,
        SOME_WHOLE=whole > 0,
        UNIT_STEP=tile_step,
        EMULATE=_INTERPRETED,
        num_warps=config.warps,
        enable_fp_fusion=True,
    )


def _programs(device: torch.device, config: TmaConfig, units: int, sms: int | None) -> int:
    if config.persistent:
        sms = min(sms or _multiprocessors(device), _multiprocessors(device))
    return units if sms is None else min(units, sms * config.programs_per_sm)


def _workspace(device: torch.device, config: TmaConfig, split_tiles: int) -> tuple[Tensor | None, Tensor | None]:
    """The partial sums' memory and counters for the tiles that several programs share."""
    if config.split == 1 or split_tiles == 0:
        return None, None
    partials = torch.empty(split_tiles * config.split * config.tile_m * config.tile_n, device=device)
    return partials, arrival_counters(device, split_tiles)


def _is_shared(x: Tensor) -> bool:
    """Whether one matrix serves the whole batch."""
    return x.stride(0) == 0 and x.shape[0] > 1


def _describe_factor(x_BMK: Tensor, tile: int, tile_k: int) -> TensorDescriptor:
    if x_BMK.stride(-1) == 1:
        return _describe(x_BMK, tile, tile_k)
    return _describe(x_BMK.mT, tile_k, tile)


def _describe(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A row-major [B, M, N] in blocks of ``rows`` by ``columns``; a matrix that serves the whole batch alone."""
    batch, m, n = x.shape
    # The strides of dimensions of size 1 say nothing, and a descriptor takes multiples of 16 bytes only.
    row_stride = x.stride(1) if m > 1 else -(-n // 8) * 8
    if batch == 1 or x.stride(0) == 0:
        batch, batch_stride = 1, m * row_stride
    else:
        batch_stride = x.stride(0)
    return TensorDescriptor(x, [batch, m, n], [batch_stride, row_stride, 1], [1, rows, columns])


def _on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
