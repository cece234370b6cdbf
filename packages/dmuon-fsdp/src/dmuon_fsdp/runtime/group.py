"""One hook boundary at work: gather before forward and backward, reduce after backward, back to rest, publish.

    RESTING ──gather──► GATHERING ──ready──► READY ──rest──► RESTING

RESTING: the modules hold the at-rest Parameters; foreign buckets have no memory, and own ones have none where a
backward is to come that casts them again. GATHERING: a broadcast fills the buckets, the modules still hold the at-rest
Parameters. READY: the modules hold views of the buckets.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed import Work

from dmuon_fsdp.comm.collectives import broadcast_from_owners, reduce_to_owners
from dmuon_fsdp.comm.streams import Ticket
from dmuon_fsdp.compat import copy_all, is_alone, profiled, run_post_accumulate_hooks
from dmuon_fsdp.runtime.buckets import Buckets
from dmuon_fsdp.runtime.holding import Holding, Values
from dmuon_fsdp.runtime.parameter import DedicatedParam
from dmuon_fsdp.runtime.reduction import Outgoing, Packing

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
        input_dtype, output_dtype: what floating-point inputs and outputs of the boundary are cast to here; None leaves
            that to FSDP2 or to the module.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    reshard_after_forward: bool = True
    input_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None


class Group:
    """The dedicated parameters of one hook boundary.

    Attributes:
        name: canonical name of the boundary.
        members: its parameters in the plan's order.
        reduce_grads: False accumulates gradients on every rank instead of reducing them.
        all_reduce_grads: False reduces them within a replica and accumulates there.
        reshard_after_backward: False keeps the buckets until the step or the next change.
        unshard_in_backward: False skips the broadcast in backward, for modules whose backward reads no weight.
        holding: which of the parameters' values the buckets have.
        divisor: what sums of gradients are divided by; None is the number of ranks.
    """

    def __init__(
        self, name: str, members: Sequence[DedicatedParam], traffic: Traffic, policy: Callable[[], Policy]
    ) -> None:
        self.name = name
        self.members = tuple(members)
        self.traffic = traffic
        self.reduce_grads = True
        self.all_reduce_grads = True
        self.reshard_after_backward = True
        self.unshard_in_backward = True
        self.divisor: float | None = None
        self.reshard_after_forward: bool | None = None
        self.state = GroupState.RESTING
        self._gather_range, self._reduce_range = f"dmuon::gather {name}", f"dmuon::reduce {name}"
        self._find_policy = policy
        self._policy: Policy | None = None
        self._buckets: Buckets | None = None
        self._reduced: tuple[tuple[DedicatedParam, ...], Packing] | None = None
        self._gathering = Ticket()
        self._publishing = Ticket()
        self._published: Values | None = None
        self.holding = Holding(name, self.members)
        self._kept: dict[DedicatedParam, Tensor] = {}
        self._partial: dict[DedicatedParam, tuple[Tensor, Tensor]] = {}
        self._unreduced = False

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

    def _naming(self, what: str) -> _Naming:
        """Say in a collective's error whose it was."""
        return _Naming(self, what)

    # --- weights

    def gather(self, *, again: bool = False) -> None:
        """Start the broadcast; nothing to do where it runs or is done.

        Args:
            again: for the backward of a forward that gathered: the weights are those that it computed with.
        """
        if self.state is not GroupState.RESTING:
            return
        traffic = self.traffic
        with profiled(self._gather_range):
            buckets = self._buckets if again else None
            if buckets is None:
                buckets = self._current_buckets()
                self._bring_up_to_date(buckets)
                self.holding.note_filled()
            elif self.holding.casts_again:
                for member in self.members:
                    member.adopt_replacement()
                self.holding.note_cast_again(buckets.stale)
            lane = traffic.gather_lane
            if buckets.lacks_own:
                # Of the pool that activations have it from, and to be written when they are done with it.
                buckets.allocate_own()
                lane.follow_current()
            with lane.running(), self._naming("the weights"):
                self._publishing.settle()
                buckets.allocate()
                buckets.restore_own()
                works = broadcast_from_owners(buckets.to_broadcast, traffic.ranks.shard)
                self._gathering = Ticket(lane.event(), works)
            traffic.broadcasts += 1
        self._move(GroupState.GATHERING)

    @property
    def outdated(self) -> bool:
        """Whether the parameters were written since the buckets were filled, which are still in use."""
        return self.state is GroupState.READY and self.holding.values != self.holding.newest

    def _bring_up_to_date(self, buckets: Buckets) -> None:
        """Take over what was written outside of a step."""
        if self.traffic.ranks.replicate is None:
            views, sources = self._copies(buckets)
            if views:
                copy_all(views, sources)
                self.traffic.gather_lane.follow_current()
        elif self._published != self.holding.newest:
            self.publish()
        elif buckets.stale:
            raise RuntimeError(
                f"rank {self.traffic.rank}: parameters of {self.name!r} were written on their owner alone (through "
                f".local, or by a checkpoint loaded in place), which its replicas cannot see: call "
                f"dmuon.publish(model) on all ranks after such writes"
            )

    @property
    def has_buckets(self) -> bool:
        """False before the first use, which publishes whatever the owners have by then."""
        return self._buckets is not None

    def copies(self) -> tuple[list[Tensor], list[Tensor]]:
        """Where owned parameters that changed go in the compute dtype, and what goes there."""
        return self._copies(self._current_buckets())

    def _copies(self, buckets: Buckets) -> tuple[list[Tensor], list[Tensor]]:
        views, sources = buckets.copies()
        if views:
            buckets.restore_own()
        return views, sources

    def places(self) -> dict[DedicatedParam, Tensor]:
        """Of this rank's parameters where they go in the compute dtype, ready to be written on the current stream.

        At rest. Whoever writes tells it to :meth:`note_copied`.
        """
        self.settle_publish()
        buckets = self._current_buckets()
        buckets.restore_own()  # the step may leave some of them out
        return buckets.own

    def note_copied(self, members: Sequence[DedicatedParam]) -> None:
        """Some of :meth:`places` were written."""
        assert self._buckets is not None, "places are in buckets"
        self._buckets.note_copied(members)

    def publish(self) -> None:
        """Send the owned parameters to their place in the other replicas; on all ranks."""
        traffic = self.traffic
        buckets = self._current_buckets()
        self._publishing.settle()
        copy_all(*self._copies(buckets))
        self.holding.note_own_writes()
        self._published = self.holding.newest
        if traffic.ranks.replicate is None:
            traffic.gather_lane.follow_current()
            return
        lane = traffic.replicate_lane
        lane.follow_current()
        with profiled(f"dmuon::publish {self.name}"), lane.running(), self._naming("the published weights"):
            works = broadcast_from_owners(buckets.to_publish, traffic.ranks.replicate)
            self._publishing = Ticket(lane.event(), works)
        traffic.publishes += 1

    def settle_publish(self) -> None:
        """What follows on the current stream comes after the publish."""
        with self._naming("the published weights"), self.traffic.waiting("wait for publish"):
            self._publishing.settle()

    def make_ready(self, *, again: bool = False) -> None:
        """Whole weights in the modules, valid for what comes next on the current stream; ``again`` as in gather."""
        self.gather(again=again)
        if self.state is GroupState.GATHERING:
            with self._naming("the weights"), self.traffic.waiting("wait for gather"):
                self._gathering.settle()
            self._move(GroupState.READY)
        if not again:
            self._follow_requires_grad()
        self.show_unsharded()

    def _follow_requires_grad(self) -> None:
        for member in self.members:
            trains = member.param.requires_grad
            assert member.unsharded is not None, "buckets exist"
            if member.unsharded.requires_grad != trains:
                member.unsharded.requires_grad_(trains)

    def show_unsharded(self) -> None:
        for member in self.members:
            assert member.unsharded is not None, "buckets exist"
            member.show(member.unsharded)

    def show_resting(self) -> None:
        for member in self.members:
            member.show(member.param)

    def rest(self, *, until_backward: bool = False) -> None:
        """Free what other ranks own; the modules hold the at-rest Parameters again.

        Args:
            until_backward: a backward will gather again: free the copy of what this rank owns as well. Not in HSDP:
                what another replica's owner published cannot be made here.
        """
        if self.state is GroupState.RESTING:
            return
        if self.state is GroupState.GATHERING:
            with self._naming("the weights"):
                self._gathering.settle()
        self.show_resting()
        assert self._buckets is not None, "a group that gathered has buckets"
        self.holding.note_modules_writes()
        # The memory goes back to the gather lane's pool, whose next use must come after the compute so far.
        self.traffic.gather_lane.follow_current()
        self._buckets.release()
        if until_backward and self._can_cast_again:
            self._buckets.release_own()
            self.holding.casts_again = True
        self._move(GroupState.RESTING)

    @property
    def _can_cast_again(self) -> bool:
        """Whether what is in the buckets of this rank is what its parameters are, cast."""
        return self.unshard_in_backward and self.traffic.ranks.replicate is None and not self.holding.differs

    def _current_buckets(self) -> Buckets:
        for member in self.members:
            member.adopt_replacement()
        dtype = self.compute_dtype
        if self._buckets is None or self._buckets.dtype != dtype:
            self._check_one_dtype()
            device = self.members[0].owned.local.device
            # A first forward under inference_mode would otherwise make views that can never be trained.
            with torch.inference_mode(False):
                self._buckets = Buckets(self.members, self.traffic.ranks.shard_rank, dtype, device)
            self._published = None
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
        trained = self.trained
        if not self.reduce_grads:
            wide = self._accumulation_dtype
            self._kept = {member: grad.to(wide, copy=not is_alone(grad)) for member, grad in grads.items()}
            self._unreduced = self._unreduced or bool(trained)
        elif trained:
            self._reduce(trained, grads)
        else:
            self.drop_gradients()  # of what is frozen by now

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients wait for a backward that reduces; equal on all ranks."""
        return self._unreduced

    @property
    def _accumulation_dtype(self) -> torch.dtype:
        reduce = self.policy.reduce_dtype or self.members[0].dtype
        return torch.promote_types(reduce, torch.float32)

    def _reduce(self, trained: tuple[DedicatedParam, ...], grads: dict[DedicatedParam, Tensor]) -> None:
        traffic, ranks = self.traffic, self.traffic.ranks
        dtype = self.policy.reduce_dtype or self.compute_dtype
        packing = self._packing(trained, dtype)
        averages = traffic.averages and self.divisor is None
        op = traffic.reduce_op(averages=averages)
        with profiled(self._reduce_range), torch.no_grad():
            # Two in flight bound the memory: the oldest goes before new buffers are made.
            traffic.settle_reductions(leave=1)
            outgoing = Outgoing.of(packing, grads, cast=dtype != self.compute_dtype)
            lane = traffic.reduce_lane
            lane.follow_current()
            with lane.running(), self._naming("the gradients"):
                _wait(reduce_to_owners(outgoing.to_shards(), ranks.shard, op))
            traffic.reduces += 1
            if ranks.replicate is not None:
                if not self.all_reduce_grads:
                    self._keep_partial(outgoing)
                    return
                self._add_partial(outgoing)
                traffic.replicate_lane.follow(lane)
                lane = traffic.replicate_lane
                with lane.running(), self._naming("the gradients over replicas"):
                    _wait(reduce_to_owners(outgoing.to_replicas(ranks.shard_rank), ranks.replicate, op))
                traffic.replica_reduces += 1
            with lane.running():
                outgoing.deliver(1 if averages else self.divisor or ranks.size)
                for member in trained:
                    run_post_accumulate_hooks(member.param)
                traffic.reducing.append(Ticket(lane.event(), pinned=outgoing.buffers))
        self._unreduced = False

    def _add_partial(self, outgoing: Outgoing) -> None:
        """Add what earlier backwards left in this replica."""
        partial, self._partial = self._partial, {}
        with self.traffic.reduce_lane.running():
            for member, (grad, presence) in outgoing.at(self.traffic.ranks.shard_rank).items():
                if member in partial:
                    grad.add_(partial[member][0])
                    presence.add_(partial[member][1])

    def _keep_partial(self, outgoing: Outgoing) -> None:
        """Leave the gradients in this replica, added up in a wide dtype."""
        lane, wide = self.traffic.reduce_lane, self._accumulation_dtype
        with lane.running():
            for member, (grad, presence) in outgoing.at(self.traffic.ranks.shard_rank).items():
                earlier = self._partial.get(member)
                if earlier is None:
                    self._partial[member] = grad.to(wide, copy=True), presence.clone()
                else:
                    earlier[0].add_(grad)
                    earlier[1].add_(presence)
            self.traffic.reducing.append(Ticket(lane.event(), pinned=outgoing.buffers))
        self._unreduced = True

    def _packing(self, trained: tuple[DedicatedParam, ...], dtype: torch.dtype) -> Packing:
        """Made anew only where something was frozen or thawed, or the dtype changed."""
        if self._reduced is None or self._reduced[0] != trained or self._reduced[1].dtype != dtype:
            self._reduced = trained, Packing(trained, dtype, self.traffic.device)
        return self._reduced[1]

    def drop_gradients(self) -> None:
        """Forget gradients that were not reduced."""
        self.take_gradients()
        self._partial = {}
        self._unreduced = False


class _Naming:
    """A context for a group's collective; a class, for a generator costs several times as much."""

    __slots__ = ("group", "what")

    def __init__(self, group: Group, what: str) -> None:
        self.group = group
        self.what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
            raise RuntimeError(
                f"rank {self.group.traffic.rank}, {self.what} of {self.group.name!r}: {error}; every rank must enter "
                f"the same hook boundaries in the same order, in forward and in backward, and one seems to have "
                f"skipped this"
            ) from error


def _wait(works: tuple[Work, ...]) -> None:
    for work in works:
        work.wait()


def modules_of(group: Group) -> list[nn.Module]:
    """Every module that holds a parameter of the group, once, in order."""
    return list(dict.fromkeys(place.module for member in group.members for place in member.places))
