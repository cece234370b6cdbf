"""The two backends that need torch alone: ``cublas`` on CUDA devices and ``torch`` on any other."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from dmuon_core.syrk.contract import API, Scalar, SyrkFn, SyrkSpec, check_operands, check_scalars

_HALVES = (torch.float16, torch.bfloat16)


def torch_syrk(
    a: Tensor,
    b: Tensor | None = None,
    c: Tensor | None = None,
    *,
    alpha: Scalar = 1.0,
    beta: Scalar = 0.0,
    out: Tensor | None = None,
    sms: int | None = None,
) -> Tensor:
    """The reference: the product in fp32 (fp64 for fp64), one rounding, the lower triangle mirrored."""
    check_operands(a, b, c, beta, out)
    check_scalars(a, alpha, beta)
    wide = torch.float32 if a.dtype in _HALVES else a.dtype
    x = a.to(wide)
    y = x if b is None else b.to(wide)
    product = batched_product(_as_batch(x), _as_batch(y).mT).reshape(*a.shape[:-1], a.shape[-2])
    return _store(_epilogue(product, c, alpha, beta), a.dtype, out)


def cublas_syrk(
    a: Tensor,
    b: Tensor | None = None,
    c: Tensor | None = None,
    *,
    alpha: Scalar = 1.0,
    beta: Scalar = 0.0,
    out: Tensor | None = None,
    sms: int | None = None,
) -> Tensor:
    """One cuBLAS product over both triangles, then the lower one mirrored. ``sms`` is not supported and ignored."""
    check_operands(a, b, c, beta, out)
    check_scalars(a, alpha, beta)
    with full_precision_reduction():
        product = _cublas_product(a, a if b is None else b, c, alpha, beta)
    return _store(product, a.dtype, out)


def loose_cublas_syrk(
    a: Tensor,
    b: Tensor | None = None,
    c: Tensor | None = None,
    *,
    alpha: Scalar = 1.0,
    beta: Scalar = 0.0,
    out: Tensor | None = None,
    sms: int | None = None,
) -> Tensor:
    """:func:`cublas_syrk` without mirroring: the halves of D may differ by a rounding, and all of C counts.

    A given B keeps it. Of A Bᵀ for polynomials of one R the halves differ by what R's own differ by, which grows from
    product to product: σ_max of Newton-Schulz stood 0.06 above the polynomial's ceiling.
    """
    if b is not None:
        return cublas_syrk(a, b, c, alpha=alpha, beta=beta, out=out, sms=sms)
    check_operands(a, b, c, beta, out)
    check_scalars(a, alpha, beta)
    with full_precision_reduction():
        if out is not None and out.ndim == 3 and not isinstance(alpha, Tensor) and not isinstance(beta, Tensor):
            # The input of baddbmm is not read at beta = 0, and is overwritten after it was read.
            return torch.baddbmm(out if c is None else c, a, a.mT, alpha=alpha, beta=beta, out=out)
        product = _cublas_product(a, a, c, alpha, beta)
    return product.to(a.dtype) if out is None else out.copy_(product)


def _cublas_product(a: Tensor, b: Tensor, c: Tensor | None, alpha: Scalar, beta: Scalar) -> Tensor:
    if isinstance(alpha, Tensor) or isinstance(beta, Tensor):
        # A device scalar cannot enter cuBLAS through torch: the epilogue runs in fp32 on the rounded product.
        return _epilogue(torch.matmul(a, b.mT).float(), c, alpha, beta)
    a_BMK, b_BMK = _as_batch(a), _as_batch(b)
    m = a.shape[-2]
    if c is None or beta == 0.0:
        # The input of baddbmm is not read at beta = 0.
        scratch = a.new_empty((1, 1, 1))
        d = torch.baddbmm(scratch, a_BMK, b_BMK.mT, beta=0.0, alpha=alpha)
    else:
        # Only the lower triangle of C counts, and _store mirrors the lower triangle of D.
        d = torch.baddbmm(_as_batch(c), a_BMK, b_BMK.mT, beta=beta, alpha=alpha)
    return d.reshape(*a.shape[:-2], m, m)


def _as_batch(x: Tensor) -> Tensor:
    """[*, M, N] as [B, M, N]; a view wherever the batch dimensions allow one."""
    return x.reshape(-1, *x.shape[-2:]) if x.numel() else x.reshape(x.shape[:-2].numel(), *x.shape[-2:])


def _epilogue(product: Tensor, c: Tensor | None, alpha: Scalar, beta: Scalar) -> Tensor:
    if isinstance(alpha, Tensor) or alpha != 1.0:
        product = product * _per_item(alpha)
    if c is not None and (isinstance(beta, Tensor) or beta != 0.0):
        product = product + c.to(product.dtype) * _per_item(beta)
    return product


def _per_item(scalar: Scalar) -> Scalar:
    return scalar[..., None, None] if isinstance(scalar, Tensor) and scalar.ndim else scalar


def _store(d: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    return mirror_lower(d.to(dtype), out)


def batched_product(
    x_BMK: Tensor, y_BKN: Tensor, c_BMN: Tensor | None = None, *, alpha: float = 1.0, beta: float = 0.0
) -> Tensor:
    """``alpha * x y + beta * c``, or ``x y`` without c, in x's dtype.

    On a CPU one matrix after the other, each in memory of its own: MKL orders its sums by batch and by alignment, and
    the bits of a matrix must depend on neither.
    """
    if x_BMK.device.type != "cpu":
        if c_BMN is None:
            return torch.bmm(x_BMK, y_BKN)
        return torch.baddbmm(c_BMN, x_BMK, y_BKN, beta=beta, alpha=alpha)
    d_BMN = x_BMK.new_empty((*x_BMK.shape[:2], y_BKN.shape[2]))
    for i in range(x_BMK.shape[0]):
        x_MK, y_KN = x_BMK[i].clone(), y_BKN[i].clone()
        d_BMN[i] = torch.mm(x_MK, y_KN) if c_BMN is None else torch.addmm(c_BMN[i], x_MK, y_KN, beta=beta, alpha=alpha)
    return d_BMN


def mirror_lower(d: Tensor, out: Tensor | None = None) -> Tensor:
    """The symmetric matrix with d's lower triangle, in ``out`` where it is given."""
    return torch.add(torch.tril(d), torch.tril(d, -1).mT, out=out)


