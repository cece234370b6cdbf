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
        """X Xᵀ of every matrix, ``[B, M, M]``, symmetric but for rounding."""
        ...

    def polynomial(self, r: Tensor, triple: Triple) -> Tensor:
        """``a I + b R + c R²``, symmetric but for rounding."""
        ...

    def symmetric(self, a: Tensor, b: Tensor) -> Tensor:
        """A Bᵀ where that is symmetric but for rounding: one triangle may be computed and mirrored."""
        ...

    def whole(self, a: Tensor, b: Tensor) -> Tensor:
        """A B, every entry computed."""
        ...

    def apply(self, q: Tensor, xs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Q X of every matrix, shaped as ``xs``."""
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
        for triple in segment:
            xs = products.apply(products.polynomial(products.gram(xs), triple), xs)
    return xs


def _segment_polynomial(r_BMM: Tensor, segment: Sequence[Triple], products: Arithmetic) -> Tensor:
    """Q with Q·X = the segment's steps applied to X, from R = X Xᵀ.

    W = aI + bR + cR² is stored, so that no other product has an addend to read, and the rounded W is the same in Q and
    in R: what Q makes of X and what R says of it agree.

    A symmetric kernel mirrors one triangle, and rounded polynomials of R commute only up to rounding, so what it
    mirrors is off by a commutator. Two products cannot afford that and are computed whole. One is W·R in R ← W·R·W: a
    congruence keeps the small eigenvalues of R to relative accuracy, which the steps to come amplify; with one step to
    come it does not matter. The other is the last Q of a segment of three steps or more, which nothing corrects. The
    order of the operands is chosen too: mirrored, W·R before ·W errs half of what R·W does.

    A result is read by the next four products at the latest, so five rotating buffers hold them.
    """
    steps = len(segment)
    q_BMM: Tensor | None = None
    for i, triple in enumerate(segment):
        w_BMM = products.polynomial(r_BMM, triple)
        if q_BMM is None:
            q_BMM = w_BMM
        elif steps >= 3 and i == steps - 1:
            q_BMM = products.whole(q_BMM, w_BMM)
        else:
            q_BMM = products.symmetric(q_BMM, w_BMM)
        if i + 1 < steps:
            half_BMM = products.whole(w_BMM, r_BMM) if i + 2 < steps else products.symmetric(w_BMM, r_BMM)
            r_BMM = products.symmetric(half_BMM, w_BMM)
    assert q_BMM is not None, "a segment has at least one step"
    return q_BMM


@dataclass(frozen=True)
class FreshArithmetic:
    """Every result in memory of its own; one stack of matrices at a time."""

    syrk: SyrkFn

    def gram(self, xs: Sequence[Tensor]) -> Tensor:
        (x_BMN,) = xs
        return self.syrk(x_BMN)

    def polynomial(self, r: Tensor, triple: Triple) -> Tensor:
        a, b, c = triple
        return add_to_diagonal_(self.syrk(r, None, r, alpha=c, beta=b), a)

    def symmetric(self, a: Tensor, b: Tensor) -> Tensor:
        return self.syrk(a, b)

    def whole(self, a: Tensor, b: Tensor) -> Tensor:
        return _product(a, b)

    def apply(self, q: Tensor, xs: Sequence[Tensor]) -> Sequence[Tensor]:
        (x_BMN,) = xs
        return (_product(q, x_BMN),)


def add_to_diagonal_(z_BMM: Tensor, a: float) -> Tensor:
    """``Z + a I`` in Z's memory."""
    diagonal_BM = z_BMM.diagonal(dim1=-2, dim2=-1)
    if z_BMM.device.type == "cpu" and z_BMM.dtype in HALVES:
        # torch rounds the scalar first there, in half precision: an error in a that every entry shares.
        diagonal_BM.copy_(diagonal_BM.float() + a)
    else:
        diagonal_BM.add_(a)
    return z_BMM


def iterate_wide(x_BMN: Tensor, segments: Segments, products: FreshArithmetic) -> Tensor:
    """Gram Newton-Schulz in fp32 and fp64, whose kernels save nothing by mirroring: every product but R is whole."""
    for segment in segments:
        r_BMM = products.gram((x_BMN,))
        q_BMM: Tensor | None = None
        for i, (a, b, c) in enumerate(segment):
            w_BMM = add_to_diagonal_(batched_product(r_BMM, r_BMM, r_BMM, beta=b, alpha=c), a)
            q_BMM = w_BMM if q_BMM is None else batched_product(q_BMM, w_BMM)
            if i + 1 < len(segment):
                r_BMM = batched_product(batched_product(w_BMM, r_BMM), w_BMM)
        assert q_BMM is not None, "a segment has at least one step"
        x_BMN = _product(q_BMM, x_BMN)
    return x_BMN


def _product(q_BMM: Tensor, x_BMN: Tensor) -> Tensor:
    """Q X in x's dtype, accumulated in fp32 (fp64), rounded once."""
    if x_BMN.device.type == "cpu" and x_BMN.dtype in HALVES:
        return _product(q_BMM.float(), x_BMN.float()).to(x_BMN.dtype)
    with full_precision_reduction() if x_BMN.device.type == "cuda" else contextlib.nullcontext():
        return batched_product(q_BMM, x_BMN)
