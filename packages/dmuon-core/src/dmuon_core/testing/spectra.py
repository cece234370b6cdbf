"""Matrices that break careless orthogonalization: Gaussian inputs hide every known fault.

Each family is a function ``(m, n, generator) -> [m, n]`` in float64, of the spectrum that its name says.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Generator, Tensor

Family = Callable[[int, int, Generator], Tensor]


def _gaussian(m: int, n: int, generator: Generator) -> Tensor:
    return torch.randn(m, n, dtype=torch.float64, generator=generator)


def with_singular_values(sigma: Tensor, m: int, n: int, generator: Generator) -> Tensor:
    """A random [m, n] matrix with the singular values ``sigma`` (at most min(m, n); the rest are zero)."""
    left, _ = torch.linalg.qr(_gaussian(m, len(sigma), generator))
    right, _ = torch.linalg.qr(_gaussian(n, len(sigma), generator))
    return torch.matmul(left * sigma.to(torch.float64), right.mT)


def _spectrum(values: Callable[[int], Tensor]) -> Family:
    return lambda m, n, generator: with_singular_values(values(min(m, n)), m, n, generator)


def _log_decay(last: float) -> Callable[[int], Tensor]:
    return lambda k: torch.logspace(0, math.log10(last), k, dtype=torch.float64)


def _half_zeros(k: int) -> Tensor:
    return torch.cat([torch.ones(k - k // 2, dtype=torch.float64), torch.zeros(k // 2, dtype=torch.float64)])


def _rank(r: int) -> Family:
    def family(m: int, n: int, generator: Generator) -> Tensor:
        k = min(r, m, n)
        return _gaussian(m, k, generator) @ _gaussian(k, n, generator)

    return family


def _one_row(m: int, n: int, generator: Generator) -> Tensor:
    x = torch.zeros(m, n, dtype=torch.float64)
    x[m // 2] = torch.randn(n, dtype=torch.float64, generator=generator)
    return x


def repeated_rows(
    m: int, n: int, generator: Generator, *, distinct: int = 5, rank: int = 3, noise: float = 1e-3
) -> Tensor:
    """Rows drawn from ``distinct`` vectors of rank ``rank``, plus relative noise: what a batch of few tokens gives."""
    rank = min(rank, distinct, n)
    vectors = _gaussian(distinct, rank, generator) @ _gaussian(rank, n, generator)
    rows = torch.randint(distinct, (m,), generator=generator)
    x = vectors[rows]
    return x + noise * x.abs().max() * _gaussian(m, n, generator)


SPECTRA: dict[str, Family] = {
    "gaussian": _gaussian,
    "repeated rows": repeated_rows,
    "linear decay": _spectrum(lambda k: torch.linspace(1.0, 1.0 / k, k, dtype=torch.float64)),
    "log decay 1e-3": _spectrum(_log_decay(1e-3)),
    "log decay 1e-7": _spectrum(_log_decay(1e-7)),
    "half zeros": _spectrum(_half_zeros),
    "rank 10": _rank(10),
    "rank 2": _rank(2),
    "one row": _one_row,
    "condition 1e6": _spectrum(lambda k: torch.linspace(1.0, 1e-6, k, dtype=torch.float64)),
}
"""Family by name. ``1×N`` is a shape, not a family: every family takes m = 1."""
