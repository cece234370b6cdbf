"""What one rank has or cannot do, known to all that share a model: from the first rank to all, and failures alike."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dmuon_fsdp.comm.agree import gather
from dmuon_fsdp.comm.groups import Ranks

T = TypeVar("T")
_KINDS = (FileNotFoundError, KeyError, ValueError, OSError, RuntimeError)


def broadcast_from_first(tensor: Tensor, ranks: Ranks) -> None:
    """The first rank's tensor into everybody's: along the first replica, then over the replicas."""
    if ranks.replicate_rank == 0:
        dist.broadcast(tensor, group=ranks.shard, group_src=0)
    if ranks.replicate is not None:
        dist.broadcast(tensor, group=ranks.replicate, group_src=0)


def object_from_first(value: T, ranks: Ranks) -> T:
    """The first rank's value."""
    holder = [value]
    if ranks.replicate_rank == 0:
        dist.broadcast_object_list(holder, group=ranks.shard, group_src=0)
    if ranks.replicate is not None:
        dist.broadcast_object_list(holder, group=ranks.replicate, group_src=0)
    return holder[0]


def all_or_none(work: Callable[[], T], groups: Sequence[ProcessGroup]) -> T:
    """What ``work()`` returns; where it fails on any rank, every rank raises: its own failure, or else the first one.

    For work without collectives, such as reading files. A failure of any kind is told: the others would wait for ever.
    """
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:
        failure = error
    told = None if failure is None else _told(failure)
    first = next((each for each in gather(told, groups) if each is not None), None)
    if failure is not None:
        raise failure
    if first is not None:
        raise first[0](first[1])
    return result


def _told(failure: Exception) -> tuple[type[Exception], str]:
    """What another rank raises of it: a kind that one text makes."""
    kind = next((kind for kind in _KINDS if isinstance(failure, kind)), None)
    if kind is None:
        return RuntimeError, said(failure)
    return kind, str(failure.args[0] if kind is KeyError and failure.args else failure)


def said(error: BaseException) -> str:
    """An error in a text: some have none of their own."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def world() -> list[ProcessGroup]:
    """The group of all ranks, over which ``torch.distributed.checkpoint`` works."""
    assert dist.group.WORLD is not None, "there is a process group"
    return [dist.group.WORLD]


def union(names: Sequence[str], groups: Sequence[ProcessGroup]) -> set[str]:
    """The names of all ranks. Only digests travel where they are the same."""
    own = sorted(names)
    digest = hashlib.sha256("\n".join(own).encode()).hexdigest()
    if len(set(gather(digest, groups))) == 1:
        return set(own)
    return {name for each in gather(own, groups) for name in each}
