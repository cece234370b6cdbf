"""Which model a module belongs to, and what FSDP2 asks and tells through the seam.

Registrations are held by their models; this module holds both weakly.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
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
        _by_module.setdefault(module, weakref.ref(known))
    return known


def find(module: nn.Module) -> Registration | None:
    """The registration of the model that ``module`` is a part of."""
    for candidate in module.modules():
        reference = _by_module.get(candidate)
        if reference is not None:
            return reference()
    return None


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
            registration = _of(module)
            if registration is not None:
                registration.note_cover(module, cover)

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
