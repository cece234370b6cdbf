"""FSDPModule's methods, acting on dedicated groups as well: one table, checked against the torch at hand by a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from dmuon_fsdp.runtime.binding import Registration
from dmuon_fsdp.runtime.model_state import Conductor

Arguments = dict[str, Any]


def apply(registration: Registration, module: nn.Module, name: str, arguments: Arguments) -> None:
    """Do to the dedicated groups what ``module.<name>(**arguments)`` does to FSDP2's.

    Raises:
        NotImplementedError: a method that this table does not know, or that cannot act on dedicated groups.
    """
    if name in NEUTRAL:
        return
    if name in WHOLE_MODEL:
        WHOLE_MODEL[name](registration)
        return
    if name not in ACTS:
        raise NotImplementedError(
            f"FSDPModule.{name} does not act on dedicated parameters, and this model has some; leave the call out, or "
            f"leave the parameters of this module out of the predicate"
        )
    for conductor in _reached(registration, module, recurse=arguments.get("recurse", False)):
        ACTS[name](registration, conductor, arguments)


def _reached(registration: Registration, module: nn.Module, *, recurse: bool) -> list[Conductor]:
    """The groups that a call on ``module`` is about: all below it, or those it covers itself."""
    if recurse:
        below = set(module.modules())
        return [c for c in registration.state.conductors if registration.module_at(c.group.name) in below]
    return [c for c in registration.state.conductors if _covers(registration, module, c)]


def _covers(registration: Registration, module: nn.Module, conductor: Conductor) -> bool:
    found = registration.covering(conductor.group.name)
    return found is not None and found[0] is module


def _set(attribute: str, argument: str) -> Callable[[Registration, Conductor, Arguments], None]:
    def act(registration: Registration, conductor: Conductor, arguments: Arguments) -> None:
        setattr(conductor.group, attribute, arguments[argument])

    return act


def _set_sync(registration: Registration, conductor: Conductor, arguments: Arguments) -> None:
    # FSDP2's sets both stages.
    conductor.group.reduce_grads = conductor.group.all_reduce_grads = arguments["requires_gradient_sync"]


def _prefetch(attribute: str) -> Callable[[Registration, Conductor, Arguments], None]:
    def act(registration: Registration, conductor: Conductor, arguments: Arguments) -> None:
        targets = [c for module in arguments["modules"] for c in _reached(registration, module, recurse=False)]
        setattr(conductor, attribute, tuple(targets))

    return act


ACTS: dict[str, Callable[[Registration, Conductor, Arguments], None]] = {
    "set_requires_gradient_sync": _set_sync,
    "set_requires_all_reduce": _set("all_reduce_grads", "requires_all_reduce"),
    "set_reshard_after_forward": _set("reshard_after_forward", "reshard_after_forward"),
    "set_reshard_after_backward": _set("reshard_after_backward", "reshard_after_backward"),
    "set_unshard_in_backward": _set("unshard_in_backward", "unshard_in_backward"),
    "set_gradient_divide_factor": _set("divisor", "factor"),
    "set_reduce_scatter_divide_factor": _set("divisor", "factor"),
    "set_modules_to_forward_prefetch": _prefetch("forward_prefetch"),
    "set_modules_to_backward_prefetch": _prefetch("backward_prefetch"),
    "unshard": lambda registration, conductor, arguments: conductor.group.make_ready(),
    "reshard": lambda registration, conductor, arguments: conductor.group.rest(),
}

WHOLE_MODEL: dict[str, Callable[[Registration], None]] = {
    "reset_iter_state": lambda registration: registration.state.reset(),
}

NEUTRAL = frozenset(
    {
        # A dedicated group's gradients are ready at the end of every backward.
        "set_is_last_backward",
        # How FSDP2 lays out, times and sums its own collectives.
        "set_allocate_memory_from_process_group_for_comm",
        "set_force_sum_reduction_for_comms",
        "set_post_optim_event",
        "set_reduce_scatter_max_input_buffers",
        "set_reduce_scatter_unused_params",
        "set_separate_reduce_scatter_group",
        "set_symm_mem_for_comm",
    }
)
