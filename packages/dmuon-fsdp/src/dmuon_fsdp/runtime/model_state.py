"""What the runtime knows of one model: its groups and their order, and the hooks that drive them.

Hooks follow FSDP2's: a pre-forward hook gathers, a post-forward hook frees and watches the output, whose gradient
gathers again, and a node on the inputs, whose gradient means that the group's own gradients are there. A *pass* is one
forward of a group; a group reduces when every pass that came since the last backward has had its backward. What a
backward leaves over (an input without gradient, an output not used) is reduced in the plan's order when it ends. All of
this counts forwards, a fact equal on all ranks, never gradients, which are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dmuon_fsdp.compat import at_end_of_backward, in_backward, tensors_with_grad, tree_flatten, tree_unflatten
from dmuon_fsdp.runtime.group import Group, GroupState
from dmuon_fsdp.runtime.traffic import Traffic


class Pass:
    """One forward of a group.

    Attributes:
        position: its place in this iteration's order of forwards.
        open_calls: module calls whose input gradient has not come; a call without one never closes.
        entered: its backward has begun.
        done: its backward is over.
    """

    __slots__ = ("done", "entered", "group", "open_calls", "position")

    def __init__(self, group: Conductor, position: int) -> None:
        self.group = group
        self.position = position
        self.open_calls = 0
        self.entered = False
        self.done = False


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
        self.open_passes = 0
        self.backward_passes = 0
        self._modules = tuple(modules)
        self._to_run: set[nn.Module] = set()
        self._pass: Pass | None = None
        self._handles: list[Any] = []
        for module in self._modules:
            self._handles.append(module.register_forward_pre_hook(self.pre_forward, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self.post_forward))

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()

    # --- forward

    @torch.compiler.disable
    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if self._recomputing:
            self._make_ready()
            return args, kwargs
        if not self._to_run:
            self._begin_pass()
        self._make_ready()
        self.state.prefetch_forward(self)
        if self._pass is None:
            return args, kwargs
        self._pass.open_calls += 1
        return _watch_inputs(self._pass, args, kwargs)

    @torch.compiler.disable
    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._recomputing:
            return output
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
        self.state.check_clean()
        self._to_run = set(self._modules)
        self._pass = None
        if torch.is_grad_enabled() and self.group.trains:
            self._pass = Pass(self, self.state.note_forward(self))
            self.open_passes += 1

    def _end_pass(self) -> None:
        # Inside a backward (a reentrant checkpoint's forward) the weights are needed again at once.
        if self.group.frees_after_forward and not in_backward():
            self.rest()
        self._pass = None

    def abandon_forward(self) -> None:
        """Forget a forward that did not end."""
        self._to_run.clear()
        self._pass = None

    @property
    def forwarding(self) -> bool:
        return bool(self._to_run)

    def complete_forward(self) -> None:
        """The model's forward is over although some of the container's children did not run."""
        if self._to_run:
            self._to_run.clear()
            self._end_pass()

    # --- backward

    def pre_backward(self, current: Pass) -> None:
        if current.entered:
            return
        current.entered = True
        if current.done:  # a second backward through the same forward
            current.done = False
            self.open_passes += 1
        self.backward_passes += 1
        self.state.expect_end_of_backward()
        if self.group.unshard_in_backward:
            self._make_ready()
        self.state.prefetch_backward(current.position)

    def post_backward(self, current: Pass) -> None:
        current.open_calls -= 1
        if current.open_calls == 0 and not current.done:
            self._finish(current)

    def _finish(self, current: Pass) -> None:
        current.done = True
        if current.entered:
            current.entered = False
            self.backward_passes -= 1
        self.open_passes -= 1
        if self.open_passes == 0:
            self.group.finish_gradients()
        if self.group.reshard_after_backward:
            self.rest()

    def sweep(self) -> None:
        """Reduce what the backward left over, and go to rest."""
        if self.open_passes or self.group.has_gradients():
            self.group.finish_gradients()
        self.forget_passes()
        if self.group.reshard_after_backward or self.group.state is GroupState.GATHERING:
            self.rest()

    def forget_passes(self) -> None:
        self.open_passes = 0
        self.backward_passes = 0

    # --- weights

    def _make_ready(self) -> None:
        self.group.make_ready()
        if self.container is not None:
            self.state.unshard_container(self.container)

    def rest(self) -> None:
        self.group.rest()
        if self.container is not None:
            self.state.reshard_container(self.container)


class ModelState:
    """The groups of one model in the plan's order."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self.conductors: list[Conductor] = []
        self._order: list[Conductor] = []
        self._sweep_due = False
        self._prefetched: Conductor | None = None

    def attach(self, group: Group, modules: Sequence[nn.Module], container: nn.Module | None) -> None:
        self.conductors.append(Conductor(group, modules, container, self))

    def attach_root(self, model: nn.Module) -> None:
        """The model's own output is the outermost: its gradient announces a backward before any group's does."""
        model.register_forward_hook(self._post_root_forward)

    @torch.compiler.disable
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

    # --- order

    def note_forward(self, conductor: Conductor) -> int:
        self._order.append(conductor)
        return len(self._order) - 1

    def prefetch_forward(self, conductor: Conductor) -> None:
        """Start the next group of the plan, so that its broadcast runs under this one's compute."""
        index = self.conductors.index(conductor) + 1
        if index < len(self.conductors):
            self._prefetch(self.conductors[index])

    def prefetch_backward(self, position: int) -> None:
        """Start the group whose forward came before, which is the next in backward."""
        if 0 < position < len(self._order):
            self._prefetch(self._order[position - 1])

    def _prefetch(self, conductor: Conductor) -> None:
        earlier = self._prefetched
        if earlier is not None and earlier is not conductor and earlier.group.state is GroupState.GATHERING:
            return  # one at a time bounds the memory in flight
        self._prefetched = conductor
        conductor.group.gather()

    # --- end of backward

    def expect_end_of_backward(self) -> None:
        if not self._sweep_due:
            self._sweep_due = True
            at_end_of_backward(self.end_of_backward)

    def end_of_backward(self) -> None:
        """Every gradient is reduced and visible on the current stream, every group at rest."""
        for conductor in self.conductors:
            conductor.sweep()
        self.traffic.settle_reduce()
        self._order.clear()
        self._prefetched = None
        self._sweep_due = False

    # --- failure

    def check_clean(self) -> None:
        """Raise where an exception left a forward or a backward half done."""
        if in_backward():
            return
        broken = [c for c in self.conductors if c.backward_passes]
        if self._sweep_due or broken:
            raise RuntimeError(
                "the last backward did not end: an exception stopped it, and gradients and buffers are half done; call "
                "dmuon.reset(model) on all ranks, then go on with the next step"
            )

    def reset(self) -> None:
        """A clean state after an exception on all ranks: unreduced gradients dropped, every group at rest."""
        for conductor in self.conductors:
            conductor.abandon_forward()
            conductor.forget_passes()
            conductor.group.drop_gradients()
            conductor.rest()
        self.traffic.settle_reduce()
        self._order.clear()
        self._prefetched = None
        self._sweep_due = False

    # --- containers without a forward

    def unshard_container(self, container: nn.Module) -> None:
        from torch.distributed.fsdp import FSDPModule

        if isinstance(container, FSDPModule):
            container.unshard()

    def reshard_container(self, container: nn.Module) -> None:
        from torch.distributed.fsdp import FSDPModule

        if isinstance(container, FSDPModule):
            container.reshard()


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
    leaves, tree = tree_flatten((args, kwargs))
    watched = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not watched:
        return args, kwargs
    outputs = _PostBackward.apply(current, *(leaves[i] for i in watched))  # type: ignore[no-untyped-call]
    for i, output in zip(watched, outputs, strict=True):
        leaves[i] = output
    watched_args, watched_kwargs = tree_unflatten(leaves, tree)
    return watched_args, watched_kwargs
