"""What torch.distributed knows and does not tell.

- `_start_coalescing`, `_end_coalescing`: one NCCL group call for several collectives has no public spelling, and
  `_coalescing_manager` leaves the call open when something raises inside.
- `ProcessGroup.broadcast` and `reduce`: what the functions of the same name come to. Those ask the device for its
  capability, among other things, at every call, and a layer makes a dozen.
- a group's timeout can be given when it is made, but not read.
- the store behind `init_process_group`, where ranks can wait for each other by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work
from torch.distributed.distributed_c10d import BroadcastOptions, ReduceOptions


@contextlib.contextmanager
def coalescing(group: ProcessGroup, device: torch.device) -> Iterator[None]:
    """Collectives launched inside go out as one call; the current stream is ordered after it on leaving."""
    group._start_coalescing(device)
    try:
        yield
    finally:
        work = group._end_coalescing(device)
    if work is not None:  # else the backend has ordered the stream itself
        work.wait()


def broadcast(tensor: Tensor, root: int, group: ProcessGroup, *, asynchronous: bool) -> Work:
    """Launch a broadcast from the rank ``root`` of the group."""
    options = BroadcastOptions()
    options.rootRank = root
    options.rootTensor = 0
    options.asyncOp = asynchronous
    return group.broadcast([tensor], options)


def reduce(tensor: Tensor, root: int, op: ReduceOp, group: ProcessGroup, *, asynchronous: bool) -> Work:
    """Launch a reduction to the rank ``root`` of the group."""
    options = ReduceOptions()
    options.rootRank = root
    options.reduceOp = op
    options.asyncOp = asynchronous
    return group.reduce([tensor], options)


def default_store() -> Any:
    """The store that all ranks of the default process group share."""
    return dist.distributed_c10d._get_default_store()


def group_timeout(group: ProcessGroup, device_type: str) -> timedelta | None:
    """The timeout that collectives of ``group`` have on this kind of device; None where the backend does not say."""
    options = getattr(group._get_backend(torch.device(device_type)), "options", None)
    return getattr(options, "_timeout", None)
