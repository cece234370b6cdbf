"""Which model a module belongs to, and what FSDP2 asks and tells through the seam.

Registrations are held by their models; this module holds both weakly.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from dmuon_fsdp.compat import Cover
from dmuon_fsdp.runtime import controls
from dmuon_fsdp.runtime.binding import Registration, is_headless

_ATTRIBUTE = "_dmuon_registration"
_by_module: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Registration]] = weakref.WeakKeyDictionary()


def register(model: nn.Module) -> Registration:
    """The model's registration, made at the first call."""
    known = find(model)
    if known is None:
        known = Registration(model)
        vars(model)[_ATTRIBUTE] = known
    for module in model.modules():
        if _of(module) is None:  # also where the model that it was once a part of is gone
            _by_module[module] = weakref.ref(known)
    return known


def find(module: nn.Module) -> Registration | None:
    """The registration of the model that ``module`` is a part of, or that is a part of it."""
    return next(_all_within(module), None)


def _all_within(module: nn.Module) -> Iterator[Registration]:
    """Registrations of ``module`` and of what is below it; the same one repeatedly."""
    return (known for below in module.modules() if (known := _of(below)) is not None)


class FsdpHandler:
    """Answers the seam."""

    def dedicated_among(self, modules: Sequence[nn.Module]) -> set[nn.Parameter]:
        """At-rest Parameters that ``fully_shard`` must leave alone. Binds the model."""
        found = {registration for module in modules if (registration := _of(module)) is not None}
        for registration in found:
            registration.bind()
        return {member.param for registration in found for member in registration.params.values()}

    def accepts_container(self, module: nn.Module) -> bool:
        """A container without a forward may pass where it is the boundary of dedicated parameters."""
        registration = _of(module)
        if registration is None or not is_headless(module):
            return False
        return any(registration.module_at(boundary) is module for boundary in {s.boundary for s in registration.specs})

    def covered(self, modules: Sequence[nn.Module], cover: Cover) -> None:
        for module in modules:
            # A wrapper (checkpoint, compile) that came after dedicate_params is known by what is inside it.
            for registration in dict.fromkeys(_all_within(module)):
                _by_module.setdefault(module, weakref.ref(registration))
                registration.note_cover(module, cover)

    def knows(self, module: nn.Module) -> bool:
        return _of(module) is not None

    def entering(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        registration = _of(module)
        return (args, kwargs) if registration is None else registration.state.enter(module, args, kwargs)

    def leaving(self, module: nn.Module, args: Any, output: Any) -> Any:
        registration = _of(module)
        return output if registration is None else registration.state.leave(module, args, output)

    def backward_ended(self, module: nn.Module) -> None:
        registration = _of(module)
        if registration is not None:
            registration.state.end_of_backward()

    def control(self, module: nn.Module, name: str, arguments: dict[str, Any]) -> None:
        registration = find(module)
        if registration is not None and registration.params:
            controls.apply(registration, module, name, arguments)


def _of(module: nn.Module) -> Registration | None:
    reference = _by_module.get(module)
    return None if reference is None else reference()
