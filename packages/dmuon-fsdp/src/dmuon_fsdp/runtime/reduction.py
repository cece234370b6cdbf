"""The gradients of one group on their way to their owners, each with one element that says whether any rank had it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dmuon_fsdp.compat import copy_all, divide_all, is_alone
from dmuon_fsdp.planning.plan import Owner
from dmuon_fsdp.runtime.buckets import Layout
from dmuon_fsdp.runtime.parameter import DedicatedParam

DIRECT_FROM = 1 << 20
"""Gradients of at least so many bytes on average go out as autograd left them: the collective reads them where they
are, which spares a pass over memory. Smaller ones share a buffer, since a collective has a price of its own."""


@dataclass(frozen=True)
class Outgoing:
    """What a group sends, and where the result of each parameter will be.

    Attributes:
        parts: what the collectives reduce, each with its owner, in the same order on all ranks.
        reduced: by parameter, its gradient; a part or a view of one.
        presence: by owner, a vector with one element for each of its parameters in the order of ``reduced``; positive
            where some rank had a gradient.
    """

    parts: list[tuple[Owner, Tensor]]
    reduced: dict[DedicatedParam, Tensor]
    presence: dict[Owner, Tensor]

    @classmethod
    def of(
        cls,
        layouts: Sequence[Layout],
        grads: Mapping[DedicatedParam, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        *,
        cast: bool,
    ) -> Outgoing:
        """Ready ``grads`` for the collectives; a missing one is zero and marked absent.

        Args:
            layouts: of all parameters that are reduced, with or without a gradient on this rank.
            dtype: of the reduction.
            cast: the gradients of this policy have another dtype, so that they must be copied anyway.
        """
        count = sum(len(layout.slots) for layout in layouts)
        nbytes = sum(layout.numel for layout in layouts) * dtype.itemsize
        if cast or nbytes < count * DIRECT_FROM:
            return cls._packed(layouts, grads, dtype, device)
        return cls._direct(layouts, grads, dtype, device)

    @classmethod
    def _direct(
        cls,
        layouts: Sequence[Layout],
        grads: Mapping[DedicatedParam, Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Outgoing:
        made = cls([], {}, {})
        for layout in layouts:
            presence = torch.ones(len(layout.slots), device=device)
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
    def _packed(
        cls,
        layouts: Sequence[Layout],
        grads: Mapping[DedicatedParam, Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Outgoing:
        made = cls([], {}, {})
        views, sources = [], []
        for layout in layouts:
            flat = torch.empty(layout.numel + len(layout.slots), dtype=dtype, device=device)
            presence = flat[layout.numel :].fill_(1)
            for index, slot in enumerate(layout.slots):
                view = slot.view(flat)
                grad = grads.get(slot.member)
                if grad is not None:
                    views.append(view)
                    sources.append(grad)
                else:
                    view.zero_()
                    presence[index].zero_()
                made.reduced[slot.member] = view
            made.presence[layout.owner] = presence
            made.parts.append((layout.owner, flat))
        copy_all(views, sources)
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
        grads = self._in_own_dtype(own)
        if divisor != 1:
            divide_all(grads, divisor)
        present = self.presence[own[0].owner].sign().float() if own else ()
        for member, grad, presence in zip(own, grads, present, strict=True):
            member.set_grad(grad, presence)
        for member in self.reduced:
            if not member.is_owner:
                member.set_foreign_grad()

    def _in_own_dtype(self, members: Sequence[DedicatedParam]) -> list[Tensor]:
        """The reduced gradients themselves where they have the parameters' dtype, else cast in one launch."""
        reduced = [self.reduced[member] for member in members]
        if all(grad.dtype == member.dtype for grad, member in zip(reduced, members, strict=True)):
            return reduced
        cast = [torch.empty_like(grad, dtype=member.dtype) for grad, member in zip(reduced, members, strict=True)]
        copy_all(cast, reduced)
        return cast
