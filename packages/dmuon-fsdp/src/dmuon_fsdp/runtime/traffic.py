"""What the groups of one model share: process group, lanes, the reduction in flight, and counters."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.distributed import ProcessGroup

from dmuon_fsdp.comm.streams import Lane, Ticket


@dataclass
class Traffic:
    """See this module's text.

    Attributes:
        process_group: where every collective runs.
        rank: this rank in it, which is its coordinate in the shard mesh.
        world_size: how many ranks it has.
        reducing: the reduction in flight.
        broadcasts, reduces: how many coalesced calls were made so far.
    """

    process_group: ProcessGroup
    rank: int
    world_size: int
    device: torch.device
    gather_lane: Lane = field(init=False)
    reduce_lane: Lane = field(init=False)
    reducing: Ticket = field(default_factory=Ticket)
    broadcasts: int = 0
    reduces: int = 0

    def __post_init__(self) -> None:
        self.gather_lane = Lane(self.device)
        self.reduce_lane = Lane(self.device)

    def settle_reduce(self) -> None:
        """What follows on the current stream sees every gradient reduced so far."""
        self.reducing.settle()
