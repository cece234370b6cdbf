"""One dedicated parameter: where it stands in the model, what it is at rest, and its view while it computes."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

import torch
from torch import Tensor, nn

from dmuon_core.views import MatrixView
from dmuon_fsdp.compat import get_parameter, put_parameter
from dmuon_fsdp.planning.plan import Owner, ParamSpec
from dmuon_fsdp.runtime.owned_tensor import OwnedTensor


@dataclass(frozen=True)
class Place:
    """A module and the attribute under which it holds the parameter."""

    module: nn.Module
    attribute: str


@dataclass(eq=False)
class DedicatedParam:
    """A parameter with an owner.

    Attributes:
        spec: what the plan knows of it.
        owner: its coordinate.
        places: where the model holds it; several for a shared one.
        param: the Parameter at rest, an :class:`OwnedTensor`, whole on the owner.
        unsharded: the Parameter that stands in the modules while they compute; None before the first use.
        replacements: how often something was put in its place.
    """

    spec: ParamSpec
    owner: Owner
    places: tuple[Place, ...]
    param: nn.Parameter
    unsharded: nn.Parameter | None = None
    replacements: int = 0
    _presence: tuple[weakref.ref[Tensor], Tensor] | None = field(default=None, repr=False)
    _local: weakref.ref[Tensor] | None = field(default=None, repr=False)
    _foreign_grad: OwnedTensor | None = field(default=None, repr=False)

    @property
    def fqn(self) -> str:
        return self.spec.fqn

    @cached_property
    def shape(self) -> torch.Size:
        return torch.Size(self.spec.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.owned.local.dtype

    @property
    def route(self) -> str:
        """What steps it: ``"muon"`` or ``"adamw"``."""
        return self.spec.treatment.route

    @cached_property
    def view(self) -> MatrixView:
        return self.spec.view

    @property
    def owned(self) -> OwnedTensor:
        return cast(OwnedTensor, self.param)

    @cached_property
    def is_owner(self) -> bool:
        """Whatever replaces the Parameter has its home."""
        return self.owned.is_owner

    def show(self, parameter: nn.Parameter) -> None:
        """Register ``parameter`` in the modules."""
        for place in self.places:
            put_parameter(place.module, place.attribute, parameter)

    def shown(self) -> nn.Parameter:
        return get_parameter(self.places[0].module, self.places[0].attribute)

    def adopt_replacement(self) -> bool:
        """Take over what ``load_state_dict(assign=True)``, ``to`` or ``to_empty`` put in our place; whether it did."""
        found = self.shown()
        if found is self.param or found is self.unsharded:
            return self._note_local()
        if isinstance(found, OwnedTensor) and found.home == self.owned.home:
            self.param = cast(nn.Parameter, found)
        else:
            adopted = self.owned.adopt(found)
            self.param = nn.Parameter(adopted, requires_grad=found.requires_grad)
        self._note_local()
        self.show(self.param)
        return True

    def _note_local(self) -> bool:
        """Whether its tensor is another than before: ``module.to`` exchanges what is inside the Parameter."""
        if self._local is not None and self._local() is self.owned.local:
            return False
        self._local = weakref.ref(self.owned.local)
        self.replacements += 1
        return True

    # --- gradient

    def set_grad(self, local: Tensor, presence: Tensor) -> None:
        """On the owner, add the whole gradient ``local`` to ``.grad``.

        Args:
            presence: 1 where some rank had a gradient and 0 where none had; stays on the device.
        """
        if self.param.grad is None:
            grad = self.owned.like(local)
            self.param.grad = grad
            self._note_presence(presence)
            return
        earlier = self.presence
        cast(OwnedTensor, self.param.grad).local.add_(local)
        self._presence = None
        if earlier is not None:
            self._note_presence(torch.maximum(earlier, presence))

    def set_foreign_grad(self) -> None:
        """On every other rank, a ``.grad`` without rows, the same one in every step."""
        if self.param.grad is not None:
            return
        if self._foreign_grad is None or self._foreign_grad.dtype != self.dtype:
            self._foreign_grad = self.owned.like(torch.empty_like(self.owned.local))
        self.param.grad = self._foreign_grad

    @property
    def presence(self) -> Tensor | None:
        """1 or 0 on the device: whether any rank had a gradient; None where the user set ``.grad``."""
        grad = self.param.grad
        if self._presence is None or not isinstance(grad, OwnedTensor) or self._presence[0]() is not grad.local:
            return None
        return self._presence[1]

    def _note_presence(self, presence: Tensor) -> None:
        # Of the tensor inside: `module.to` cannot exchange a gradient that something refers to weakly.
        self._presence = (weakref.ref(cast(OwnedTensor, self.param.grad).local), presence)
