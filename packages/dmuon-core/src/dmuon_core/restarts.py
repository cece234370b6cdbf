"""Where Gram Newton-Schulz must restart, derived from the coefficients.

The Gram form iterates on R = X·Xᵀ alone and collects the polynomial in Q, to apply it once per segment. Rounding makes
R slightly indefinite: its zero eigenvalues come out anywhere down to about −0.8 roundings of the dtype. Such a spurious
eigenvalue r < 0 is outside of the range the coefficients were made for and grows in the recurrence. Restarting
(X ← Q·X, R = X·Xᵀ) forgets it. A segment is carried when Q, over the whole range of R and the spurious values below it,
is so well conditioned that rounding Q does not swamp its small values: cond(Q) · (unit roundoff) ≤ 0.06.

In half precision that puts the restart of Polar Express and of YOU after 2 steps and Keller's after 3, where trials on
adversarial spectra put them too; bfloat16, with an eighth of the precision, restarts more often.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch

from dmuon_core.coefficients import Triple, ceiling

MAX_ROUNDING = 0.06
"""The largest cond(Q) · (unit roundoff) that a segment may reach."""

_SPURIOUS = 0.8  # most negative eigenvalue of a rounded R, in unit roundoffs
_GRID = 20_001
_HEADROOM = 1.02  # rounding can lift a singular value a little over the polynomial's ceiling


def unit_roundoff(dtype: torch.dtype) -> float:
    """The relative rounding error of half precision and of bfloat16; wider dtypes follow half precision's restarts."""
    return float(torch.finfo(dtype if dtype == torch.bfloat16 else torch.float16).eps) / 2


def segment_condition(triples: Sequence[Triple], *, reach: float, spurious: float) -> float:
    """Worst condition of Q after ``triples`` for R's eigenvalues in [spurious, reach]; inf where Q changes sign."""
    eigenvalues = torch.cat(
        [
            torch.linspace(spurious, 0.0, _GRID // 10, dtype=torch.float64),
            torch.linspace(0.0, reach, _GRID, dtype=torch.float64),
        ]
    )
    q = torch.ones_like(eigenvalues)
    for a, b, c in triples:
        factor = a + eigenvalues * (b + eigenvalues * c)
        q = q * factor
        eigenvalues = eigenvalues * factor * factor
    if not bool(torch.isfinite(q).all()) or bool((q.sign() != q[0].sign()).any()):
        return float("inf")
    return float(q.abs().max() / q.abs().min())


def derive_restarts(triples: Sequence[Triple], dtype: torch.dtype = torch.float16) -> tuple[int, ...]:
    """The steps after which to restart, each as late as the bound allows: (2,) for Polar Express with five steps.

    Args:
        triples: (a, b, c) of every step.
        dtype: the dtype that R and Q are stored in.

    Raises:
        ValueError: a single step exceeds the bound in half precision; the text gives the bound and the way out.
    """
    return _derive(tuple(triples), unit_roundoff(dtype))


@functools.lru_cache(maxsize=256)
def _derive(triples: tuple[Triple, ...], roundoff: float) -> tuple[int, ...]:
    restarts: list[int] = []
    start = 0
    while start < len(triples):
        _refuse_uncarriable(triples, start)
        end = start + 1
        while end < len(triples) and _condition(triples, start, end + 1, roundoff) * roundoff <= MAX_ROUNDING:
            end += 1
        restarts.append(end)
        start = end
    return tuple(restarts[:-1])


def _condition(triples: tuple[Triple, ...], start: int, end: int, roundoff: float) -> float:
    reach = 1.0 if start == 0 else (_HEADROOM * ceiling(triples[:start])) ** 2
    return segment_condition(triples[start:end], reach=reach, spurious=-_SPURIOUS * roundoff)


def _refuse_uncarriable(triples: tuple[Triple, ...], step: int) -> None:
    # A segment of one step is the direct form, so bfloat16's tighter bound has nothing to gain there.
    half = unit_roundoff(torch.float16)
    worst = _condition(triples, step, step + 1, half)
    if worst * half > MAX_ROUNDING:
        raise ValueError(
            f"Gram Newton-Schulz cannot carry these coefficients: step {step + 1}, {triples[step]}, gives Q a "
            f'condition of {worst:.3g}, the bound is {MAX_ROUNDING / half:.0f}; use backend="direct" for them'
        )


def as_restarts(restart_iterations: Iterable[int] | None) -> tuple[int, ...] | None:
    """The user's positions as a tuple, None where there are none.

    Raises:
        ValueError: not a sequence of integers.
    """
    if restart_iterations is None:
        return None
    if isinstance(restart_iterations, Iterable):
        positions = tuple(restart_iterations)
        if all(isinstance(position, int) for position in positions):
            return positions
    raise ValueError(
        f"restart_iterations must be None or the steps to restart after, such as (2,), got {restart_iterations!r}"
    )


def check_restarts(restart_iterations: Iterable[int], ns_steps: int) -> tuple[int, ...]:
    """The user's own restart positions, sorted.

    Raises:
        ValueError: a position that is not between two steps.
    """
    positions = tuple(sorted(set(restart_iterations)))
    wrong = [p for p in positions if not 1 <= p < ns_steps]
    if wrong:
        raise ValueError(
            f"restart_iterations {wrong} are not between two of the {ns_steps} steps; allowed: 1 to {ns_steps - 1}"
        )
    return positions
