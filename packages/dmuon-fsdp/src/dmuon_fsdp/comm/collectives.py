"""Broadcast from owners and reduce to owners: all buckets of a group in one coalesced call per direction."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work

from dmuon_fsdp.compat import coalescing


def broadcast_from_owners(buckets: Sequence[tuple[int, Tensor]], group: ProcessGroup) -> tuple[Work, ...]:
    """Broadcast every ``(owner's rank in the group, bucket)`` from its owner, in this order on all ranks.

    Returns:
        What the host must wait for; empty where the current stream is ordered after the collective.
    """
    if not _on_device(buckets):
        return tuple(_started(dist.broadcast(b, group_src=o, group=group, async_op=True)) for o, b in buckets)
    with coalescing(group, buckets[0][1].device):
        for owner, bucket in buckets:
            dist.broadcast(bucket, group_src=owner, group=group)
    return ()


def reduce_to_owners(buckets: Sequence[tuple[int, Tensor]], group: ProcessGroup, op: ReduceOp) -> tuple[Work, ...]:
    """Reduce every ``(owner, bucket)`` over the ranks into its owner's bucket; the others' contents are lost."""
    if not _on_device(buckets):
        return tuple(_started(dist.reduce(b, group_dst=o, op=op, group=group, async_op=True)) for o, b in buckets)
    with coalescing(group, buckets[0][1].device):
        for owner, bucket in buckets:
            dist.reduce(bucket, group_dst=owner, op=op, group=group)
    return ()


def _on_device(buckets: Sequence[tuple[int, Tensor]]) -> bool:
    return bool(buckets) and buckets[0][1].device.type != "cpu"


def _started(work: Work | None) -> Work:
    assert work is not None, "this rank is in the group"
    return work
