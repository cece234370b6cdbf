"""Longest processing time first: the costliest matrix goes to the rank with the least to do."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dmuon_core.cost import adamw_seconds, muon_seconds
from dmuon_core.views import MatrixView
from dmuon_fsdp.planning.options import PlanningOptions

_FP32_BYTES = 4


@dataclass(frozen=True)
class Item:
    """Something that one rank owns.

    Attributes:
        name: canonical name of the parameter.
        shape: its shape.
        nbytes: bytes it occupies at its owner.
        group: its hook boundary.
        view: how it is read as matrices.
        muon: whether its owner orthogonalizes it; else AdamW steps it.
    """

    name: str
    shape: tuple[int, ...]
    nbytes: int
    group: str = ""
    view: MatrixView = field(default_factory=MatrixView.matrix)
    muon: bool = True


def plan_owners(
    shapes: Mapping[str, Sequence[int]], ranks: int, options: PlanningOptions | None = None
) -> dict[str, int]:
    """An owner for every matrix, from names and shapes alone: no model, no process group.

    Deterministic: the same arguments give the same table in every process.

    Args:
        shapes: shape of every matrix by name, in the order of the model.
        ranks: how many ranks may own.

    Returns:
        Rank by name, in the order of ``shapes``.

    Raises:
        ValueError: ``ranks`` is not positive, or the memory bound cannot be held.
    """
    items = [
        Item(name, tuple(shape), _numel(shape) * _FP32_BYTES, view=_view_for(shape)) for name, shape in shapes.items()
    ]
    return assign(items, ranks, options or PlanningOptions())


def assign(items: Sequence[Item], ranks: int, options: PlanningOptions) -> dict[str, int]:
    """As :func:`plan_owners`, for items with their boundary and view."""
    if ranks < 1:
        raise ValueError(f"ranks must be positive, got {ranks}")
    costs = _costs(items, ranks, options)
    packs = _pack(items, options.pack_below)
    order = sorted(range(len(packs)), key=lambda i: (-sum(costs[item.name] for item in packs[i]), i))
    heap = [(0.0, 0, rank) for rank in range(ranks)]
    owners: dict[str, int] = {}
    smallest = min((_bytes(pack) for pack in packs), default=0)
    for index in order:
        pack = packs[index]
        load, held, rank = _take(heap, pack, options.max_bytes_per_rank)
        for item in pack:
            owners[item.name] = rank
            load += costs[item.name]
            held += item.nbytes
        if options.max_bytes_per_rank is None or held + smallest <= options.max_bytes_per_rank:
            heapq.heappush(heap, (load, held, rank))
    return {item.name: owners[item.name] for item in items}


def loads(items: Sequence[Item], owners: Mapping[str, int], ranks: int, options: PlanningOptions) -> list[float]:
    """What each rank has to do, in the unit of ``options.balance``."""
    costs = _costs(items, ranks, options)
    total = [0.0] * ranks
    for item in items:
        total[owners[item.name]] += costs[item.name]
    return total


def _take(heap: list[tuple[float, int, int]], pack: Sequence[Item], bound: int | None) -> tuple[float, int, int]:
    """Remove and return the least loaded rank that has room for ``pack``."""
    need = _bytes(pack)
    full: list[tuple[float, int, int]] = []
    while heap:
        candidate = heapq.heappop(heap)
        if bound is None or candidate[1] + need <= bound:
            for other in full:
                heapq.heappush(heap, other)
            return candidate
        full.append(candidate)
    raise ValueError(
        f"{pack[0].name!r} ({need} bytes) fits no rank: max_bytes_per_rank={bound} is too small for this model on "
        f"its ranks; raise it or take more ranks"
    )


def _bytes(pack: Sequence[Item]) -> int:
    return sum(item.nbytes for item in pack)


def _costs(items: Sequence[Item], ranks: int, options: PlanningOptions) -> dict[str, float]:
    if options.balance == "numel":
        return {item.name: float(_numel(item.shape)) for item in items}
    matrices = {item.name: _matrices(item) for item in items if item.muon}
    counts: Counter[tuple[int, int]] = Counter()
    share: Counter[tuple[int, int]] = Counter()
    for shapes in matrices.values():
        for shape, count in Counter(shapes).items():
            counts[shape] += count
            share[shape] = max(share[shape], count)
    # A rank orthogonalizes its share of a shape as one batch, a whole stack at least: a matrix costs its part of that.
    share = Counter({shape: max(share[shape], round(count / ranks)) for shape, count in counts.items()})
    each = {shape: muon_seconds([shape] * size) / size for shape, size in share.items()}
    elementwise = {item.name: adamw_seconds(_numel(item.shape)) for item in items if not item.muon}
    return {**elementwise, **{name: sum(each[shape] for shape in shapes) for name, shapes in matrices.items()}}


def _matrices(item: Item) -> list[tuple[int, int]]:
    blocks = item.view.matrix_shapes(item.shape)
    return [(min(m, n), max(m, n)) for count, m, n in blocks for _ in range(count)]


def _pack(items: Sequence[Item], below: int) -> list[list[Item]]:
    """Items that share an owner: small ones of one boundary, up to ``below`` elements together."""
    packs: list[list[Item]] = []
    open_packs: dict[str, tuple[int, list[Item]]] = {}
    for item in items:
        size = _numel(item.shape)
        filled, pack = open_packs.get(item.group, (0, []))
        if size >= below:
            packs.append([item])
        elif pack and filled + size < below:
            pack.append(item)
            open_packs[item.group] = (filled + size, pack)
        else:
            packs.append([item])
            open_packs[item.group] = (size, packs[-1])
    return packs


def _numel(shape: Sequence[int]) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel


def _view_for(shape: Sequence[int]) -> MatrixView:
    return MatrixView.matrix() if len(shape) == 2 else MatrixView.batched()
