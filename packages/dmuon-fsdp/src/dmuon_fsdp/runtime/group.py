"""One hook boundary at work: gather before forward and backward, reduce after backward, back to rest.

    RESTING ──gather──► GATHERING ──ready──► READY ──rest──► RESTING

RESTING: the modules hold the at-rest Parameters, foreign buckets have no memory. GATHERING: a broadcast fills the
buckets, the modules still hold the at-rest Parameters. READY: the modules hold views of the buckets.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from dmuon_fsdp.comm.collectives import broadcast_from_owners, reduce_to_owners
from dmuon_fsdp.comm.streams import Ticket
from dmuon_fsdp.compat import run_post_accumulate_hooks
from dmuon_fsdp.runtime.buckets import Buckets, GradientBuckets, Layout, layouts_of
from dmuon_fsdp.runtime.parameter import DedicatedParam

if TYPE_CHECKING:
    from dmuon_fsdp.runtime.traffic import Traffic


class GroupState(enum.Enum):
    """See this module's text."""

    RESTING = enum.auto()
    GATHERING = enum.auto()
    READY = enum.auto()


_NEXT = {
    GroupState.RESTING: {GroupState.GATHERING},
    GroupState.GATHERING: {GroupState.READY, GroupState.RESTING},
    GroupState.READY: {GroupState.RESTING},
}


