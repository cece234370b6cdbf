"""What the runtime knows of one model: its groups and their order, and the hooks that drive them.

Hooks follow FSDP2's: a pre-forward hook gathers, a post-forward hook frees and watches the output, whose gradient
gathers again, and a node on the inputs, whose gradient means that the group's own gradients are there. A *pass* is one
forward of a group; a group reduces when every pass that came since the last backward has had its backward. What a
backward leaves over (an input without gradient, an output not used) is reduced in the plan's order when it ends. All of
this counts forwards, a fact equal on all ranks, never gradients, which are not.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dmuon_fsdp.compat import (
    at_end_of_backward,
    copy_all,
    free_last_gather,
    in_backward,
    tensors_with_grad,
    tree_flatten,
    tree_unflatten,
)
from dmuon_fsdp.runtime.casting import cast_floats
from dmuon_fsdp.runtime.group import Group, GroupState, modules_of
from dmuon_fsdp.runtime.parameter import DedicatedParam
from dmuon_fsdp.runtime.traffic import Traffic


class NotCleanError(RuntimeError):
    """An exception stopped a forward or a backward, and the next step was begun without a reset."""

    def __init__(self) -> None:
        super().__init__(
            "the last forward or backward did not end: an exception stopped it, and gradients and buffers are half "
            "done; call dmuon.reset(model) on all ranks, then go on with the next step"
        )


class Pass:
    """One forward of a group.

    Attributes:
        position: its place in this iteration's order of forwards.
        open_calls: module calls whose input gradient has not come; a call without one never closes.
        entered: its backward has begun.
        done: its backward is over.
        weights: which values of the parameters it computes with.
    """

    __slots__ = ("done", "entered", "group", "open_calls", "position", "weights")

    def __init__(self, group: Conductor, position: int) -> None:
        self.group = group
        self.position = position
        self.open_calls = 0
        self.entered = False
        self.done = False
        self.weights = group.group.holding.values


class Conductor:
    """The hooks of one group.

    Attributes:
        group: what it drives.
        modules: the boundary, or the children of a container that has no forward.
        container: that container, driven by its children; else None.
        open_passes: forwards whose backward is not over.
    """

    def __init__(self, group: Group, modules: Sequence[nn.Module], container: nn.Module | None, state: ModelState):
        self.group = group
        self.container = container
        self.state = state
        self.index = len(state.conductors)
        self.forward_prefetch: tuple[Conductor, ...] | None = None
        self.backward_prefetch: tuple[Conductor, ...] | None = None
        self.open_passes: set[Pass] = set()
        self.backward_passes = 0
        self.modules = tuple(modules)
        self._to_run: set[nn.Module] = set()
        self._running: set[nn.Module] = set()
        self._pass: Pass | None = None
        for module in self.modules:
            module.register_forward_pre_hook(torch.compiler.disable(self.pre_forward), with_kwargs=True)
            module.register_forward_hook(torch.compiler.disable(self.post_forward))
        for module in modules_of(group):
            module.register_state_dict_pre_hook(self._before_state_dict)
            module.register_load_state_dict_pre_hook(self._before_state_dict)

    # --- forward

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        args, kwargs = cast_floats((args, kwargs), self.group.policy.input_dtype)
        if self._recomputing:
            self._make_ready(again=True)
            return args, kwargs
        if module not in self._to_run or self._running:
            self.complete_forward()
            self._begin_pass()
        self._running.add(module)
        self._make_ready()
        if isinstance(module, FSDPModule):
            free_last_gather(module)
        self.state.prefetch_forward(self)
        if self._pass is None:
            return args, kwargs
        self._pass.weights = self.group.holding.values
        self._pass.open_calls += 1
        return _watch_inputs(self._pass, args, kwargs)

    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        output = cast_floats(output, self.group.policy.output_dtype)
        if self._recomputing:
            return output
        self._running.discard(module)
        self._to_run.discard(module)
        if self._pass is not None:
            for tensor in tensors_with_grad(output):
                tensor.register_hook(_PreBackward(self._pass))
        if not self._to_run:
            self._end_pass()
        return output

    @property
    def _recomputing(self) -> bool:
        """Inside an activation checkpoint's second forward: the pass it repeats is in its backward."""
        return self.backward_passes > 0 and in_backward()

    def _begin_pass(self) -> None:
        if self._running:
            raise NotCleanError
        self.state.check_clean()
        if not self.open_passes and self.group.outdated:  # by an evaluation, after which weights were put back
            self.rest()
        self._to_run = set(self.modules)
        self._pass = None
        # A frozen group too: the gradient of its input needs its weights.
        if torch.is_grad_enabled():
            self._pass = Pass(self, self.state.note_forward(self))
            self.open_passes.add(self._pass)

    def _end_pass(self) -> None:
        # Inside a backward (a reentrant checkpoint's forward) the weights are needed again at once.
        if self.group.frees_after_forward and not in_backward():
            self.rest()
        self._pass = None

    @property
    def interrupted(self) -> bool:
        """A forward of this group was begun and not ended, or a backward."""
        return bool(self._running) or self.backward_passes > 0

    def complete_forward(self) -> None:
        """End a forward in which some of a container's children did not run."""
        if self._to_run and not self._running:
            self._to_run.clear()
            self._end_pass()

    def forget(self) -> None:
        """Drop every pass, begun or ended."""
        self._to_run.clear()
        self._running.clear()
        self._pass = None
        self.open_passes.clear()
        self.backward_passes = 0

    def _before_state_dict(self, *_: Any, **__: Any) -> None:
        # A state dict holds the Parameters at rest, not views of a bucket.
        if not self._running:
            self.rest()

    # --- backward

    def pre_backward(self, current: Pass) -> None:
        if current.entered:
            return
        self.state.expect_end_of_backward()
        current.entered = True
        current.done = False  # a second backward through the same forward opens it again
        self.open_passes.add(current)
        self.backward_passes += 1
        if self.group.unshard_in_backward:
            self._make_ready(again=True)
            self.group.holding.check(current.weights, self.group.traffic.rank)
        self.state.prefetch_backward(current)

    def post_backward(self, current: Pass) -> None:
        current.open_calls -= 1
        if current.open_calls == 0 and not current.done:
            self._finish(current)

    def _finish(self, current: Pass) -> None:
        current.done = True
        if current.entered:
            current.entered = False
            self.backward_passes -= 1
        self.open_passes.discard(current)
        if not self.open_passes:
            self.group.finish_gradients()
        # What forward leaves resident is needed again by the backward of every other pass.
        if self.group.reshard_after_backward and (not self.open_passes or self.group.frees_after_forward):
            self.rest()

    def sweep(self) -> None:
        """Reduce what the backward left over, and go to rest."""
        group = self.group
        kept = group.keeps_gradients and group.reduce_grads and group.all_reduce_grads
        if self.open_passes or group.has_gradients() or kept:
            group.finish_gradients()
        self.open_passes.clear()
        self.backward_passes = 0
        if self.group.reshard_after_backward or self.group.state is GroupState.GATHERING:
            self.rest()

    # --- weights

    def _make_ready(self, *, again: bool = False) -> None:
        self.group.make_ready(again=again)
        if isinstance(self.container, FSDPModule):
            self.container.unshard()

    def rest(self) -> None:
        self.group.rest(until_backward=bool(self.open_passes) and self.group.frees_after_forward)
        if isinstance(self.container, FSDPModule):
            self.container.reshard()


