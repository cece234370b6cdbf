"""What the groups of one dedication share: ranks, lanes, the reductions in flight, and counters."""

from __future__ import annotations

import contextlib
from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from dmuon_fsdp.comm.groups import Ranks
from dmuon_fsdp.comm.streams import Lane, Ticket
from dmuon_fsdp.runtime.timings import Timings


@dataclass
class Traffic:
    """See this module's text.

    Attributes:
        ranks: where every collective runs.
        gather_lane: weights on their way to the ranks that compute.
        reduce_lane: gradients on their way to the ranks that own, within a replica.
        replicate_lane: between replicas, gradients one way and weights the other.
        reducing: the reductions in flight, the oldest first.
        broadcasts, reduces: how many coalesced calls were made within replicas so far.
        publishes, replica_reduces: between replicas.
        timings: records how long the compute stream waits; None records nothing.
    """

    ranks: Ranks
    device: torch.device
    gather_lane: Lane = field(init=False)
    reduce_lane: Lane = field(init=False)
    replicate_lane: Lane = field(init=False)
    reducing: deque[Ticket] = field(default_factory=deque)
    broadcasts: int = 0
    reduces: int = 0
    publishes: int = 0
    replica_reduces: int = 0
    timings: Timings | None = None

    def __post_init__(self) -> None:
        self.gather_lane = Lane(self.device)
        self.reduce_lane = Lane(self.device)
        self.replicate_lane = Lane(self.device)

    @property
    def rank(self) -> int:
        """Of all, for messages."""
        return dist.get_rank()

    @property
    def averages(self) -> bool:
        """Whether a collective may divide: exactly, by a power of two, where the backend can."""
        sizes = self.ranks.shards, self.ranks.replicas
        return self.device.type == "cuda" and all(size & (size - 1) == 0 for size in sizes)

    def reduce_op(self, *, averages: bool) -> ReduceOp:
        return ReduceOp(ReduceOp.AVG if averages else ReduceOp.SUM)

    def settle_reductions(self, leave: int = 0) -> None:
        """What follows on the current stream sees every gradient reduced so far, but for the ``leave`` latest."""
        while len(self.reducing) > leave:
            with self.waiting("wait for reduce"):
                self.reducing.popleft().settle()

    def waiting(self, name: str) -> AbstractContextManager[None]:
        """Around what makes the compute stream wait."""
        return contextlib.nullcontext() if self.timings is None else self.timings.span(name)
