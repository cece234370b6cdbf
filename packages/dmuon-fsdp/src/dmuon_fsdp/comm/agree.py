"""Do the ranks mean the same? Compared once, before anything depends on it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from dmuon_fsdp.compat import default_store, group_timeout

T = TypeVar("T")
_PATIENCE = timedelta(minutes=10)  # where the group does not say how long its collectives may take


def meet(call: str, groups: Sequence[ProcessGroup], device_type: str) -> None:
    """Wait in the store until the ranks of every group in turn make this call as often as this rank has.

    A collective that some ranks never reach waits as long and says less: here the absent ranks have names.

    Raises:
        RuntimeError: some ranks did not come within the group's timeout.
    """
    for group in groups:
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) > 1:
            _meet(call, ranks, group_timeout(group, device_type) or _PATIENCE)


def _meet(call: str, ranks: Sequence[int], patience: timedelta) -> None:
    me, store = dist.get_rank(), default_store()
    place = f"dmuon/{'.'.join(map(str, ranks))}/{call}"
    count = store.add(f"{place}/count/{me}", 1)
    keys = {rank: f"{place}/{count}/{rank}" for rank in ranks}
    store.set(keys[me], "here")
    try:
        store.wait(list(keys.values()), patience)
    except RuntimeError:
        store.add(f"{place}/count/{me}", -1)
        absent = [rank for rank, key in keys.items() if not store.check([key])]
        raise RuntimeError(
            f"{call} is collective: ranks {absent} did not come to it within {patience.total_seconds():g} s; make the "
            f"same calls on every rank of the mesh"
        ) from None


def agree_on(
    digest: str, lines: Sequence[str], groups: Sequence[ProcessGroup], *, what: str = "what is dedicated"
) -> None:
    """Raise on all ranks alike unless every rank has the same.

    Args:
        digest: of ``lines``; compared first, the lines only where digests differ.
        lines: one a parameter.
        groups: which one after the other reach every rank.
        what: they are about, for the message.

    Raises:
        ValueError: names the first line that differs, and the ranks.
    """
    digests = gather(digest, groups)
    if len(set(digests)) == 1:
        return
    ranks = gather(dist.get_rank(), groups)
    tables: list[Sequence[str]] = gather(list(lines), groups)
    odd = next(i for i, other in enumerate(digests) if other != digests[0])
    row = next((i for i, pair in enumerate(zip(tables[0], tables[odd], strict=False)) if pair[0] != pair[1]), None)
    if row is None:
        row = min(len(tables[0]), len(tables[odd]))
    raise ValueError(
        f"the ranks disagree on {what}: rank {ranks[0]} has {_row(tables[0], row)}, rank {ranks[odd]} has "
        f"{_row(tables[odd], row)}; build the same model and give the same arguments on every rank"
    )


def _row(table: Sequence[str], row: int) -> str:
    return repr(table[row]) if row < len(table) else "nothing more"


def gather(value: T, groups: Sequence[ProcessGroup]) -> list[T]:
    """What every rank has, over all groups, in the order of the mesh whose dimensions they are, the last one first."""
    values = [value]
    for group in groups:
        parts: list[Any] = [None] * group.size()
        dist.all_gather_object(parts, values, group=group)
        values = [each for part in parts for each in part]
    return values