class ModelState:
    """The groups of one model in the plan's order."""

    def __init__(self) -> None:
        self.traffics: list[Traffic] = []
        self.conductors: list[Conductor] = []
        self._roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._order: list[Conductor] = []
        self._sweep_due = False
        self._prefetched: Conductor | None = None

    def attach(self, group: Group, modules: Sequence[nn.Module], container: nn.Module | None) -> None:
        self.conductors.append(Conductor(group, modules, container, self))

    def attach_root(self, model: nn.Module) -> None:
        """The model's own output is the outermost: its gradient announces a backward before any group's does."""
        self._roots.add(model)
        model.register_forward_pre_hook(torch.compiler.disable(self._pre_root_forward))
        model.register_forward_hook(torch.compiler.disable(self._post_root_forward))

    @property
    def groups(self) -> list[Group]:
        return [conductor.group for conductor in self.conductors]

    # --- forward

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """What the hooks of ``module`` do before its forward, for a method that is a forward of another name."""
        if module in self._roots:
            self._pre_root_forward(module, args)
        for conductor in self.conductors:
            if module in conductor.modules:
                args, kwargs = conductor.pre_forward(module, args, kwargs)
        return args, kwargs

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """What they do after it."""
        for conductor in self.conductors:
            if module in conductor.modules:
                output = conductor.post_forward(module, args, output)
        return self._post_root_forward(module, args, output) if module in self._roots else output

    def _pre_root_forward(self, module: nn.Module, args: Any) -> None:
        if not in_backward():
            self.check_clean()
            if any(conductor.interrupted for conductor in self.conductors):
                raise NotCleanError

    def _post_root_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if in_backward():
            return output
        self.end_forward()
        if torch.is_grad_enabled():
            for tensor in tensors_with_grad(output):
                tensor.register_hook(self._pre_root_backward)
        return output

    def _pre_root_backward(self, grad: Tensor) -> None:
        self.expect_end_of_backward()

    def end_forward(self) -> None:
        for conductor in self.conductors:
            conductor.complete_forward()
            if conductor.group.state is GroupState.GATHERING:
                conductor.rest()

    def rest(self) -> None:
        """Every group at rest: a step makes old what is resident, and a forward whose backward did not come."""
        for conductor in self.conductors:
            conductor.open_passes.clear()
            conductor.rest()
        self._order.clear()

    def before_step(self) -> dict[DedicatedParam, Tensor]:
        """Everything at rest; of this rank's parameters where a step may leave them in the compute dtype as well."""
        self.rest()
        return {m: place for group in self.groups if group.has_buckets for m, place in group.places().items()}

    def after_step(self, placed: Set[DedicatedParam]) -> None:
        """The kept buckets take what the step wrote: in one launch, or group by group on their way to the replicas.

        Args:
            placed: what the step left in its place in the compute dtype. Noted not before the whole step is over: after
                an exception in the middle everything that was written counts as stale.
        """
        filled: list[Group] = []
        views: list[Tensor] = []
        sources: list[Tensor] = []
        for group in self.groups:
            if not group.has_buckets:
                continue
            group.note_copied([member for member in group.members if member in placed])
            stepped = any(member.param.grad is not None for member in group.members)
            if stepped:
                group.holding.note_step()
            if group.traffic.ranks.replicate is None:
                into, new = group.copies()
                views += into
                sources += new
            elif stepped:
                group.publish()
            else:
                continue
            filled.append(group)
        if views:
            copy_all(views, sources)
        for group in filled:
            group.holding.note_filled()
        for traffic in self.traffics:
            traffic.gather_lane.follow_current()

    def publish(self) -> None:
        """What was written outside of a step, to every replica."""
        for group in self.groups:
            if group.has_buckets:  # else the first use does
                group.publish()

    def settle_publishes(self) -> None:
        for group in self.groups:
            group.settle_publish()

    # --- order

    def note_forward(self, conductor: Conductor) -> int:
        self._order.append(conductor)
        return len(self._order) - 1

    def prefetch_forward(self, conductor: Conductor) -> None:
        """Start the next group of the plan, so that its broadcast runs under this one's compute."""
        if conductor.forward_prefetch is not None:
            for target in conductor.forward_prefetch:
                target.group.gather()
        elif conductor.index + 1 < len(self.conductors):
            self._prefetch(self.conductors[conductor.index + 1])

    def prefetch_backward(self, current: Pass) -> None:
        """Start the group whose forward came before, which is the next in backward."""
        if current.group.backward_prefetch is not None:
            for target in current.group.backward_prefetch:
                target.group.gather(again=True)
        elif 0 < current.position < len(self._order):
            self._prefetch(self._order[current.position - 1], again=True)

    def _prefetch(self, conductor: Conductor, *, again: bool = False) -> None:
        earlier = self._prefetched
        if earlier is not None and earlier is not conductor and earlier.group.state is GroupState.GATHERING:
            return  # one at a time bounds the memory in flight
        self._prefetched = conductor
        conductor.group.gather(again=again)

    # --- end of backward

    def expect_end_of_backward(self) -> None:
        if not self._sweep_due:
            if torch.is_grad_enabled():  # autograd's engine has it on in its hooks for this alone
                raise NotImplementedError(
                    "create_graph=True: the weights of dedicated parameters are freed when the backward ends, so that "
                    "there are no second derivatives through them; take finite differences, or a model that is neither "
                    "dedicated nor sharded"
                )
            self._sweep_due = True
            at_end_of_backward(self.end_of_backward)

    def end_of_backward(self) -> None:
        """Every gradient is reduced and visible on the current stream, every group at rest."""
        for conductor in self.conductors:
            conductor.sweep()
        self._settle()

    # --- failure

    def check_clean(self) -> None:
        """Raise where an exception left a backward half done: every one that begins makes a sweep due."""
        if self._sweep_due and not in_backward():
            raise NotCleanError

    def reset(self) -> None:
        """A clean state after an exception on all ranks: unreduced gradients dropped, every group at rest."""
        for conductor in self.conductors:
            conductor.forget()
            conductor.group.drop_gradients()
            conductor.rest()
        self._settle()

    def _settle(self) -> None:
        for traffic in self.traffics:
            traffic.settle_reductions()
        self._order.clear()
        self._prefetched = None
        self._sweep_due = False


class _PreBackward:
    """A tensor hook; a class, so that it holds the pass and not a frame."""

    __slots__ = ("current",)

    def __init__(self, current: Pass) -> None:
        self.current = current

    def __call__(self, grad: Tensor) -> None:
        self.current.group.pre_backward(self.current)


class _PostBackward(torch.autograd.Function):
    """Passes tensors through; its backward runs when all their gradients are there."""

    @staticmethod
    def forward(ctx: Any, current: Pass, *inputs: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.current = current
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        ctx.current.group.post_backward(ctx.current)
        return (None, *grads)


def _watch_inputs(current: Pass, args: Any, kwargs: Any) -> tuple[Any, Any]:
    if not kwargs and all(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
        return (_PostBackward.apply(current, *args), kwargs) if args else (args, kwargs)  # type: ignore[no-untyped-call]
    leaves, tree = tree_flatten((args, kwargs))
    watched = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not watched:
        return args, kwargs
    outputs = _PostBackward.apply(current, *(leaves[i] for i in watched))  # type: ignore[no-untyped-call]
    for i, output in zip(watched, outputs, strict=True):
        leaves[i] = output
    watched_args, watched_kwargs = tree_unflatten(leaves, tree)
    return watched_args, watched_kwargs
