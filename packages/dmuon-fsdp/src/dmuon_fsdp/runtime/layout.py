"""Tensors of a model as its parameters are laid out over the ranks: whole on an owner, FSDP2's shards, or plain."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from dmuon_fsdp.compat import local_tensor, shard_extent
from dmuon_fsdp.runtime.owned_tensor import OwnedTensor
from dmuon_fsdp.runtime.routing import part_of


def local_of(tensor: Tensor) -> Tensor:
    """What this rank holds of it, itself and without autograd; no rows where another rank owns it."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor.detach()


def block_of(tensor: Tensor) -> tuple[torch.Size, torch.Size]:
    """Offsets and sizes of this rank's part of the whole tensor."""
    if isinstance(tensor, OwnedTensor):
        return tensor.extent
    if isinstance(tensor, DTensor):
        return shard_extent(tensor.shape, tensor.device_mesh, tensor.placements)
    return torch.Size((0,) * tensor.ndim), tensor.shape


def whole_of(tensor: Tensor) -> Tensor:
    """The whole tensor, on every rank. Collective where it is laid out over ranks."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def laid_out(value: Tensor, like: Tensor, *, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """A copy of ``value`` as ``like`` is laid out.

    Args:
        value: a plain tensor that holds the same on all ranks, or a DTensor of any layout, which is gathered where it
            has another one than ``like``, on all ranks of its mesh.
        device: where this rank's part of the copy lies; None means where its part of ``like`` does.
    """
    device = local_of(like).device if device is None else device
    if isinstance(like, OwnedTensor):
        return OwnedTensor.around(part_of(value.detach(), like).to(device, dtype, copy=True), like.shape, like.home)
    if not isinstance(like, DTensor):
        return whole_of(value).detach().to(device, dtype, copy=True)
    made = cast(DTensor, torch.empty_like(like, dtype=dtype, device=device, requires_grad=False))
    _put_block(made, value)
    return made


def is_laid_out(value: Tensor, like: Tensor, *, dtype: torch.dtype) -> bool:
    """Whether :func:`laid_out` would make a plain copy of it: the same layout, dtype and device already."""
    if type(value) is not type(like.data) or (local_of(value).device, value.dtype) != (local_of(like).device, dtype):
        return False
    if isinstance(value, OwnedTensor) and isinstance(like, OwnedTensor):
        return value.home == like.home
    return not isinstance(like, DTensor) or _laid_out_alike(value, like)


def write_(target: Tensor, value: Tensor) -> None:
    """``value`` into ``target`` in place, on all ranks; as :func:`laid_out` takes it."""
    with torch.no_grad():
        if isinstance(target, OwnedTensor):
            target.copy_(value)
        elif isinstance(target, DTensor):
            _put_block(target, value)
        else:
            target.copy_(whole_of(value))


def write_block_(target: Tensor, read: Callable[[torch.Size, torch.Size], Tensor]) -> None:
    """Into ``target`` in place what ``read(offsets, sizes)`` gives for this rank's part; not called where it has none.

    On all ranks, whose copies of a plain tensor must come out equal. No communication.
    """
    with torch.no_grad():
        local = local_of(target)
        if local.numel():
            local.copy_(read(*block_of(target)))
        if isinstance(target, OwnedTensor):
            target.count_write()


def _put_block(target: DTensor, value: Tensor) -> None:
    if _laid_out_alike(value, target):
        local_tensor(target).copy_(local_of(value))
        return
    shard = distribute_tensor(whole_of(value).detach(), target.device_mesh, target.placements, src_data_rank=None)
    local_tensor(target).copy_(local_tensor(shard))


def _laid_out_alike(value: Tensor, target: DTensor) -> bool:
    if not isinstance(value, DTensor) or isinstance(value, OwnedTensor):
        return False
    return (value.device_mesh, value.placements) == (target.device_mesh, target.placements)
