"""Broadcast from owners and reduce to owners: all buckets of a group in one coalesced call per direction."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work

from dmuon_fsdp.compat import broadcast, coalescing, reduce


def broadcast_from_owners(buckets: Sequence[tuple[int, Tensor]], group: ProcessGroup) -> tuple[Work, ...]:
    """Broadcast every ``(owner's rank in the group, bucket)`` from its owner, in this order on all ranks.

    Returns:
        What the host must wait for; empty where the current stream is ordered after the collective.
    """
    if group.size() == 1:
        return ()
    if not _on_device(buckets):
        return tuple(broadcast(bucket, owner, group, asynchronous=True) for owner, bucket in buckets)
    with coalescing(group, buckets[0][1].device):
        for owner, bucket in buckets:
            broadcast(bucket, owner, group, asynchronous=False)
    return ()


def reduce_to_owners(buckets: Sequence[tuple[int, Tensor]], group: ProcessGroup, op: ReduceOp) -> tuple[Work, ...]:
    """Reduce every ``(owner, bucket)`` over the ranks into its owner's bucket; the others' contents are lost."""
    if group.size() == 1:
        return ()
    if not _on_device(buckets):
        return tuple(reduce(bucket, owner, op, group, asynchronous=True) for owner, bucket in buckets)
    with coalescing(group, buckets[0][1].device):
        for owner, bucket in buckets:
            reduce(bucket, owner, op, group, asynchronous=False)
    return ()


def _on_device(buckets: Sequence[tuple[int, Tensor]]) -> bool:
    return bool(buckets) and buckets[0][1].device.type != "cpu"
