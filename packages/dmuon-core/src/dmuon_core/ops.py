"""``dmuon::newton_schulz``: Newton-Schulz as one operator, which torch.compile calls and does not look into.

Its arguments say all there is to compute, so that a graph that another process compiled and cached computes the same.
``owner`` only says whose kernels, plans and counts to use where that object is alive here.
"""

# mypy: allow-untyped-calls
# torch.library.Library has no annotations.

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dmuon_core.coefficients import CoefficientSet, Triple
from dmuon_core.iteration import Backend

if TYPE_CHECKING:
    from dmuon_core.newton_schulz import NewtonSchulz

_LIBRARY = torch.library.Library("dmuon", "FRAGMENT")
_LIBRARY.define(
    "newton_schulz(Tensor x, str backend, str kernel, float[] coefficients, bool repeats, int[]? restarts, "
    "ScalarType dtype, bool deterministic, int ns_steps, int workspace_mib, int owner) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)

_owners: weakref.WeakValueDictionary[int, NewtonSchulz] = weakref.WeakValueDictionary()
_numbers = itertools.count()


@dataclass(frozen=True)
class Signature:
    """What makes two objects compute the same."""

    backend: Backend
    kernel: str
    coefficients: tuple[Triple, ...]
    repeats: bool
    restarts: tuple[int, ...] | None
    dtype: torch.dtype
    deterministic: bool
    workspace_mib: int


def enlist(ns: NewtonSchulz) -> int:
    """The number under which the operator finds ``ns`` as long as it is alive."""
    number = next(_numbers)
    _owners[number] = ns
    return number


def call(x: Tensor, signature: Signature, ns_steps: int, owner: int) -> Tensor:
    """The operator, outside of autograd."""
    flat = [value for triple in signature.coefficients for value in triple]
    result: Tensor = torch.ops.dmuon.newton_schulz(
        x.detach(),
        signature.backend,
        signature.kernel,
        flat,
        signature.repeats,
        signature.restarts,
        signature.dtype,
        signature.deterministic,
        ns_steps,
        signature.workspace_mib,
        owner,
    )
    return result


def _newton_schulz(
    x: Tensor,
    backend: Backend,
    kernel: str,
    coefficients: Sequence[float],
    repeats: bool,
    restarts: Sequence[int] | None,
    dtype: torch.dtype,
    deterministic: bool,
    ns_steps: int,
    workspace_mib: int,
    owner: int,
) -> Tensor:
    triples = tuple((coefficients[i], coefficients[i + 1], coefficients[i + 2]) for i in range(0, len(coefficients), 3))
    positions = None if restarts is None else tuple(restarts)
    signature = Signature(backend, kernel, triples, repeats, positions, dtype, deterministic, workspace_mib)
    ns = _owners.get(owner)
    if ns is None or ns.signature != signature:
        ns = _stand_in(signature)
    return ns(x, ns_steps=ns_steps).contiguous()


@functools.lru_cache(maxsize=64)
def _stand_in(signature: Signature) -> NewtonSchulz:
    from dmuon_core.newton_schulz import NewtonSchulz

    return NewtonSchulz(
        signature.backend,
        signature.kernel,
        CoefficientSet("custom", signature.coefficients, repeats=signature.repeats),
        signature.restarts,
        signature.dtype,
        signature.deterministic,
        ns_steps=1,
        workspace_mib=signature.workspace_mib,
    )


def _fake(x: Tensor, *arguments: object) -> Tensor:
    return x.new_empty(x.shape)


_LIBRARY.impl("newton_schulz", _newton_schulz, "CompositeExplicitAutograd")
torch.library.register_fake("dmuon::newton_schulz", _fake, lib=_LIBRARY)
