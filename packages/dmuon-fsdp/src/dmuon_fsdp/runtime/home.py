"""Where a dedicated tensor lives, and the DTensor that carries this knowledge.

Vocabulary: the *seat* is the owner's coordinate on the mesh dimensions that choose the owner. Mesh dimensions after
those are tensor-parallel: there each coordinate holds its own part, and each has its owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from dmuon_fsdp.compat import RoutedDTensor, SeatedShard, build_dtensor, local_tensor, shard_extent

if TYPE_CHECKING:
    from typing_extensions import Self


_WRITES = "_dmuon_writes"  # on `local`, which all aliases of a parameter share


@dataclass(frozen=True)
class Home:
    """Where a dedicated tensor lives. Every tensor derived from a parameter (gradient, state, copy) has the same.

    Attributes:
        name: canonical name of the parameter, for messages.
        mesh: the owner dimensions, then the tensor-parallel ones.
        seat: the owner's coordinate on the owner dimensions.
        tensor_parallel: one placement per tensor-parallel dimension, empty without tensor parallelism.
    """

    name: str
    mesh: DeviceMesh
    seat: tuple[int, ...]
    tensor_parallel: tuple[Placement, ...] = ()

    @classmethod
    def of(cls, name: str, mesh: DeviceMesh, owner: int, tensor_parallel: Sequence[Placement] = ()) -> Home:
        """The home on the seat of rank ``owner``."""
        where = (mesh.mesh == owner).nonzero()
        if len(where) != 1:
            raise ValueError(f"rank {owner} is to own '{name}' but is not in the mesh {mesh.mesh.tolist()}")
        if mesh.get_coordinate() is None:
            raise ValueError(f"'{name}' lives on the mesh {mesh.mesh.tolist()}, rank {dist.get_rank()} is not in it")
        owner_dims = mesh.ndim - len(tensor_parallel)
        if owner_dims < 1:
            raise ValueError(
                f"'{name}': a mesh of {mesh.ndim} dimensions, {len(tensor_parallel)} of them tensor-parallel, leaves "
                "none to choose an owner on"
            )
        return cls(name, mesh, tuple(where[0, :owner_dims].tolist()), tuple(tensor_parallel))

    def __deepcopy__(self, memo: dict[int, Any]) -> Home:
        return self  # frozen, and a process group cannot be copied

    @property
    def coordinate(self) -> tuple[int, ...]:
        coordinate = self.mesh.get_coordinate()
        assert coordinate is not None
        return tuple(coordinate)

    @property
    def is_owner(self) -> bool:
        return self.coordinate[: len(self.seat)] == self.seat

    @property
    def owner(self) -> int:
        """The global rank that holds what this rank would need."""
        coordinate = self.seat + self.coordinate[len(self.seat) :]
        return int(self.mesh.mesh[coordinate])

    @property
    def placements(self) -> tuple[Placement, ...]:
        """What is true: all rows at the seat."""
        return (*map(SeatedShard, self.seat), *self.tensor_parallel)

    @property
    def operator_placements(self) -> tuple[Placement, ...]:
        """What torch's rules for operators see: an uneven Shard(0), for which their results are right."""
        return (*(Shard(0) for _ in self.seat), *self.tensor_parallel)


class Housed(RoutedDTensor):
    """A DTensor with a home: its rows all sit at the seat, `local` has none elsewhere."""

    home: Home

    @classmethod
    def around(cls, local: Tensor, shape: torch.Size, home: Home) -> Self:
        """Trusts the caller that ``local`` is what the home says."""
        made = build_dtensor(cls, local, shape=shape, mesh=home.mesh, placements=home.operator_placements)
        made.home = home
        return made

    @property
    def local(self) -> Tensor:
        """The tensor itself, whole on the owner, ``[0, ...]`` elsewhere, without autograd. Writes are seen."""
        return local_tensor(self)

    @property
    def stamp(self) -> tuple[int, int]:
        """Changes whenever the values may have changed: version counter and address of `local`.

        Aliases (`detach`, `data`, entries of a state dict) share both. Operators count here, not on the wrapper.
        """
        return self.local._version, self.local.data_ptr()

    @property
    def writes(self) -> int:
        """How many operators wrote to it, a number equal on all ranks; what wrote to `local` alone does not count."""
        return getattr(self.local, _WRITES, 0)

    def count_write(self) -> None:
        setattr(self.local, _WRITES, self.writes + 1)

    @property
    def owner(self) -> int:
        """Global rank of the owner."""
        return self.home.owner

    @property
    def is_owner(self) -> bool:
        return self.home.is_owner

    @property
    def placements(self) -> tuple[Placement, ...]:
        return self.home.placements

    @property
    def extent(self) -> tuple[torch.Size, torch.Size]:
        """Offsets and sizes of this rank's part of the whole."""
        return shard_extent(self.shape, self.home.mesh, self.home.placements)

    def describe(self) -> str:
        """'layers.0.weight' (8×4, whole on rank 1 only)"""
        size = "×".join(str(n) for n in self.shape)
        return f"'{self.home.name}' ({size}, whole on rank {self.owner} only)"
