"""The two forms of Newton-Schulz, written once for every way to multiply.

Legend: B matrices, M rows, N columns, M <= N. ``xs`` are stacks of matrices with the same M, ``[B0, M, N0]``,
``[B1, M, N1]``, ...: the M×M recurrence does not see N, so it runs once over all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from dmuon_core.coefficients import Triple
from dmuon_core.syrk.builtin import batched_product, full_precision_reduction
from dmuon_core.syrk.contract import SyrkFn

Backend = Literal["gram", "direct"]
Segments = Sequence[Sequence[Triple]]

HALVES = (torch.float16, torch.bfloat16)


class Arithmetic(Protocol):
    """How products are computed and where their results live."""

    def gram(self, xs: Sequence[Tensor]) -> Tensor:
        """X Xᵀ of every matrix, ``[B, M, M]``, exactly symmetric."""
        ...

    def symmetric(self, a: Tensor, b: Tensor | None, c: Tensor, *, alpha: float, beta: float) -> Tensor:
        """``alpha · A Bᵀ + beta · C`` of which one triangle is computed and mirrored; None is A."""
        ...

    def whole(self, a: Tensor, b: Tensor, c: Tensor, *, beta: float) -> Tensor:
        """``A B + beta · C``, every entry computed."""
        ...

    def plus_identity(self, z: Tensor, a: float) -> Tensor:
        """``Z + a I``."""
        ...

    def apply(self, q: Tensor, xs: Sequence[Tensor], *, beta: float = 0.0) -> Sequence[Tensor]:
        """``Q X + beta · X`` of every matrix, shaped as ``xs``."""
        ...


def iterate(form: Backend, xs: Sequence[Tensor], segments: Segments, products: Arithmetic) -> Sequence[Tensor]:
    """The steps of ``segments`` applied to normalized matrices, half precision."""
    return _gram(xs, segments, products) if form == "gram" else _direct(xs, segments, products)


def _gram(xs: Sequence[Tensor], segments: Segments, products: Arithmetic) -> Sequence[Tensor]:
    for segment in segments:
        r_BMM = products.gram(xs)
        xs = products.apply(_segment_polynomial(r_BMM, segment, products), xs)
    return xs


def _direct(xs: Sequence[Tensor], segments: Segments, products: Arithmetic) -> Sequence[Tensor]:
    for segment in segments:
        for a, b, c in segment:
            a_BMM = products.gram(xs)
            xs = products.apply(products.symmetric(a_BMM, None, a_BMM, alpha=c, beta=b), xs, beta=a)
    return xs


def _segment_polynomial(r_BMM: Tensor, segment: Sequence[Triple], products: Arithmetic) -> Tensor:
    """Q with Q·X = the segment's steps applied to X, from R = X Xᵀ.

    A symmetric kernel mirrors one triangle, and rounded polynomials of R commute only up to rounding, so what it
    mirrors is off by a commutator. Two products cannot afford that and are computed whole. One is W·R in R ← W·R·W,
    W = aI + Z: a congruence keeps the small eigenvalues of R to relative accuracy, which the steps to come amplify;
    with one step to come it does not matter. The other is the last Q of a segment of three steps or more, which
    nothing corrects. The order of the operands is chosen too: mirrored, Z·R before ·Z errs half of what R·Z does.

    A result is read by the next four products at the latest, so five rotating buffers hold them.
    """
    steps = len(segment)
    q_BMM: Tensor | None = None
    for i, (a, b, c) in enumerate(segment):
        z_BMM = products.symmetric(r_BMM, None, r_BMM, alpha=c, beta=b)
        if q_BMM is None:
            q_BMM = products.plus_identity(z_BMM, a)
        elif steps >= 3 and i == steps - 1:
            q_BMM = products.whole(q_BMM, z_BMM, q_BMM, beta=a)
        else:
            q_BMM = products.symmetric(q_BMM, z_BMM, q_BMM, alpha=1.0, beta=a)
        if i + 1 < steps:
            if i + 2 < steps:
                w_BMM = products.whole(z_BMM, r_BMM, r_BMM, beta=a)
            else:
                w_BMM = products.symmetric(z_BMM, r_BMM, r_BMM, alpha=1.0, beta=a)
            r_BMM = products.symmetric(w_BMM, z_BMM, w_BMM, alpha=1.0, beta=a)
    assert q_BMM is not None, "a segment has at least one step"
    return q_BMM


@dataclass(frozen=True)
class FreshArithmetic:
    """Every result in memory of its own; one stack of matrices at a time."""

    syrk: SyrkFn

    def gram(self, xs: Sequence[Tensor]) -> Tensor:
        (x_BMN,) = xs
        return self.syrk(x_BMN)

    def symmetric(self, a: Tensor, b: Tensor | None, c: Tensor, *, alpha: float, beta: float) -> Tensor:
        return self.syrk(a, b, c, alpha=alpha, beta=beta)

    def whole(self, a: Tensor, b: Tensor, c: Tensor, *, beta: float) -> Tensor:
        return _product(a, b, c, beta)

    def plus_identity(self, z: Tensor, a: float) -> Tensor:
        q_BMM = z.clone()
        diagonal_BM = q_BMM.diagonal(dim1=-2, dim2=-1)
        # A half-precision add_ may round the scalar first (torch does on a CPU): one error in all of Q, none in W·R.
        wide_BM = diagonal_BM.float() if z.dtype in HALVES else diagonal_BM
        diagonal_BM.copy_(wide_BM + a)
        return q_BMM

    def apply(self, q: Tensor, xs: Sequence[Tensor], *, beta: float = 0.0) -> Sequence[Tensor]:
        (x_BMN,) = xs
        return (_product(q, x_BMN, x_BMN if beta else None, beta),)


def iterate_wide(x_BMN: Tensor, segments: Segments, products: FreshArithmetic) -> Tensor:
    """Gram Newton-Schulz in fp32 and fp64, whose kernels save nothing by mirroring: every product but R is whole."""
    for segment in segments:
        r_BMM = products.gram((x_BMN,))
        q_BMM: Tensor | None = None
        for i, (a, b, c) in enumerate(segment):
            w_BMM = products.plus_identity(batched_product(r_BMM, r_BMM, r_BMM, beta=b, alpha=c), a)
            q_BMM = w_BMM if q_BMM is None else batched_product(q_BMM, w_BMM)
            if i + 1 < len(segment):
                r_BMM = batched_product(batched_product(w_BMM, r_BMM), w_BMM)
        assert q_BMM is not None, "a segment has at least one step"
        x_BMN = _product(q_BMM, x_BMN)
    return x_BMN


def _product(q_BMM: Tensor, x_BMN: Tensor, c_BMN: Tensor | None = None, beta: float = 0.0) -> Tensor:
    """Q X + beta C in x's dtype, accumulated in fp32 (fp64), rounded once."""
    if x_BMN.device.type == "cpu" and x_BMN.dtype in HALVES:
        wide = _product(q_BMM.float(), x_BMN.float(), None if c_BMN is None else c_BMN.float(), beta)
        return wide.to(x_BMN.dtype)
    with full_precision_reduction() if x_BMN.device.type == "cuda" else contextlib.nullcontext():
        return batched_product(q_BMM, x_BMN, c_BMN, beta=beta)
