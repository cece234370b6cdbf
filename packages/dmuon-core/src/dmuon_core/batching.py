"""Which matrices go through Newton-Schulz together, and in how much memory.

Legend: M the short side, N the long one.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from dmuon_core.cost import H200, recurrence_seconds

SQUARES = 5
"""M×M buffers of a batch: what one step of the Gram recurrence reads and writes."""

_ALIGNMENT = 16


@dataclass(frozen=True)
class Stack:
    """``count`` matrices of one parameter, ``[count, rows, columns]``."""

    count: int
    rows: int
    columns: int
    dtype: torch.dtype
    device: torch.device

    @property
    def short(self) -> int:
        return min(self.rows, self.columns)

    @property
    def long(self) -> int:
        return max(self.rows, self.columns)


@dataclass(frozen=True)
class Piece:
    """The matrices ``[start:stop]`` of the stack with the number ``stack``."""

    stack: int
    start: int
    stop: int


Batch = tuple[Piece, ...]


def padded(size: int) -> int:
    """The next multiple of 16: what lets every kernel load and store whole vectors."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def workspace_bytes(m: int, n: int, item: int = 2) -> int:
    """Bytes that one [m, n] matrix takes: X before and after a product with Q, and the M×M buffers."""
    m, n = padded(m), padded(n)
    return item * (2 * m * n + SQUARES * m * m)


def by_shape(stacks: Sequence[Stack]) -> list[Batch]:
    """Batches of equal shape up to transposition, dtype and device."""
    return _grouped(stacks, lambda stack: (stack.short, stack.long, stack.dtype, stack.device))


def by_short_side(
    stacks: Sequence[Stack],
    *,
    budget: int,
    sms: Callable[[torch.device], int],
    form: Callable[[int, int], str] = lambda m, n: "gram",
) -> list[Batch]:
    """Batches of equal short side and form, since the M×M recurrence does not see the long side.

    Args:
        stacks: what there is.
        form: which form of Newton-Schulz [m, n] matrices take.
        budget: bytes of workspace that a batch may take; a single matrix may take more.
        sms: the streaming multiprocessors of a device, which batches are to fill in whole waves.
    """
    batches: list[Batch] = []
    for group in _grouped(stacks, lambda stack: (stack.short, form(stack.short, stack.long), stack.device)):
        ordered = sorted(group, key=lambda piece: -stacks[piece.stack].long)
        first = stacks[ordered[0].stack]
        batches.extend(_cut(ordered, stacks, budget, first.short, sms(first.device)))
    return batches


def _grouped(stacks: Sequence[Stack], key: Callable[[Stack], object]) -> list[Batch]:
    groups: dict[object, list[Piece]] = defaultdict(list)
    for i, stack in enumerate(stacks):
        if stack.count and stack.short:
            groups[key(stack)].append(Piece(i, 0, stack.count))
    return [tuple(pieces) for pieces in groups.values()]


def _cut(pieces: Sequence[Piece], stacks: Sequence[Stack], budget: int, m: int, sms: int) -> Iterator[Batch]:
    """Consecutive batches that fit, cut where the M×M recurrences over all of them take the least predicted time."""
    singles = [Piece(p.stack, i, i + 1) for p in pieces for i in range(p.start, p.stop)]
    sizes = [workspace_bytes(m, stacks[p.stack].long) for p in singles]
    sum_of = [*itertools.accumulate(sizes, initial=0)]
    device = replace(H200, sms=sms)
    seconds = functools.cache(lambda count: recurrence_seconds(count, m, device=device))
    # From the end: the least time of what begins at `start`, and where its first batch ends.
    best = [(0.0, 0)] * (len(singles) + 1)
    for start in reversed(range(len(singles))):
        furthest = max(start + 1, bisect.bisect_right(sum_of, sum_of[start] + budget) - 1)
        best[start] = min((seconds(stop - start) + best[stop][0], stop) for stop in range(start + 1, furthest + 1))
    start = 0
    while start < len(singles):
        stop = best[start][1]
        yield _joined(singles[start:stop])
        start = stop


def _joined(singles: Sequence[Piece]) -> Batch:
    """Neighbours of one stack as one piece."""
    joined: list[Piece] = []
    for piece in singles:
        if joined and joined[-1].stack == piece.stack:
            joined[-1] = Piece(piece.stack, joined[-1].start, piece.stop)
        else:
            joined.append(piece)
    return tuple(joined)
