"""Coefficient sets of the quintic Newton-Schulz iteration, and what they do to a singular value.

One step with (a, b, c) maps every singular value σ to a·σ + b·σ³ + c·σ⁵.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Triple = tuple[float, float, float]


@dataclass(frozen=True)
class CoefficientSet:
    """The triples of successive steps; a sequence of them.

    Attributes:
        name: shown to users.
        triples: (a, b, c) of step 1, 2, …
        repeats: whether the one triple may be used for any number of steps.
    """

    name: str
    triples: tuple[Triple, ...]
    repeats: bool = False

    def __len__(self) -> int:
        return len(self.triples)

    def __iter__(self) -> Iterator[Triple]:
        return iter(self.triples)

    def __getitem__(self, step: int) -> Triple:
        return self.triples[step]

    def plain(self) -> str | Triple | tuple[Triple, ...]:
        """What :func:`as_coefficients` reads back, of types that every checkpoint can hold."""
        for name, known in _BY_NAME.items():
            if self == known:
                return name
        return self.triples[0] if self.repeats else self.triples

    def take(self, ns_steps: int) -> tuple[Triple, ...]:
        """The triples of the first ``ns_steps`` steps.

        Raises:
            ValueError: the set holds fewer, and is not a single triple that repeats.
        """
        if isinstance(ns_steps, bool) or not isinstance(ns_steps, int) or ns_steps < 1:
            raise ValueError(f"ns_steps must be a positive integer, got {ns_steps!r}")
        if self.repeats:
            return self.triples * ns_steps
        if ns_steps > len(self.triples):
            raise ValueError(
                f"ns_steps={ns_steps}, but the {self.name} coefficients hold {len(self.triples)} steps; "
                f"take fewer, or a single triple, which repeats"
            )
        return self.triples[:ns_steps]


KELLER = CoefficientSet("Keller", ((3.4445, -4.7750, 2.0315),), repeats=True)
"""Keller Jordan, "Muon: An optimizer for hidden layers in neural networks" (2024); torch.optim.Muon's default."""

YOU = CoefficientSet(
    "YOU",
    (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
)
"""Jiacheng You's five steps, found by search (modded-nanogpt, 2025)."""

_POLAR_EXPRESS_RAW = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)
_POLAR_EXPRESS_SAFETY = 1.05

POLAR_EXPRESS = CoefficientSet(
    "Polar Express",
    tuple(
        (a / _POLAR_EXPRESS_SAFETY, b / _POLAR_EXPRESS_SAFETY**3, c / _POLAR_EXPRESS_SAFETY**5)
        for a, b, c in _POLAR_EXPRESS_RAW
    ),
)
"""Amsel, Persson, Musco, Gower, "The Polar Express" (arXiv 2505.16932), algorithm 1, its safety factor 1.05 applied."""

CoefficientsLike = CoefficientSet | Sequence[float] | Sequence[Sequence[float]] | str | None

_BY_NAME = {"polar_express": POLAR_EXPRESS, "you": YOU, "keller": KELLER}


def as_coefficients(coefficients: CoefficientsLike) -> CoefficientSet:
    """A :class:`CoefficientSet` from what users write.

    Args:
        coefficients: None (Polar Express), a set, its name (``"polar_express"``, ``"you"``, ``"keller"``), one triple
            (repeated for every step, as in torch.optim.Muon), or a sequence of triples (one a step).

    Raises:
        ValueError: an unknown name, not triples, or numbers that are not finite.
    """
    if coefficients is None:
        return POLAR_EXPRESS
    if isinstance(coefficients, CoefficientSet):
        return coefficients
    if isinstance(coefficients, str):
        name = coefficients.lower().replace(" ", "_")
        if name not in _BY_NAME:
            raise ValueError(
                f"unknown ns_coefficients {coefficients!r}; known: {', '.join(_BY_NAME)}, or give triples (a, b, c)"
            )
        return _BY_NAME[name]
    return _custom(coefficients)


def _custom(coefficients: Sequence[float] | Sequence[Sequence[float]]) -> CoefficientSet:
    try:
        values: list[Any] = list(coefficients)
        single = len(values) == 3 and all(isinstance(value, numbers.Real) for value in values)
        triples = tuple(_triple(row) for row in ([values] if single else values))
    except (TypeError, ValueError):
        triples, single = (), False
    if not triples:
        raise ValueError(
            f"ns_coefficients must be a triple (a, b, c) of finite numbers or a sequence of such, got {coefficients!r}"
        )
    return CoefficientSet("custom", triples, repeats=single)


def _triple(row: Sequence[float]) -> Triple:
    a, b, c = (float(value) for value in row)
    if not all(math.isfinite(value) for value in (a, b, c)):
        raise ValueError("not finite")
    return a, b, c


def apply_polynomial(sigma: Tensor, triples: Sequence[Triple]) -> Tensor:
    """What the steps make of singular values ``sigma``, elementwise, in its dtype."""
    for a, b, c in triples:
        square = sigma * sigma
        sigma = sigma * (a + square * (b + square * c))
    return sigma


@functools.lru_cache(maxsize=256)
def ceiling(triples: tuple[Triple, ...]) -> float:
    """The largest output for any singular value in [0, 1]: 1.124 for Polar Express with five steps."""
    grid = torch.linspace(0.0, 1.0, 100_001, dtype=torch.float64)
    return float(apply_polynomial(grid, triples).abs().max())
