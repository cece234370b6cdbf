"""The at-rest representation of a dedicated parameter: a DTensor that is whole on one rank and has no rows elsewhere.

To torch it looks like one of FSDP2's sharded parameters: clipping, GradScaler, optimizers and checkpoints find a
DTensor on the data-parallel mesh, true shape, dtype and device on every rank. To the runtime it is `local`, `owner`
and `full_tensor`. `routing.py` beside it says what an operator does to one. docs/decisions/0001 has the alternatives.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from dmuon_fsdp.compat import AUTOGRAD_KEEPS_SUBCLASSES, build_dtensor, build_like, shard_extent
from dmuon_fsdp.runtime import routing
from dmuon_fsdp.runtime.home import Home, Housed


class OwnedTensor(Housed):
    """A tensor of global shape `shape`, whole on the rank `owner` and with 0 rows elsewhere.

    Operators that need no value of another rank (copies, pointwise, fused and foreach optimizer steps, norms) act on
    it as on any DTensor. Every other one raises on all ranks alike, before a collective, and names the parameter.
    """

    # --- made

    @classmethod
    def wrap(
        cls,
        local: Tensor | None,
        *,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
        mesh: DeviceMesh,
        owner: int,
        name: str,
        tensor_parallel: Sequence[Placement] = (),
    ) -> OwnedTensor:
        """Make one from the whole tensor on the owner and None elsewhere. No communication, no copy.

        Args:
            local: the whole tensor; under tensor parallelism the part of it that this coordinate holds.
            shape: global shape, at least one dimension.
            mesh: FSDP2's data-parallel mesh, followed by the tensor-parallel dimensions if there are any.
            owner: a global rank; under tensor parallelism any rank of the owning group.
            name: canonical name of the parameter, for messages.
            tensor_parallel: placements on the last mesh dimensions.

        Raises:
            ValueError: the tensor is missing on its owner, present elsewhere, or disagrees with shape or dtype.
        """
        home = Home.of(name, mesh, owner, tensor_parallel)
        shape = torch.Size(shape)
        if not shape:
            raise ValueError(f"'{name}' has no dimensions, there is no row to own")
        _, sizes = shard_extent(shape, mesh, home.placements)
        if home.is_owner:
            _check_local(name, local, sizes, dtype, torch.device(device))
        elif local is not None and local.numel():
            raise ValueError(f"'{name}' belongs to rank {home.owner}, but rank {dist.get_rank()} gives values of it")
        if not home.is_owner or local is None:
            local = torch.empty((0, *sizes[1:]), dtype=dtype, device=device)
        return cls.around(local.detach(), shape, home)

    def like(self, local: Tensor) -> OwnedTensor:
        """One of the same shape, dtype and home around ``local``, which is trusted to be what the home says."""
        made = build_like(OwnedTensor, self, local)
        made.home = self.home
        return made

    def adopt(self, source: Tensor) -> OwnedTensor:
        """``source`` in this tensor's home: its owner keeps the values, the others drop them.

        For parameters that torch replaced, as `load_state_dict(assign=True)` does. A plain tensor must hold the same
        values on all ranks and costs no communication; a DTensor is gathered, on all ranks of its mesh.
        """
        if isinstance(source, OwnedTensor) and source.home == self.home:
            return source
        return OwnedTensor.around(routing.part_of(source, self).detach().clone(), self.shape, self.home)

    # --- read

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """`local` for autograd: the gradient comes back as an OwnedTensor."""
        if torch.is_grad_enabled() and self.requires_grad:
            return _Local.apply(self)  # type: ignore[no-any-return, no-untyped-call]
        return self.local

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """The whole tensor on every rank, broadcast from the owner. Call it on all ranks of the mesh.

        Under autograd the gradient is taken to be the same on all ranks, as DTensor does.
        """
        return _Full.apply(self)  # type: ignore[no-any-return, no-untyped-call]

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, **options: Any
    ) -> DTensor:
        """Itself, or replicated over the mesh; a dedicated tensor has no other layout."""
        wanted = tuple(placements) if placements is not None else self.placements
        if device_mesh not in (None, self.device_mesh):
            raise ValueError(f"{self.describe()} cannot move to another mesh; call full_tensor() on all ranks")
        if wanted in (self.placements, self.home.operator_placements):
            return self
        if not all(isinstance(placement, Replicate) for placement in wanted):
            raise ValueError(f"{self.describe()} has no layout {wanted}; allowed is Replicate() everywhere")
        return DTensor.from_local(self.full_tensor(), self.device_mesh, wanted, run_check=False)

    def numpy(self, *, force: bool = False) -> NoReturn:
        routing.refuse(self, "numpy()")

    def tolist(self) -> NoReturn:
        routing.refuse(self, "tolist()")

    @property
    def data(self) -> OwnedTensor:  # type: ignore[override]
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, values: Tensor) -> None:
        """Writes ``values``, of the same shape and dtype, as `copy_` would. torch's exchanges what the wrapper
        pretends to be and leaves `local` as it was."""
        if values.dtype != self.dtype:
            raise ValueError(f"{self.describe()} is {self.dtype} and cannot take {values.dtype}; call module.to(dtype)")
        self.detach().copy_(values)

    def share_memory_(self) -> OwnedTensor:
        # torch's reaches for the storage of the wrapper, which has none, and crashes the process.
        self.local.share_memory_()  # type: ignore[no-untyped-call]
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        where = "here" if self.is_owner else "elsewhere"
        facts = f"shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}"
        grad = ", requires_grad=True" if self.requires_grad else ""
        return f"OwnedTensor('{self.home.name}', owner={self.owner} ({where}), {facts}{grad})"

    # --- torch's protocols

    @classmethod
    def route(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return routing.route(func, args, kwargs)

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties(dtype=self.dtype), self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        if not self.is_owner:
            return []
        return [ChunkStorageMetadata(*self.extent)]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return self.local

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnedTensor:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        made = OwnedTensor.around(self.local.detach().clone(), self.shape, self.home)
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        made.requires_grad_(self.requires_grad)
        memo[id(self)] = made
        if self.grad is not None:
            made.grad = copy.deepcopy(self.grad, memo)
        return made

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ValueError(
            f"{self.describe()}: a pickle written here would not hold its values on the other ranks. To save a model, "
            "use torch.distributed.checkpoint, or for one file torch.distributed.checkpoint.state_dict."
            "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)) on all ranks"
        )


def _check_local(name: str, local: Tensor | None, sizes: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
    if local is None:
        raise ValueError(f"rank {dist.get_rank()} owns '{name}' but gives no tensor for it")
    if (local.shape, local.dtype, local.device.type) != (sizes, dtype, device.type):
        raise ValueError(
            f"'{name}' should be {tuple(sizes)} of {dtype} on {device.type} at its owner, "
            f"it is {tuple(local.shape)} of {local.dtype} on {local.device.type}"
        )


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, owned: OwnedTensor) -> Tensor:  # type: ignore[override]
        ctx.home, ctx.shape = owned.home, owned.shape
        return owned.local.view_as(owned.local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> OwnedTensor:  # type: ignore[override]
        return _as_gradient(grad, ctx.shape, ctx.home)


class _Full(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, owned: OwnedTensor) -> Tensor:  # type: ignore[override]
        ctx.home, ctx.shape = owned.home, owned.shape
        return _broadcast(owned)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> OwnedTensor:  # type: ignore[override]
        extent = shard_extent(ctx.shape, ctx.home.mesh, ctx.home.placements)
        return _as_gradient(routing.cut(grad, *extent).contiguous(), ctx.shape, ctx.home)


def _as_gradient(local: Tensor, shape: torch.Size, home: Home) -> OwnedTensor:
    if not AUTOGRAD_KEEPS_SUBCLASSES:
        raise ValueError(
            f"a gradient through full_tensor() or to_local() of '{home.name}' needs torch 2.12 or later; in a forward "
            "of its module the parameter is a plain tensor and has no such limit"
        )
    return OwnedTensor.around(local, shape, home)


def _broadcast(owned: OwnedTensor) -> Tensor:
    """Owner to all: along the first mesh dimension to the ranks in the owner's row, then row by row."""
    home = owned.home
    _, sizes = shard_extent(owned.shape, home.mesh, (*(Replicate() for _ in home.seat), *home.tensor_parallel))
    device = home.mesh.device_type
    if home.is_owner:
        full = owned.local.to(device, copy=True).contiguous()  # a result never aliases the parameter
    else:
        full = torch.empty(sizes, dtype=owned.dtype, device=device)
    for dim, seat in enumerate(home.seat):
        if home.coordinate[dim + 1 : len(home.seat)] == home.seat[dim + 1 :]:
            dist.broadcast(full, group=home.mesh.get_group(dim), group_src=seat)
    if home.tensor_parallel:
        inner = home.mesh[home.mesh.mesh_dim_names[len(home.seat) :]]  # type: ignore[index]
        full = build_dtensor(
            DTensor, full, shape=owned.shape, mesh=inner, placements=home.tensor_parallel
        ).full_tensor()
    return full


def _rebuild(local: Tensor, shape: torch.Size, home: Home) -> OwnedTensor:
    return OwnedTensor.around(local, shape, home)


def _reduce_for_child(owned: OwnedTensor) -> tuple[Any, ...]:
    return _rebuild, (owned.local, owned.shape, owned.home)


# A child process of this rank is this rank still (dcp.async_save has one): what it is handed keeps its owner. A file
# is not, which is why pickling raises otherwise.
ForkingPickler.register(OwnedTensor, _reduce_for_child)
