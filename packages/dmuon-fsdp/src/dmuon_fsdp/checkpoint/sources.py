"""What the functions on state dicts share: meeting, taking tensors apart and together, values from the first rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.tensor import DTensor

from dmuon_fsdp.comm.groups import Ranks
from dmuon_fsdp.comm.together import broadcast_from_first, object_from_first
from dmuon_fsdp.runtime import registry
from dmuon_fsdp.runtime.layout import local_of, whole_of

T = TypeVar("T")
Spec = tuple[tuple[int, ...], torch.dtype]

TO_FIRST = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_FIRST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def sharded(options: StateDictOptions) -> StateDictOptions:
    """The same for this rank's own tensors, as they are."""
    return replace(options, full_state_dict=False, cpu_offload=False, broadcast_from_rank0=False)


def meet(model: nn.Module, call: str, *, writing: bool = False) -> Ranks:
    """Wait for every rank that shares the model to make this call, and for what publishes are under way.

    A model without dedicated parameters is shared by all ranks.
    """
    registration = registry.find(model)
    if registration is None or not registration.dedications:
        world = dist.group.WORLD
        assert world is not None, "there is a process group"
        return Ranks(world)
    registration.bind()
    registration.meet(call)
    registration.state.settle_publishes()
    if writing:
        registration.rest()
    return registration.ranks


def spec_of(value: Any) -> Spec | None:
    """Shape and dtype of a tensor; None for anything else."""
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None


def shapes_of(specs: Mapping[str, Spec | None]) -> dict[str, tuple[int, ...] | None]:
    return {name: None if spec is None else spec[0] for name, spec in specs.items()}


def map_tensors(tree: Any, fn: Callable[[Tensor], Any]) -> Any:
    """``fn`` of every tensor in nested dicts, lists and tuples; the rest as it is."""
    if isinstance(tree, Tensor):
        return fn(tree)
    if isinstance(tree, Mapping):
        return {key: map_tensors(value, fn) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_tensors(value, fn) for value in tree)
    return tree


def check_values(source: str, values: Mapping[str, Any]) -> None:
    """Raise ValueError, with all names, where there are tensors on meta: they have no values to load."""
    empty = [name for name, value in values.items() if _is_on_meta(value)]
    if empty:
        raise ValueError(f"{source} has tensors on meta, without values: {', '.join(map(repr, empty))}")


def _is_on_meta(tree: Any) -> bool:
    found: list[bool] = []
    map_tensors(tree, lambda tensor: found.append(tensor.is_meta))
    return any(found)


def collect(tree: Any, options: StateDictOptions, ranks: Ranks) -> Any:
    """Whole tensors, one at a time, or parts; on the CPU where that is wanted, and full ones then on the first only."""
    if not (options.full_state_dict or options.cpu_offload):
        return tree
    keep = ranks.is_first or not (options.full_state_dict and options.cpu_offload)
    collected = map_tensors(tree, lambda tensor: _collected(tensor.detach(), options, keep=keep))
    return collected if keep else {}


def _collected(tensor: Tensor, options: StateDictOptions, *, keep: bool) -> Tensor | None:
    if not options.full_state_dict:
        return tensor.to("cpu", copy=True)
    whole = whole_of(tensor)
    if not keep:
        return None
    # A buffer, and everything on one rank, is whole already: what is handed out must not change with the model.
    same = whole.untyped_storage().data_ptr() == local_of(tensor).untyped_storage().data_ptr()
    if options.cpu_offload:
        return whole.to("cpu", copy=same)
    return whole.clone() if same and isinstance(tensor, DTensor) else whole


@dataclass(frozen=True)
class Source:
    """Where the values of a state dict that is loaded come from.

    Attributes:
        ranks: which share the model.
        from_first: the first rank has them; else every rank has the same.
    """

    ranks: Ranks
    from_first: bool

    @property
    def gives(self) -> bool:
        """Whether what this rank was given is loaded."""
        return not self.from_first or self.ranks.is_first

    def known(self, value: T) -> T:
        """A small value, on every rank."""
        return object_from_first(value, self.ranks) if self.from_first else value

    def whole(self, value: Any, spec: Spec, device: torch.device) -> Tensor:
        """A whole tensor, on every rank."""
        if not self.from_first:
            return value  # type: ignore[no-any-return]
        if self.ranks.is_first:
            whole = whole_of(value).detach().to(device).contiguous()
        else:
            whole = torch.empty(spec[0], dtype=spec[1], device=device)
        broadcast_from_first(whole, self.ranks)
        return whole