class _CublasFlags:
    """torch's process-wide flags for half-precision sums: the first one in switches them off, the last out restores."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before: dict[str, object] = {}

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        with self._lock:
            if self._users == 0:
                self._before = _read_cublas_flags()
                _write_cublas_flags({name: _switched_off(value) for name, value in self._before.items()})
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    _write_cublas_flags(self._before)


def _read_cublas_flags() -> dict[str, object]:
    matmul = torch.backends.cuda.matmul
    # A reduction's setting holds a second flag, which a single bool would reset.
    fp16 = matmul.allow_fp16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction_split_k
    bf16 = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction_split_k
    return {
        "allow_fp16_accumulation": matmul.allow_fp16_accumulation,
        "allow_fp16_reduced_precision_reduction": fp16,
        "allow_bf16_reduced_precision_reduction": bf16,
    }


def _switched_off(flag: object) -> object:
    return (False, *flag[1:]) if isinstance(flag, tuple) else False


def _write_cublas_flags(flags: dict[str, object]) -> None:
    for name, value in flags.items():
        setattr(torch.backends.cuda.matmul, name, value)


full_precision_reduction = _CublasFlags().off
"""cuBLAS may add partial sums in half precision, by torch's default. Not inside of this context."""


def _probe_cublas(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"runs on CUDA devices only, this is {device.type}"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return None


def _probe_torch(device: torch.device) -> str | None:
    return None


def _load_cublas() -> SyrkFn:
    return cublas_syrk


def _load_loose_cublas() -> SyrkFn:
    return loose_cublas_syrk


def _load_torch() -> SyrkFn:
    return torch_syrk


CUBLAS = SyrkSpec("cublas", API, "universal fallback", 10, _probe_cublas, _load_cublas, load_loose=_load_loose_cublas)
TORCH = SyrkSpec("torch", API, "reference", 0, _probe_torch, _load_torch)
