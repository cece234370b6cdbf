"""The buffers of one group: one contiguous bucket per owner in the compute dtype, views of it for the modules.

A rank keeps the buckets of its own place in the mesh: those it owns, and in HSDP those that the owners at its place in
the other replicas publish. All others are freed and filled again by a broadcast. Between forward and backward, when
activations fill the memory, what a rank owns can go too: it casts its parameters once more. A bucket's storage is
resized rather than replaced, so the Parameters that view it live as long as the group.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dmuon_fsdp.compat import copy_all, preserving_versions
from dmuon_fsdp.planning.plan import Owner
from dmuon_fsdp.runtime.parameter import DedicatedParam

_ALIGNMENT = 256  # bytes: where kernels and NCCL like a matrix to begin


@dataclass(frozen=True)
class Slot:
    """A parameter's part of a bucket, in elements."""

    member: DedicatedParam
    start: int

    def view(self, flat: Tensor) -> Tensor:
        return self.shaped(flat[self.start :])

    def shaped(self, piece: Tensor) -> Tensor:
        """The parameter in a piece of a bucket that begins with it."""
        shape = self.member.shape
        numel = shape.numel()
        return (piece if piece.numel() == numel else piece[:numel]).view(shape)


@dataclass(frozen=True)
class Layout:
    """Where the parameters of one owner lie in its bucket."""

    owner: Owner
    slots: tuple[Slot, ...]
    numel: int

    @property
    def spans(self) -> list[int]:
        """Elements from where each parameter begins to where the next one does."""
        ends = [*(slot.start for slot in self.slots[1:]), self.numel]
        return [end - slot.start for slot, end in zip(self.slots, ends, strict=True)]

    @classmethod
    def of(cls, owner: Owner, members: Sequence[DedicatedParam], dtype: torch.dtype) -> Layout:
        step = max(_ALIGNMENT // dtype.itemsize, 1)
        slots, end = [], 0
        for member in members:
            slots.append(Slot(member, end))
            end += -(-member.shape.numel() // step) * step
        return cls(owner, tuple(slots), end)


def layouts_of(members: Sequence[DedicatedParam], dtype: torch.dtype) -> tuple[Layout, ...]:
    """One layout per owner that has some of ``members``, in the order of owners."""
    owners = sorted({member.owner for member in members})
    return tuple(Layout.of(owner, [m for m in members if m.owner == owner], dtype) for owner in owners)


class Buckets:
    """The compute-dtype buffers of one group.

    Attributes:
        own: of this rank's parameters their places in its bucket.
        lacks_own: whether what is there is lost, with the memory or without.

    Args:
        members: the group's parameters in the plan's order.
        shard_rank: this rank's place in its replica.
        dtype: compute dtype.
        device: where they live.
    """

    def __init__(
        self, members: Sequence[DedicatedParam], shard_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.dtype = dtype
        self.lacks_own = False
        self.to_broadcast: list[tuple[int, Tensor]] = []
        self.to_publish: list[tuple[int, Tensor]] = []
        self._freed: list[tuple[torch.UntypedStorage, int]] = []
        self._own_storages: list[tuple[torch.UntypedStorage, int]] = []
        self.own: dict[DedicatedParam, Tensor] = {}
        self._copied: dict[DedicatedParam, tuple[weakref.ref[Tensor], tuple[int, int]]] = {}
        for layout in layouts_of(members, dtype):
            flat = torch.empty(layout.numel, dtype=dtype, device=device)
            self.to_broadcast.append((layout.owner.shard, flat))
            for slot in layout.slots:
                view = nn.Parameter(slot.view(flat), requires_grad=slot.member.param.requires_grad)
                slot.member.unsharded = view
                if slot.member.is_owner:
                    self.own[slot.member] = slot.view(flat)
            storage = flat.untyped_storage()
            if layout.owner.shard == shard_rank:
                self.to_publish.append((layout.owner.replicate, flat))
                self._own_storages.append((storage, storage.nbytes()))
            else:
                self._freed.append((storage, storage.nbytes()))
                storage.resize_(0)

    def allocate(self) -> None:
        """Give the others' buckets memory, on the current stream."""
        _resize(self._freed)

    def release(self) -> None:
        """Return the others' buckets to the allocator."""
        _empty(self._freed)

    def release_own(self) -> None:
        """Return what this rank owns to the allocator. Not where other replicas publish into it."""
        self.lacks_own = True
        _empty(self._own_storages)

    def allocate_own(self) -> None:
        """Give what this rank owns memory, on the current stream; :meth:`restore_own` is to fill it."""
        _resize(self._own_storages)

    def restore_own(self) -> None:
        """Where it is lost, cast every parameter of this rank once more, on the current stream.

        To autograd, which may have saved the views, nothing changes.
        """
        if not self.lacks_own:
            return
        self.allocate_own()
        with preserving_versions(list(self.own.values())):
            copy_all(list(self.own.values()), [member.owned.local for member in self.own])
        self.note_copied(self.own)
        self.lacks_own = False

    @property
    def stale(self) -> list[DedicatedParam]:
        """The owned parameters that changed since :meth:`note_copied`, or were moved: the allocator may give a new
        tensor the address of the old one, and its version counter begins anew."""
        return [member for member in self.own if not self._is_copied(member)]

    def _is_copied(self, member: DedicatedParam) -> bool:
        known = self._copied.get(member)
        return known is not None and known[0]() is member.owned.local and known[1] == member.owned.stamp

    def note_copied(self, members: Iterable[DedicatedParam]) -> None:
        """What is in the bucket for ``members`` is what they are now, in the compute dtype."""
        for member in members:
            self._copied[member] = weakref.ref(member.owned.local), member.owned.stamp

    def copies(self) -> tuple[list[Tensor], list[Tensor]]:
        """Where the stale parameters go in the compute dtype, and what goes there. Counts as done from now on."""
        stale = self.stale
        self.note_copied(stale)
        return [self.own[member] for member in stale], [member.owned.local for member in stale]


def _resize(storages: Iterable[tuple[torch.UntypedStorage, int]]) -> None:
    for storage, nbytes in storages:
        if storage.nbytes() < nbytes:
            storage.resize_(nbytes)


def _empty(storages: Iterable[tuple[torch.UntypedStorage, int]]) -> None:
    for storage, _ in storages:
        storage.resize_(0)
