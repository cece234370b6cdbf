"""The buffers of one group: one contiguous bucket per owner in the compute dtype, views of it for the modules.

The owner keeps its own bucket; the others' are freed and filled again by a broadcast. A bucket's storage is resized
rather than replaced, so the Parameters that view it live as long as the group.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dmuon_fsdp.compat import copy_all, preserving_versions
from dmuon_fsdp.runtime.parameter import DedicatedParam

_ALIGNMENT = 256  # bytes: where kernels and NCCL like a matrix to begin


@dataclass(frozen=True)
class Slot:
    """A parameter's part of a bucket, in elements."""

    member: DedicatedParam
    start: int

    def view(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.start + self.member.shape.numel()].view(self.member.shape)


@dataclass(frozen=True)
class Layout:
    """Where the parameters of one owner lie in its bucket."""

    owner: int
    slots: tuple[Slot, ...]
    numel: int

    @classmethod
    def of(cls, owner: int, members: Sequence[DedicatedParam], dtype: torch.dtype) -> Layout:
        step = max(_ALIGNMENT // dtype.itemsize, 1)
        slots, end = [], 0
        for member in members:
            slots.append(Slot(member, end))
            end += -(-member.shape.numel() // step) * step
        return cls(owner, tuple(slots), end)


def layouts_of(members: Sequence[DedicatedParam], dtype: torch.dtype) -> tuple[Layout, ...]:
    """One layout per owner that has some of ``members``, in the order of owners."""
    owners = sorted({member.owner.shard for member in members})
    return tuple(Layout.of(owner, [m for m in members if m.owner.shard == owner], dtype) for owner in owners)


class Buckets:
    """The compute-dtype buffers of one group.

    Args:
        members: the group's parameters in the plan's order.
        rank: this rank's coordinate.
        dtype: compute dtype.
        device: where they live.
    """

    def __init__(self, members: Sequence[DedicatedParam], rank: int, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.rank = rank
        self.layouts = layouts_of(members, dtype)
        self.flat = tuple(torch.empty(layout.numel, dtype=dtype, device=device) for layout in self.layouts)
        self._bytes = tuple(flat.untyped_storage().nbytes() for flat in self.flat)
        self._own = tuple(s.member for layout in self.layouts if layout.owner == rank for s in layout.slots)
        self._copied: tuple[tuple[weakref.ref[Tensor], tuple[int, int]], ...] = ()
        for layout, flat in zip(self.layouts, self.flat, strict=True):
            for slot in layout.slots:
                slot.member.unsharded = nn.Parameter(slot.view(flat), requires_grad=slot.member.param.requires_grad)
        self._views = [m.unsharded for layout in self.layouts for m in (slot.member for slot in layout.slots)]
        self.release()

    def allocate(self) -> None:
        """Give the others' buckets memory, on the current stream."""
        for layout, flat, nbytes in zip(self.layouts, self.flat, self._bytes, strict=True):
            if layout.owner != self.rank:
                flat.untyped_storage().resize_(nbytes)

    def release(self) -> None:
        """Return the others' buckets to the allocator."""
        for layout, flat in zip(self.layouts, self.flat, strict=True):
            if layout.owner != self.rank:
                flat.untyped_storage().resize_(0)

    @property
    def stale(self) -> bool:
        """Whether an owned parameter changed since :meth:`refill`, or was moved: the allocator may give a new tensor
        the address of the old one, and its version counter begins anew."""
        return len(self._copied) != len(self._own) or any(
            source() is not member.owned.local or stamp != member.owned.stamp
            for member, (source, stamp) in zip(self._own, self._copied, strict=True)
        )

    def refill(self) -> None:
        """Copy the owned parameters into this rank's own bucket, in the compute dtype."""
        for layout, flat in zip(self.layouts, self.flat, strict=True):
            if layout.owner == self.rank:
                for slot in layout.slots:
                    slot.view(flat).copy_(slot.member.owned.local)
        self._copied = tuple((weakref.ref(member.owned.local), member.owned.stamp) for member in self._own)

    def to_broadcast(self) -> list[tuple[int, Tensor]]:
        return [(layout.owner, flat) for layout, flat in zip(self.layouts, self.flat, strict=True)]

    def unversioned(self) -> AbstractContextManager[None]:
        """Writes inside do not look like changes to autograd, which saved these views in forward."""
        return preserving_versions([*self.flat, *(view for view in self._views if view is not None)])


class GradientBuckets:
    """What a group sends to its owners after backward: gradients, then one presence element per parameter."""

    def __init__(self, layouts: Sequence[Layout], dtype: torch.dtype, device: torch.device) -> None:
        self.layouts = layouts
        self.flat = tuple(
            torch.empty(layout.numel + len(layout.slots), dtype=dtype, device=device) for layout in layouts
        )

    def pack(self, grads: dict[DedicatedParam, Tensor]) -> None:
        """Copy the gradients in; a missing one is zero and marked absent."""
        views, sources = [], []
        for layout, flat in zip(self.layouts, self.flat, strict=True):
            flat[layout.numel :].fill_(1)
            for index, slot in enumerate(layout.slots):
                grad = grads.get(slot.member)
                if grad is not None:
                    views.append(slot.view(flat))
                    sources.append(grad)
                else:
                    slot.view(flat).zero_()
                    flat[layout.numel + index].zero_()
        copy_all(views, sources)

    def to_reduce(self) -> list[tuple[int, Tensor]]:
        return [(layout.owner, flat) for layout, flat in zip(self.layouts, self.flat, strict=True)]

    def deliver(self, rank: int, divisor: float) -> None:
        """Hand every parameter its reduced gradient, divided: whole on its owner, no rows elsewhere."""
        for layout, flat in zip(self.layouts, self.flat, strict=True):
            if layout.owner == rank:
                _deliver_own(layout, flat, divisor)
            else:
                for slot in layout.slots:
                    slot.member.set_foreign_grad()


def _deliver_own(layout: Layout, flat: Tensor, divisor: float) -> None:
    """One cast and one division for all gradients of a dtype; each is a view of the result."""
    present = (flat[layout.numel :] > 0).to(torch.float32)
    reduced: dict[torch.dtype, Tensor] = {}
    for index, slot in enumerate(layout.slots):
        dtype = slot.member.dtype
        if dtype not in reduced:
            reduced[dtype] = flat[: layout.numel].to(dtype, copy=True).div_(divisor)
        slot.member.set_grad(slot.view(reduced[dtype]), present[index])
