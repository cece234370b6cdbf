"""Judging Newton-Schulz: the same polynomial in float64, and the two bounds that an implementation must hold.

The polynomial does not converge to one, so a comparison with the polar factor U·Vᵀ judges the coefficients, not the
implementation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dmuon_core.coefficients import Triple, apply_polynomial, ceiling

SIGMA_MARGIN = 0.05
"""How far the largest singular value of a result may stand above the polynomial's ceiling, on any spectrum."""

ERROR_RATIO = 1.5
"""How many times the error of the same algorithm with torch.mm in the same dtype a result may have."""


def exact_polynomial(x: Tensor, triples: Sequence[Triple]) -> Tensor:
    """The steps ``triples`` applied to the singular values of x / ‖x‖_F, by SVD in float64; zeros for a zero matrix."""
    left, sigma, right = torch.linalg.svd(x.to(torch.float64), full_matrices=False)
    norm = torch.linalg.vector_norm(sigma, dim=-1, keepdim=True)
    sigma = apply_polynomial(sigma / torch.where(norm == 0, 1.0, norm), triples)
    return torch.matmul(left * sigma.unsqueeze(-2), right)


def relative_error(got: Tensor, want: Tensor) -> float:
    """‖got − want‖_F / ‖want‖_F in float64; the plain norm where ``want`` is zero."""
    got, want = got.detach().to(torch.float64), want.detach().to(torch.float64)
    difference = float(torch.linalg.vector_norm(got - want))
    scale = float(torch.linalg.vector_norm(want))
    return difference / scale if scale else difference


@dataclass(frozen=True)
class Verdict:
    """How a result stands against the polynomial in float64.

    Attributes:
        error: relative Frobenius error.
        sigma_max: the result's largest singular value.
        sigma_bound: the polynomial's ceiling plus the margin.
        dual: ⟨U, O⟩ / ‖U‖_*, what judges near-null directions; the exact polynomial's is ``exact_dual``.
    """

    error: float
    sigma_max: float
    sigma_bound: float
    dual: float
    exact_dual: float


def judge(x: Tensor, got: Tensor, triples: Sequence[Triple]) -> Verdict:
    """Compare the orthogonalization ``got`` of the matrix ``x`` with the polynomial in float64."""
    want = exact_polynomial(x, triples)
    x64, got64 = x.to(torch.float64), got.to(torch.float64)
    nuclear = float(torch.linalg.svdvals(x64).sum()) or 1.0
    return Verdict(
        error=relative_error(got, want),
        sigma_max=float(torch.linalg.matrix_norm(got64, ord=2)),
        sigma_bound=ceiling(tuple(triples)) + SIGMA_MARGIN,
        dual=float((x64 * got64).sum()) / nuclear,
        exact_dual=float((x64 * want).sum()) / nuclear,
    )


def plain_newton_schulz(x: Tensor, segments: Sequence[Sequence[Triple]], *, gram: bool, dtype: torch.dtype) -> Tensor:
    """The yardstick: the same algorithm written with torch.mm alone, every product rounded to ``dtype``."""
    wide = x.mT if x.shape[0] > x.shape[1] else x
    y = (wide / torch.linalg.vector_norm(wide)).to(dtype)
    for segment in segments:
        y = _plain_gram(y, segment) if gram else _plain_direct(y, segment)
    return torch.t(y) if x.shape[0] > x.shape[1] else y


def _plain_gram(x: Tensor, segment: Sequence[Triple]) -> Tensor:
    r = torch.mm(x, x.mT)
    eye = torch.eye(r.shape[0], dtype=x.dtype)
    q = eye
    for a, b, c in segment:
        factor = a * eye + b * r + c * torch.mm(r, r)
        q = torch.mm(q, factor)
        r = torch.mm(torch.mm(factor, r), factor)
    return torch.mm(q, x)


def _plain_direct(x: Tensor, segment: Sequence[Triple]) -> Tensor:
    for a, b, c in segment:
        gram = torch.mm(x, x.mT)
        x = a * x + torch.mm(b * gram + c * torch.mm(gram, gram), x)
    return x
