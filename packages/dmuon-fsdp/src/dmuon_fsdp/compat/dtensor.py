"""DTensor's inside: making one of a subclass, the tensor in it, and the mesh under it.

- DTensorSpec, TensorMeta and DTensor.__new__: `DTensor.from_local` returns a plain DTensor, there is no public
  constructor of a subclass.
- `_local_tensor`, `_spec`: `to_local()` is an autograd function and returns a new tensor each time; the at-rest
  tensor itself is needed for its version counter, its address, and to write into it.
- compute_local_shape_and_global_offset: where a shard lies in the whole tensor; DCP asks it, so we ask the same.
- `_concatenate`, `_get_root_mesh`, and what `from_group` sets: HSDP's mesh from its two dimensions, with or without
  names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement

D = TypeVar("D", bound=DTensor)


def build_dtensor(
    cls: type[D], local: Tensor, *, shape: torch.Size, mesh: DeviceMesh, placements: Sequence[Placement]
) -> D:
    """Return a ``cls`` of this global shape around ``local``, which may have any number of rows."""
    meta = TensorMeta(shape, contiguous_strides(shape), local.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    return DTensor.__new__(cls, local, spec, requires_grad=False)  # type: ignore[return-value]


def build_like(cls: type[D], template: DTensor, local: Tensor) -> D:
    """A ``cls`` around ``local`` with the very spec of ``template``, which must describe it; spares making one."""
    return DTensor.__new__(cls, local, template._spec, requires_grad=False)  # type: ignore[return-value]


def local_tensor(dtensor: DTensor) -> Tensor:
    """The tensor that a DTensor holds on this rank, itself and without autograd."""
    return dtensor._local_tensor


def plain_dtensor(dtensor: DTensor, local: Tensor | None = None) -> DTensor:
    """A DTensor of exactly that class with the same spec, around ``local`` or the same local tensor.

    torch's own rules for an operator apply to it: a subclass that routes operators hands this on.
    """
    spec = dtensor._spec
    return DTensor.__new__(DTensor, dtensor._local_tensor if local is None else local, spec, requires_grad=False)


def shard_extent(shape: torch.Size, mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[torch.Size, torch.Size]:
    """Offsets and sizes of this rank's part of a tensor of that global shape."""
    sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, tuple(placements))
    return torch.Size(offsets), torch.Size(sizes)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a row-major tensor."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return tuple(strides)


class SeatedShard(Shard):
    """``Shard(0)`` whose rows all sit at one coordinate of its mesh dimension, ``seat``.

    torch slices a full tensor by `_local_shard_size_and_offset` of a DTensor's placements when it loads a full state
    dict into a sharded model, when it loads onto a meta tensor, and when it names a shard in a checkpoint. An even
    `Shard(0)` there would write a few rows of a matrix over all of it. This class is what `placements` shows; the
    spec inside the DTensor has `Shard(0)`, whose rules for operators are right.
    """

    def __new__(cls, seat: int) -> SeatedShard:
        return super().__new__(cls, 0)  # type: ignore[call-arg]

    def __init__(self, seat: int) -> None:
        super().__init__(0)
        self.seat = seat

    def __reduce__(self) -> tuple[type[SeatedShard], tuple[int]]:
        return SeatedShard, (self.seat,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SeatedShard) and other.seat == self.seat

    def __hash__(self) -> int:
        return hash((type(self), self.seat))

    def __repr__(self) -> str:
        return f"SeatedShard(seat={self.seat})"

    def _local_shard_size_and_offset(self, curr_local_size: Any, num_chunks: Any, rank: Any) -> tuple[Any, Any]:
        return (curr_local_size, 0) if rank == self.seat else (0, curr_local_size)


def grid_mesh(replicate: DeviceMesh, shard: DeviceMesh, ranks: Tensor) -> DeviceMesh:
    """The 2-D mesh of which these are the two dimensions; equal to the one that ``fully_shard`` gets for HSDP.

    Args:
        ranks: [replicas, shards], for meshes that are no slices of a common one.
    """
    if replicate.mesh_dim_names and shard.mesh_dim_names and replicate._get_root_mesh() is shard._get_root_mesh():
        return DeviceMesh._concatenate([replicate, shard])
    names = (*(replicate.mesh_dim_names or ()), *(shard.mesh_dim_names or ()))
    made = DeviceMesh(
        shard.device_type,
        ranks.to(torch.int),
        mesh_dim_names=names if len(set(names)) == 2 else None,
        _init_backend=False,
    )
    groups = [replicate.get_group(), shard.get_group()]
    made._dim_group_names = [group.group_name for group in groups]
    made._pg_registry.update({group.group_name: group for group in groups})
    return made
