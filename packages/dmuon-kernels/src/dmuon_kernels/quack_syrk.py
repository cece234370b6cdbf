"""The adapter to quack's symmetric product. Importing this module imports quack, CUTLASS's DSL and triton.

Legend: B matrices, M rows, K columns.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import torch
from quack.gemm_symmetric import gemm_symmetric
from torch import Tensor

from dmuon_core.syrk.contract import Scalar, check_operands, check_scalars
from dmuon_kernels.mirror_kernel import mirror_kernel
from dmuon_kernels.probes import has_aligned_rows, is_k_major, quack_rejects
from dmuon_kernels.quack_config import QuackConfig, choose_quack_config, parse_quack_config

_MIRROR_TILE = 64


def quack_syrk(
    a: Tensor,
    b: Tensor | None = None,
    c: Tensor | None = None,
    *,
    alpha: Scalar = 1.0,
    beta: Scalar = 0.0,
    out: Tensor | None = None,
    sms: int | None = None,
    config: QuackConfig | str | None = None,
    exact: bool = True,
) -> Tensor:
    """``alpha * a @ b.mT + beta * c`` for fp16 and bf16, as ``dmuon_core.syrk.contract`` says.

    Args:
        a: [*, M, K], K- or M-major, with rows (or columns) at multiples of 16 bytes.
        b: as ``a``; None for ``a`` itself.
        c: [*, M, M], row-major with rows at multiples of 16 bytes; only what its lower triangle says counts.
        alpha: a float, or an fp32 tensor on a's device: 0-d, or one value per batch item (one launch each then).
        beta: likewise.
        out: [*, M, M], its own memory or ``c`` itself. A layout that the kernel cannot store costs a copy.
        sms: not supported and ignored.
        config: instead of the configuration for this shape; or its label.
        exact: False leaves the squares on the diagonal as they come: D equals its transpose but for rounding, and all
            of C counts. It saves a pass over them. A product of two operands within fewer than two squares is mirrored
            all the same: with most of D in one square, halves that drift apart in one product after the other cost
            Newton-Schulz its accuracy.

    Raises:
        ValueError: operands outside the contract, or that ``quack_rejects`` names, or that ``config`` cannot take.
    """
    check_operands(a, b, c, beta, out)
    check_scalars(a, alpha, beta)
    refusal = quack_rejects(a, b, c)
    if refusal is not None:
        raise ValueError(f"syrk: the quack kernel {refusal}")
    batch, m = a.shape[:-2], a.shape[-2]
    d = a.new_empty((*batch, m, m)) if out is None else out
    if d.numel() == 0:
        return d
    reads_c = isinstance(beta, Tensor) or beta != 0.0
    a_BMK = _as_batch(a)
    b_BMK = a_BMK if b is None else _as_batch(b)
    c_BMM = _as_batch(c) if c is not None and reads_c else None
    stored_BMM = _as_batch(d) if has_aligned_rows(d) else a.new_empty((a_BMK.shape[0], m, m))
    k_major = is_k_major(a, b)
    if isinstance(config, str):
        config = parse_quack_config(config)
    if config is None:
        config = choose_quack_config(_capability(a.device), m, a.shape[-1], a_BMK.shape[0], k_major=k_major)
    if not k_major and not config.takes_m_major:
        raise ValueError(f"syrk: {config.label} takes a and b with rows at multiples of 16 bytes only")
    with _on_device(a.device):
        _multiply(a_BMK, b_BMK, c_BMM, stored_BMM, alpha, beta, config)
        drifts = b is not None and m < 2 * config.side
        if drifts or (exact and (b is not None or c_BMM is not None)):
            _mirror_squares(stored_BMM, config.side)
    if stored_BMM.data_ptr() != d.data_ptr():
        d.copy_(stored_BMM.view(d.shape))
    return d


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _as_batch(x: Tensor) -> Tensor:
    """[*, M, N] as [B, M, N]: a view where the leading dimensions collapse into one, else a copy."""
    return x if x.ndim == 3 else x.reshape(x.shape[:-2].numel(), *x.shape[-2:])


def _multiply(
    a_BMK: Tensor, b_BMK: Tensor, c_BMM: Tensor | None, d_BMM: Tensor, alpha: Scalar, beta: Scalar, config: QuackConfig
) -> None:
    per_item = any(isinstance(scalar, Tensor) and scalar.ndim for scalar in (alpha, beta))
    # The kernel takes one alpha and one beta.
    for item in range(a_BMK.shape[0]) if per_item else (slice(None),):
        part = slice(item, item + 1) if isinstance(item, int) else item
        _entry()(
            A=a_BMK[part],
            B=b_BMK[part],
            D=d_BMM[part],
            C=None if c_BMM is None else c_BMM[part],
            tile_count_semaphore=None,
            tile_M=config.tile_m,
            tile_N=config.tile_n,
            cluster_M=config.cluster_m,
            cluster_N=config.cluster_n,
            pingpong=config.pingpong,
            persistent=True,
            alpha=_scalar_of(alpha, item),
            # Without C a beta other than 1 would be an argument of no use.
            beta=1.0 if c_BMM is None else _scalar_of(beta, item),
        )


def _scalar_of(scalar: Scalar, item: int | slice) -> Scalar:
    if isinstance(scalar, Tensor) and scalar.ndim:
        return scalar.reshape(-1)[item]
    return scalar if isinstance(scalar, Tensor) else float(scalar)


@functools.cache
def _entry() -> Callable[..., object]:
    """quack's low-level function; it keeps its plans and compiled kernels by shape and configuration."""
    entry: Callable[..., object] = gemm_symmetric
    return entry


def _mirror_squares(d_BMM: Tensor, side: int) -> None:
    """Make the squares on the diagonal symmetric. quack computes them whole and stores them as they come out."""
    batch, m, _ = d_BMM.shape
    squares = -(-m // side)
    rows = -(-side // _MIRROR_TILE)
    mirror_kernel[(batch * squares * (rows * (rows + 1) // 2),)](
        d_BMM, m, squares, d_BMM.stride(0), d_BMM.stride(1), SIDE=side, TILE=_MIRROR_TILE, num_warps=4
    )


def _on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
