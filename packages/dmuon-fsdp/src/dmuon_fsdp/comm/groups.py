"""Process groups of our own, so that our collectives never queue behind, or deadlock with, the user's."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from dmuon_fsdp.compat import group_timeout


@dataclass(frozen=True)
class Ranks:
    """The ranks that share a model, as the process groups of one of them.

    Attributes:
        shard: the ranks that FSDP2 shards a parameter over.
        replicate: the ranks at this one's place in the other replicas; None where there is one replica only.
    """

    shard: ProcessGroup
    replicate: ProcessGroup | None = None

    @property
    def groups(self) -> tuple[ProcessGroup, ...]:
        """One after the other they reach every rank that shares the model, in the order of the mesh."""
        return (self.shard,) if self.replicate is None else (self.shard, self.replicate)

    @property
    def size(self) -> int:
        return self.shards * self.replicas

    @property
    def shards(self) -> int:
        return self.shard.size()

    @property
    def replicas(self) -> int:
        return 1 if self.replicate is None else self.replicate.size()

    @property
    def shard_rank(self) -> int:
        return self.shard.rank()

    @property
    def replicate_rank(self) -> int:
        return 0 if self.replicate is None else self.replicate.rank()

    @property
    def is_first(self) -> bool:
        return self.shard_rank == 0 and self.replicate_rank == 0


def make_ranks(shard: DeviceMesh, replicate: DeviceMesh | None, policy: str) -> Ranks:
    """Groups over 1-D meshes: of our own (``"isolated"``) or the meshes' (``"shared"``).

    Nobody outside a mesh takes part in making its group; it has the timeout of the mesh's own.
    """
    if replicate is None or replicate.size() == 1:
        return Ranks(_make_group(shard, policy))
    return Ranks(_make_group(shard, policy), _make_group(replicate, policy))


def _make_group(mesh: DeviceMesh, policy: str) -> ProcessGroup:
    parent = mesh.get_group()
    if policy == "shared" or mesh.size() == 1:
        return parent
    group = dist.new_group(
        dist.get_process_group_ranks(parent),
        timeout=group_timeout(parent, mesh.device_type),
        backend=dist.get_backend(parent),
        use_local_synchronization=True,
        group_desc="dmuon",
    )
    assert isinstance(group, ProcessGroup), "this rank is in the mesh"
    return group
