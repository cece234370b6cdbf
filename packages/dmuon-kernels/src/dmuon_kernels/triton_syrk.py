"""The host side of the Triton kernel. Importing this module imports triton.

Legend: B matrices, M rows, K columns.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from dmuon_core.syrk.contract import Scalar, check_operands, check_scalars
from dmuon_kernels.probes import triton_rejects
from dmuon_kernels.triton_config import TritonConfig, choose_config, count_tiles
from dmuon_kernels.triton_kernel import syrk_kernel

_INTERPRETED = not isinstance(syrk_kernel, triton.JITFunction)
_LARGEST_GRID = 2**31 - 1


def triton_syrk(
    a: Tensor,
    b: Tensor | None = None,
    c: Tensor | None = None,
    *,
    alpha: Scalar = 1.0,
    beta: Scalar = 0.0,
    out: Tensor | None = None,
    sms: int | None = None,
    config: TritonConfig | None = None,
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
        sms: at most so many programs run; they then loop over the tiles.
        config: instead of the configuration for this shape.
        tile_step: permutes the order of the tiles; prime to their number. For tests.

    Raises:
        ValueError: operands outside the contract, or that ``triton_rejects`` names.
    """
    check_operands(a, b, c, beta, out)
    check_scalars(a, alpha, beta)
    refusal = triton_rejects(a, b, c)
    if refusal is not None:
        raise ValueError(f"syrk: the Triton kernel {refusal}")
    batch, m = a.shape[:-2], a.shape[-2]
    d = a.new_empty((*batch, m, m)) if out is None else out
    scalars = _Scalars.of(alpha, beta)
    if d.numel() == 0:
        return d
    reads_c = isinstance(beta, Tensor) or beta != 0.0
    a_BMK, d_BMM = _as_batch(a), _as_batch(d)
    b_BMK = a_BMK if b is None else _as_batch(b)
    c_BMM = _as_batch(c) if c is not None and reads_c else None
    _launch(a_BMK, b_BMK, c_BMM, d_BMM, scalars, sms, config, tile_step)
    if d_BMM.data_ptr() != d.data_ptr():
        # The leading dimensions of ``out`` do not collapse into one: the result is in a copy.
        d.copy_(d_BMM.view(d.shape))
    return d


@dataclass(frozen=True)
class _Scalars:
    """alpha and beta as the kernel takes them: a float, or a pointer with a stride per batch item."""

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


def _as_batch(x: Tensor) -> Tensor:
    """[*, M, N] as [B, M, N]: a view where the leading dimensions collapse into one, else a copy."""
    return x if x.ndim == 3 else x.reshape(x.shape[:-2].numel(), *x.shape[-2:])


def _launch(
    a_BMK: Tensor,
    b_BMK: Tensor,
    c_BMM: Tensor | None,
    d_BMM: Tensor,
    scalars: _Scalars,
    sms: int | None,
    config: TritonConfig | None,
    tile_step: int,
) -> None:
    batch, m, k = a_BMK.shape
    # Without C the kernel gets a pointer and strides that it does not use.
    c = d_BMM if c_BMM is None else c_BMM
    aligned = all(_is_aligned(x) for x in (a_BMK, b_BMK, c, d_BMM))
    config = config or choose_config(a_BMK.dtype, m, k, batch, aligned=aligned)
    tiles = count_tiles(config, m, batch)
    with _on_device(d_BMM.device):
        syrk_kernel[(_programs(tiles, sms),)](
            a_BMK,
            b_BMK,
            c,
            d_BMM,
            scalars.alpha,
            scalars.beta,
            m,
            k,
            tiles,
            *a_BMK.stride(),
            *b_BMK.stride(),
            *c.stride(),
            *d_BMM.stride(),
            scalars.alpha_stride,
            scalars.beta_stride,
            HAS_C=c_BMM is not None,
            ALPHA_ON_DEVICE=isinstance(scalars.alpha, Tensor),
            BETA_ON_DEVICE=isinstance(scalars.beta, Tensor),
            # In the interpreter a stride of 1 is not a constant, so it could not be told from a multiple of 8.
            ALIGNED=aligned and not _INTERPRETED,
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


def _is_aligned(x: Tensor) -> bool:
    """Whether x can be loaded and stored in vectors of eight entries."""
    sizes_and_strides = (*x.shape[-2:], *(stride for stride in x.stride() if stride != 1))
    return x.data_ptr() % 16 == 0 and all(number % 8 == 0 for number in sizes_and_strides)


def _programs(tiles: int, sms: int | None) -> int:
    if sms is not None and sms < 1:
        raise ValueError(f"syrk: sms must be at least 1, got {sms}")
    return min(tiles, _LARGEST_GRID if sms is None else sms)


def _on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
