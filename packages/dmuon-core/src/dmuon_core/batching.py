"""Which matrices go through Newton-Schulz together, and in how much memory.

Legend: M the short side, N the long one.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from dmuon_core.cost import H200, recurrence_seconds

SQUARES = {"gram": 5, "direct": 2}
"""M×M buffers of a batch by form: what one step of it reads and writes."""

_ALIGNMENT = 16
_ITEM = 2  # bytes of an entry in half precision
_CANDIDATES = 64


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


def room(form: str, stack: int, square: int) -> int:
    """Memory of a batch: X before and after a product with Q, ``stack`` each, and the M×M buffers, ``square`` each."""
    return 2 * stack + SQUARES[form] * square


def shared_room(form: str, stack: int, square: int) -> int:
    """The same where all M×M buffers but the one of Q lie where X will be after the next product with Q."""
    return 2 * max(stack, (SQUARES[form] - 1) * square) + square


def least_room(form: str, stack: int, square: int) -> int:
    """The better of the two."""
    return min(room(form, stack, square), shared_room(form, stack, square))


def workspace_bytes(m: int, n: int, form: str = "gram") -> int:
    """Bytes that one [m, n] matrix in half precision takes."""
    m, n = padded(m), padded(n)
    return least_room(form, _ITEM * m * n, _ITEM * m * m)


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
        singles = [Piece(p.stack, i, i + 1) for p in ordered for i in range(p.start, p.stop)]
        how = form(first.short, first.long)
        m = padded(first.short)
        sizes = [(_ITEM * m * padded(stacks[p.stack].long), _ITEM * m * m) for p in singles]
        device = replace(H200, sms=sms(first.device))
        seconds = functools.cache(functools.partial(recurrence_seconds, m=first.short, backend=how, device=device))
        batches.extend(_joined(singles[start:stop]) for start, stop in _cuts(sizes, budget, how, seconds))
    return batches


def _grouped(stacks: Sequence[Stack], key: Callable[[Stack], object]) -> list[Batch]:
    groups: dict[object, list[Piece]] = defaultdict(list)
    for i, stack in enumerate(stacks):
        if stack.count and stack.short:
            groups[key(stack)].append(Piece(i, 0, stack.count))
    return [tuple(pieces) for pieces in groups.values()]


def _cuts(
    sizes: Sequence[tuple[int, int]], budget: int, form: str, seconds: Callable[[int], float]
) -> Iterator[tuple[int, int]]:
    """Consecutive ranges that take the least time together; of equal ones those of the most equal lengths.

    Args:
        sizes: bytes of every X and every M×M buffer.
        budget: what a range may take; a single matrix may take more.
        seconds: predicted, by the length of a range.
    """
    ends = [0, 0], *itertools.accumulate(sizes, lambda a, b: (a[0] + b[0], a[1] + b[1]))
    # From the end: time and sum of squared lengths of what begins at `start`, and where its first range ends.
    best: list[tuple[float, int, int]] = [(0.0, 0, 0)] * (len(sizes) + 1)
    furthest = len(sizes)
    for start in reversed(range(len(sizes))):
        while furthest > start + 1 and least_room(form, *map(operator.sub, ends[furthest], ends[start])) > budget:
            furthest -= 1
        # Far below what fits there is nothing to gain: waves are full or not by a few matrices.
        best[start] = min(
            (round(seconds(stop - start) + best[stop][0], 12), (stop - start) ** 2 + best[stop][1], stop)
            for stop in range(max(start + 1, furthest - _CANDIDATES), furthest + 1)
        )
    start = 0
    while start < len(sizes):
        yield start, best[start][2]
        start = best[start][2]


def _joined(singles: Sequence[Piece]) -> Batch:
    """Neighbours of one stack as one piece."""
    joined: list[Piece] = []
    for piece in singles:
        if joined and joined[-1].stack == piece.stack:
            joined[-1] = Piece(piece.stack, joined[-1].start, piece.stop)
        else:
            joined.append(piece)
    return tuple(joined)
