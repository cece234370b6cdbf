"""The gradients of one group on their way to their owners, each with one element that says whether any rank had it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dmuon_fsdp.compat import copy_all, divide_all, is_alone
from dmuon_fsdp.planning.plan import Owner
from dmuon_fsdp.runtime.buckets import layouts_of
from dmuon_fsdp.runtime.parameter import DedicatedParam

DIRECT_FROM = 1 << 20
"""Gradients of at least so many bytes on average go out as autograd left them: the collective reads them where they
are, which spares a pass over memory. Smaller ones share a buffer, since a collective has a price of its own."""


class Packing:
    """How small gradients lie in one buffer for each owner: its parameters, then one element for each of them.

    Args:
        members: what is reduced, with or without a gradient on this rank.
        dtype: of the reduction.

    Attributes:
        pieces: for each owner the elements from one parameter to the next, then those of presence.
        is_large: a collective of its own pays for each gradient.
    """

    def __init__(self, members: Sequence[DedicatedParam], dtype: torch.dtype, device: torch.device) -> None:
        self.layouts = layouts_of(members, dtype)
        self.dtype = dtype
        self.device = device
        self.counts = [len(layout.slots) for layout in self.layouts]
        self.pieces = [[*layout.spans, len(layout.slots)] for layout in self.layouts]
        nbytes = sum(layout.numel for layout in self.layouts) * dtype.itemsize
        self.is_large = nbytes >= sum(self.counts) * DIRECT_FROM
        self._ones: dict[torch.dtype, list[Tensor]] = {}

    def ones(self, dtype: torch.dtype) -> list[Tensor]:
        """What presence is filled with, of the gradients' dtype: one launch copies both."""
        if dtype not in self._ones:
            self._ones[dtype] = [torch.ones(count, dtype=dtype, device=self.device) for count in self.counts]
        return self._ones[dtype]


@dataclass(frozen=True)
class Outgoing:
    """What a group sends, and where the result of each parameter will be.

    Attributes:
        parts: what the collectives reduce, each with its owner, in the same order on all ranks.
        reduced: by parameter, its gradient; a part or a view of one.
        presence: by owner, a vector with one element for each of its parameters in the order of ``reduced``; positive
            where some rank had a gradient.
    """

    parts: list[tuple[Owner, Tensor]] = field(default_factory=list)
    reduced: dict[DedicatedParam, Tensor] = field(default_factory=dict)
    presence: dict[Owner, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, packing: Packing, grads: Mapping[DedicatedParam, Tensor], *, cast: bool) -> Outgoing:
        """Ready ``grads`` for the collectives; a missing one is zero and marked absent.

        Args:
            cast: the gradients of this policy have another dtype than the reduction, so that they must be copied.
        """
        return cls._direct(packing, grads) if packing.is_large and not cast else cls._packed(packing, grads)

    @classmethod
    def _direct(cls, packing: Packing, grads: Mapping[DedicatedParam, Tensor]) -> Outgoing:
        made = cls()
        dtype, device = packing.dtype, packing.device
        presences = torch.ones(sum(packing.counts), device=device).split_with_sizes(packing.counts)
        for layout, presence in zip(packing.layouts, presences, strict=True):
            for index, slot in enumerate(layout.slots):
                grad = grads.get(slot.member)
                if grad is None:
                    grad = torch.zeros(slot.member.shape, dtype=dtype, device=device)
                    presence[index].zero_()
                # The collective writes where it reads: not into memory that autograd shares between gradients.
                grad = grad.to(dtype).contiguous()
                made.reduced[slot.member] = grad if is_alone(grad) else grad.clone()
                made.parts.append((layout.owner, made.reduced[slot.member]))
            made.presence[layout.owner] = presence
            made.parts.append((layout.owner, presence))
        return made

    @classmethod
    def _packed(cls, packing: Packing, grads: Mapping[DedicatedParam, Tensor]) -> Outgoing:
        made = cls()
        views, sources, absent = [], [], []
        for layout, sizes in zip(packing.layouts, packing.pieces, strict=True):
            # A buffer for each owner: its gradients keep their own memory alive and not the others'.
            part = torch.empty(sum(sizes), dtype=packing.dtype, device=packing.device)
            made.parts.append((layout.owner, part))
            *pieces, made.presence[layout.owner] = part.split_with_sizes(sizes)
            for index, (slot, piece) in enumerate(zip(layout.slots, pieces, strict=True)):
                view = made.reduced[slot.member] = slot.shaped(piece)
                if slot.member in grads:
                    views.append(view)
                    sources.append(grads[slot.member])
                else:
                    view.zero_()
                    absent.append((layout.owner, index))
        ones = packing.ones(sources[0].dtype if sources else packing.dtype)
        copy_all([*views, *made.presence.values()], [*sources, *ones])
        for owner, index in absent:
            made.presence[owner][index].zero_()
        return made

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        return tuple(part for _, part in self.parts)

    def to_shards(self) -> list[tuple[int, Tensor]]:
        """For the collective within a replica: every part, to the owner's place there."""
        return [(owner.shard, part) for owner, part in self.parts]

    def to_replicas(self, shard_rank: int) -> list[tuple[int, Tensor]]:
        """For the collective between replicas: the parts of this place, to their owner's replica."""
        return [(owner.replicate, part) for owner, part in self.parts if owner.shard == shard_rank]

    def at(self, shard_rank: int) -> dict[DedicatedParam, tuple[Tensor, Tensor]]:
        """Gradient and presence of the parameters whose owner is at this place, in this replica or another."""
        return {
            member: (self.reduced[member], presence)
            for owner, vector in self.presence.items()
            if owner.shard == shard_rank
            for member, presence in zip(self._owned_by(owner), vector, strict=True)
        }

    def _owned_by(self, owner: Owner) -> list[DedicatedParam]:
        return [member for member in self.reduced if member.owner == owner]

    def deliver(self, divisor: float) -> None:
        """Hand every parameter its reduced gradient, divided: whole on its owner, no rows elsewhere."""
        own = [member for member in self.reduced if member.is_owner]
        grads = self._divided(own, divisor)
        present = self.presence[own[0].owner].sign().float() if own else ()
        for member, grad, presence in zip(own, grads, present, strict=True):
            member.set_grad(grad, presence)
        for member in self.reduced:
            if not member.is_owner:
                member.set_foreign_grad()

    def _divided(self, members: Sequence[DedicatedParam], divisor: float) -> list[Tensor]:
        """The reduced gradients in the parameters' dtypes: as they are where nothing is to do, else in few launches."""
        grads = [self.reduced[member] for member in members]
        dtypes = [member.dtype for member in members]
        if any(grad.dtype != dtype for grad, dtype in zip(grads, dtypes, strict=True)):
            cast = [torch.empty_like(grad, dtype=dtype) for grad, dtype in zip(grads, dtypes, strict=True)]
            copy_all(cast, grads)
            grads = cast
        if divisor != 1:
            divide_all(grads, divisor)
        return grads
