"""X = U / ‖U‖_F over the whole range of the input's dtype, in fp32 before any down-cast."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dmuon_core.compat import norms_in_fp64

_EXPONENT_LIMIT = {torch.float32: 126, torch.float64: 1022}
_SMALLEST_NORM = 1e-300  # below any norm of fp32 numbers but zero's, which it makes 0 · 1e300 = 0


def normalize(x_BMN: Tensor, dtype: torch.dtype, *, exact: bool) -> Tensor:
    """Each matrix divided by its Frobenius norm, contiguous, in ``dtype``.

    A prescale by a power of two keeps squares in range for any input and adds no rounding, so inputs that differ by a
    power of two give the same bits. There is no floor: zero gives zero, the smallest subnormal is normalized like any
    other, a non-finite entry makes the matrix non-finite.

    Args:
        x_BMN: matrices of any strides.
        dtype: of the result.
        exact: sum the squares in an order that depends on M·N alone, so that bits do not depend on the batch.
    """
    wide = torch.float64 if torch.float64 in (x_BMN.dtype, dtype) else torch.float32
    x_BMN = x_BMN.to(wide).contiguous()
    x_BMN = x_BMN * _inverse_power_of_two(x_BMN)
    norm_B11 = _exact_norm(x_BMN) if exact else torch.linalg.vector_norm(x_BMN, dim=(-2, -1), keepdim=True)
    return (x_BMN / torch.where(norm_B11 == 0, 1.0, norm_B11)).to(dtype)


def _inverse_power_of_two(x_BMN: Tensor) -> Tensor:
    """2^-e per matrix, its largest entry in [2^(e-1), 2^e)."""
    exponent = torch.frexp(x_BMN.abs().amax(dim=(-2, -1), keepdim=True)).exponent
    limit = _EXPONENT_LIMIT[x_BMN.dtype]
    return torch.ldexp(torch.ones_like(exponent, dtype=x_BMN.dtype), -exponent.clamp(-limit, limit))


def _exact_norm(x_BMN: Tensor) -> Tensor:
    """The Frobenius norm by a binary tree of elementwise additions."""
    sums_BS = x_BMN.square().flatten(1)
    while sums_BS.shape[1] > 1:
        half = sums_BS.shape[1] // 2
        folded = sums_BS[:, :half] + sums_BS[:, half : 2 * half]
        if sums_BS.shape[1] % 2:
            folded[:, 0] += sums_BS[:, -1]
        sums_BS = folded
    return sums_BS.sqrt().unsqueeze(-1)


def normalize_into(matrices: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
    """Each matrix of ``matrices`` divided by its Frobenius norm, written into its place in ``outs``, rounded once.

    The same result as :func:`normalize` up to rounding, in two passes over the input: the squares of any fp32 number
    are in the range of fp64, so the sum needs no prescale, and the cast rides on the multiplication.

    Args:
        matrices: stacks ``[B, M, N]`` of any strides on one device.
        outs: stacks ``[B, M', N']``, M' ≥ M and N' ≥ N, row- or column-major, in the dtype of the result. Beyond M and
            N they are filled with zeros.
    """
    singles_MN = [x_MN for x_BMN in matrices for x_MN in x_BMN.unbind(0)]
    inverses_B = norms_in_fp64(singles_MN).clamp_min_(_SMALLEST_NORM).reciprocal_()
    counts = [x_BMN.shape[0] for x_BMN in matrices]
    for x_BMN, out_BMN, inverse_B in zip(matrices, outs, inverses_B.split(counts), strict=True):
        if x_BMN.shape != out_BMN.shape:
            out_BMN.zero_()
        place_BMN = out_BMN[:, : x_BMN.shape[1], : x_BMN.shape[2]]
        torch.mul(x_BMN, inverse_B[:, None, None], out=place_BMN)