@dataclass(frozen=True)
class Policy:
    """What the covering ``fully_shard`` and the user decided for one group.

    Attributes:
        param_dtype: compute dtype; None keeps the parameters'.
        reduce_dtype: dtype of the reduction; None takes the compute dtype.
        reshard_after_forward: free after forward and broadcast again in backward.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    reshard_after_forward: bool = True


class Group:
    """The dedicated parameters of one hook boundary.

    Attributes:
        name: canonical name of the boundary.
        members: its parameters in the plan's order.
        reduce_grads: False accumulates gradients on every rank instead of reducing them.
        reshard_after_backward: False keeps the buckets until the step or the next change.
        unshard_in_backward: False skips the broadcast in backward, for modules whose backward reads no weight.
        divisor: what sums of gradients are divided by; None is the number of ranks.
    """

    def __init__(
        self, name: str, members: Sequence[DedicatedParam], traffic: Traffic, policy: Callable[[], Policy]
    ) -> None:
        self.name = name
        self.members = tuple(members)
        self.traffic = traffic
        self.reduce_grads = True
        self.reshard_after_backward = True
        self.unshard_in_backward = True
        self.divisor: float | None = None
        self.reshard_after_forward: bool | None = None
        self.state = GroupState.RESTING
        self._find_policy = policy
        self._policy: Policy | None = None
        self._buckets: Buckets | None = None
        self._reduced: tuple[tuple[DedicatedParam, ...], torch.dtype, tuple[Layout, ...]] | None = None
        self._gathering = Ticket()
        self._kept: dict[DedicatedParam, Tensor] = {}

    @property
    def policy(self) -> Policy:
        """Read at first use, when every ``fully_shard`` has been called."""
        if self._policy is None:
            self._policy = self._find_policy()
        return self._policy

    @property
    def frees_after_forward(self) -> bool:
        if self.reshard_after_forward is not None:
            return self.reshard_after_forward
        return self.policy.reshard_after_forward

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.policy.param_dtype or self.members[0].dtype

    @property
    def trained(self) -> tuple[DedicatedParam, ...]:
        """Members that are not frozen now."""
        return tuple(member for member in self.members if member.param.requires_grad)

    def _move(self, state: GroupState) -> None:
        assert state in _NEXT[self.state], f"{self.name}: {self.state} → {state}"
        self.state = state

    @contextmanager
    def _naming(self, what: str) -> Iterator[None]:
        """Say in a collective's error whose it was."""
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.traffic.rank}, {what} of {self.name!r}: {error}; every rank must enter the same hook "
                f"boundaries in the same order, in forward and in backward, and one seems to have skipped this"
            ) from error

    # --- weights

    def gather(self) -> None:
        """Start the broadcast; nothing to do where it runs or is done."""
        if self.state is not GroupState.RESTING:
            return
        with record_function(f"dmuon::gather {self.name}"):
            buckets = self._current_buckets()
            lane = self.traffic.gather_lane
            stale = buckets.stale
            if stale:
                lane.follow_current()
            with lane.running(), torch.no_grad(), buckets.unversioned(), self._naming("the weights"):
                if stale:
                    buckets.refill()
                buckets.allocate()
                works = broadcast_from_owners(buckets.to_broadcast(), self.traffic.process_group)
                self._gathering = Ticket(lane.event(), works)
            self.traffic.broadcasts += 1
        self._move(GroupState.GATHERING)

    def make_ready(self) -> None:
        """Whole weights in the modules, valid for what comes next on the current stream."""
        self.gather()
        if self.state is GroupState.GATHERING:
            with self._naming("the weights"):
                self._gathering.settle()
            self._move(GroupState.READY)
        self.show_unsharded()

    def show_unsharded(self) -> None:
        for member in self.members:
            assert member.unsharded is not None, "buckets exist"
            if member.unsharded.requires_grad != member.param.requires_grad:
                member.unsharded.requires_grad_(member.param.requires_grad)
            member.show(member.unsharded)

    def show_resting(self) -> None:
        for member in self.members:
            member.show(member.param)

    def rest(self) -> None:
        """Free what other ranks own; the modules hold the at-rest Parameters again."""
        if self.state is GroupState.RESTING:
            return
        if self.state is GroupState.GATHERING:
            with self._naming("the weights"):
                self._gathering.settle()
        self.show_resting()
        assert self._buckets is not None, "a group that gathered has buckets"
        # The memory goes back to the gather lane's pool, whose next use must come after the compute so far.
        self.traffic.gather_lane.follow_current()
        self._buckets.release()
        self._move(GroupState.RESTING)

    def _current_buckets(self) -> Buckets:
        for member in self.members:
            member.adopt_replacement()
        dtype = self.compute_dtype
        if self._buckets is None or self._buckets.dtype != dtype:
            self._check_one_dtype()
            device = self.members[0].owned.local.device
            # A first forward under inference_mode would otherwise make views that can never be trained.
            with torch.inference_mode(False):
                self._buckets = Buckets(self.members, self.traffic.rank, dtype, device)
        return self._buckets

    def _check_one_dtype(self) -> None:
        dtypes = {member.dtype for member in self.members}
        if len(dtypes) > 1 and self.policy.param_dtype is None:
            rows = ", ".join(f"{member.fqn} {member.dtype}" for member in self.members)
            raise ValueError(
                f"the parameters of {self.name!r} have different dtypes and no compute dtype: {rows}; give fully_shard "
                f"or dedicate_params an mp_policy with param_dtype, or make them equal"
            )

    # --- gradients

    def has_gradients(self) -> bool:
        return any(member.unsharded is not None and member.unsharded.grad is not None for member in self.members)

    def take_gradients(self) -> dict[DedicatedParam, Tensor]:
        """The gradients that autograd left on this rank, together with those kept from earlier backwards."""
        grads, self._kept = self._kept, {}
        for member in self.members:
            view = member.unsharded
            if view is None or view.grad is None:
                continue
            kept = grads.get(member)
            grads[member] = view.grad if kept is None else kept.add_(view.grad)
            view.grad = None
        return grads

    def finish_gradients(self) -> None:
        """Reduce to the owners, or keep on this rank under ``no_sync``."""
        grads = self.take_gradients()
        if not self.reduce_grads:
            wide = self._accumulation_dtype
            self._kept = {member: grad.to(wide) for member, grad in grads.items()}
            return
        trained = self.trained
        if trained:
            self._reduce(trained, grads)

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients wait on this rank for a backward that reduces."""
        return bool(self._kept)

    @property
    def _accumulation_dtype(self) -> torch.dtype:
        reduce = self.policy.reduce_dtype or self.members[0].dtype
        return torch.promote_types(reduce, torch.float32)

    def _reduce(self, trained: tuple[DedicatedParam, ...], grads: dict[DedicatedParam, Tensor]) -> None:
        dtype = self.policy.reduce_dtype or self.compute_dtype
        with record_function(f"dmuon::reduce {self.name}"), torch.no_grad():
            # One reduction in flight: its buffers go before the next one's are made.
            self.traffic.settle_reduce()
            outgoing = GradientBuckets(
                self._layouts_to_reduce(trained, dtype), dtype, self.members[0].owned.local.device
            )
            outgoing.pack(grads)
            lane = self.traffic.reduce_lane
            lane.follow_current()
            with lane.running(), self._naming("the gradients"):
                for work in reduce_to_owners(outgoing.to_reduce(), self.traffic.process_group):
                    work.wait()
                outgoing.deliver(self.traffic.rank, self.divisor or self.traffic.world_size)
                for member in trained:
                    run_post_accumulate_hooks(member.param)
                self.traffic.reducing = Ticket(lane.event(), pinned=outgoing.flat)
            self.traffic.reduces += 1

    def _layouts_to_reduce(self, trained: tuple[DedicatedParam, ...], dtype: torch.dtype) -> tuple[Layout, ...]:
        """Made anew only where something was frozen or thawed."""
        if self._reduced is None or self._reduced[:2] != (trained, dtype):
            self._reduced = (trained, dtype, layouts_of(trained, dtype))
        return self._reduced[2]

    def drop_gradients(self) -> None:
        """Forget gradients that were not reduced."""
        self.take_gradients()


def modules_of(group: Group) -> list[nn.Module]:
    """Every module that holds a parameter of the group, once, in order."""
    return list(dict.fromkeys(place.module for member in group.members for place in member.places))
