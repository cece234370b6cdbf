"""Optimizer state under parameter names, whole or in parts: torch's functions, with what they leave out.

As for the model (``model_dict.py``); and state of frozen parameters is loaded too, which torch's setter drops.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.optim.optimizer import Optimizer

from dmuon_fsdp.checkpoint.names import check_names, check_shapes
from dmuon_fsdp.checkpoint.sources import (
    FROM_FIRST,
    TO_FIRST,
    Source,
    check_values,
    collect,
    map_tensors,
    meet,
    sharded,
    spec_of,
)
from dmuon_fsdp.comm.groups import Ranks
from dmuon_fsdp.comm.together import all_or_none
from dmuon_fsdp.runtime import registry
from dmuon_fsdp.runtime.inference import outside_inference_mode
from dmuon_fsdp.runtime.layout import laid_out, local_of, whole_of
from dmuon_fsdp.runtime.owned_tensor import OwnedTensor

Group = Mapping[str, Any]
_SOURCE = "the optimizer state dict"


@outside_inference_mode
def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """The state of one or more optimizers by parameter name. ``options=None`` means full, on CPU, on rank 0.

    Call it on all ranks. Otherwise as ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``, whose
    layout it has: the unwrapped model with ``dmuon_core.Muon`` loads it. The keys are the same on every rank and before
    the first step.

    Raises:
        ValueError: parameters in an optimizer that are not the model's.
        RuntimeError: some ranks did not make this call; they are named.
    """
    options = options or TO_FIRST
    ranks = meet(model, "dmuon.get_optimizer_state_dict(model, optimizer)")
    listed = _listed(optimizers)
    for optimizer in listed:
        check_members(model, optimizer)
        share_steps(optimizer, ranks)
    parts = dsd.get_optimizer_state_dict(model, listed, submodules=submodules, options=sharded(options))
    return collect(parts, options, ranks)  # type: ignore[no-any-return]


@outside_inference_mode
def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizer | Iterable[Optimizer],
    optim_state_dict: Mapping[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Load optimizer state by parameter name. ``options=None`` means a full one from rank 0; others may give ``{}``.

    Call it on all ranks. Otherwise as ``torch.distributed.checkpoint.state_dict.set_optimizer_state_dict``. State of
    frozen parameters is loaded too, and momentum takes the optimizer's ``momentum_dtype``.

    Raises:
        KeyError: missing or unexpected names, all of them; unless ``options.strict`` is False, which begins anew where
            nothing was saved.
        ValueError: other shapes or kinds of state, all of them; values on meta; parameters in an optimizer that are not
            the model's.
        RuntimeError: some ranks did not make this call.
    """
    options = options or FROM_FIRST
    ranks = meet(model, "dmuon.set_optimizer_state_dict(model, optimizer, ...)", writing=True)
    for optimizer in _listed(optimizers):
        check_members(model, optimizer)
        if is_ours(model, optimizer):
            _Loading(optimizer, optim_state_dict, options, Source(ranks, options.broadcast_from_rank0)).run()
        else:
            dsd.set_optimizer_state_dict(model, optimizer, dict(optim_state_dict), options=options)


def is_ours(model: nn.Module, optimizer: Optimizer) -> bool:
    """Whether it is a ``dmuon.Muon`` of this model, which lays tensors out by itself and finds parameters by name."""
    registration = registry.find(model)
    return registration is not None and optimizer in registration.optimizers


def share_steps(optimizer: Optimizer, ranks: Ranks) -> None:
    """The owner's count of steps on every rank: AdamW of an owner skips a step in which nobody used the parameter,
    which the other ranks do not know."""
    owned = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, OwnedTensor)]
    states = [(parameter.is_owner, optimizer.state.get(parameter, {})) for parameter in owned]
    counts = [(mine, state["step"]) for mine, state in states if "step" in state]
    if not counts:
        return
    shared = torch.stack([step if mine else torch.zeros_like(step) for mine, step in counts])
    for group in ranks.groups:
        dist.all_reduce(shared, group=group)
    for (_, step), value in zip(counts, shared, strict=True):
        step.copy_(value)


def check_members(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise ValueError where the optimizer has parameters that the model cannot name, or that are on meta."""
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            "the model is on meta, where its optimizer has no state yet: call dmuon.init_weights(model), or load the "
            "model first"
        )
    own = set(model.parameters())
    strangers = [
        f"{group.get('group_name', index)}[{place}]"
        for index, group in enumerate(optimizer.param_groups)
        for place, parameter in enumerate(group["params"])
        if parameter not in own
    ]
    if strangers:
        raise ValueError(
            f"the optimizer has parameters that are not in this model, so their state has no name: "
            f"{', '.join(strangers)}; make them parameters of the model, or give every model an optimizer of its own"
        )


def _listed(optimizers: Optimizer | Iterable[Optimizer]) -> list[Optimizer]:
    return [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)


class _Loading:
    """One call of the setter on one ``dmuon.Muon``: outline, check, lay out tensor by tensor, hand over."""

    def __init__(
        self, optimizer: Optimizer, given: Mapping[str, Any], options: StateDictOptions, source: Source
    ) -> None:
        self.optimizer = optimizer
        self.source = source
        self.options = options
        self.given = given
        self.names: dict[str, nn.Parameter] = {
            name: parameter
            for group in optimizer.param_groups
            for name, parameter in zip(group["param_names"], group["params"], strict=True)
        }

    def run(self) -> None:
        self.nested = all_or_none(self._taken_apart, self.source.ranks.groups)
        groups, entries = self.source.known((_plain_groups(self.nested), _outline(self.nested)))
        all_or_none(lambda: self._check(groups, entries), self.source.ranks.groups)
        state = {name: self._laid_out(name, entries[name]) for name in self.names if name in entries}
        self.optimizer.load_state_dict(
            {"state": state, "param_groups": own_groups(groups, self.optimizer.param_groups)}
        )

    def _taken_apart(self) -> Mapping[str, Any]:
        nested = nested_of(self.given)
        if self.source.gives:
            state = {f"{name}.{key}": v for name, entry in nested["state"].items() for key, v in entry.items()}
            groups = enumerate(nested["param_groups"])
            options = {f"param_groups.{index}.{key}": v for index, group in groups for key, v in group.items()}
            check_values(_SOURCE, {**state, **options})
        return nested

    def _check(self, groups: Sequence[Group], entries: Mapping[str, Mapping[str, Any]]) -> None:
        trained = {name for name, parameter in self.names.items() if parameter.requires_grad}
        listed = {name for group in groups for name in group["params"]}
        wanted, found = trained | (self.names.keys() & listed), entries.keys() | (listed - trained)
        check_names(_SOURCE, wanted, found, strict=self.options.strict)
        for name in sorted(self.names.keys() & entries.keys()):
            shapes = {f"{name}.{key}": value[0] for key, value in entries[name].items() if _is_outlined(value)}
            check_shapes(_SOURCE, dict.fromkeys(shapes, tuple(self.names[name].shape)), shapes)

    def _laid_out(self, name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
        """The state of one parameter, this rank's part, in host memory; whole tensors come one at a time."""
        parameter, values = self.names[name], self.nested["state"].get(name, {})
        state = {}
        for key, outline in entry.items():
            value = values.get(key)
            if not _is_outlined(outline):
                value = outline
            elif self.options.full_state_dict:
                whole = self.source.whole(value, outline, local_of(parameter).device)
                value = laid_out(whole, parameter, dtype=whole.dtype, device=torch.device("cpu"))
            state[key] = value
        return state


def _outline(nested: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """State with shape and dtype in place of tensors; what has no dimensions (a step, a number) as it is."""
    return {
        name: {
            key: spec_of(value) if isinstance(value, Tensor) and value.ndim else map_tensors(value, _on_host)
            for key, value in entry.items()
        }
        for name, entry in nested["state"].items()
    }


def _is_outlined(value: Any) -> bool:
    return isinstance(value, tuple)


def _plain_groups(nested: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [map_tensors(group, _on_host) for group in nested["param_groups"]]


def _on_host(tensor: Tensor) -> Tensor:
    return whole_of(tensor).detach().cpu()


def nested_of(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """torch's flattened form, ``state.<name>.<key>`` and ``param_groups.<name>.<option>``, taken apart."""
    if not given:
        return {"state": {}, "param_groups": []}
    if "state" in given and "param_groups" in given:
        return given
    sections: dict[str, dict[str, dict[str, Any]]] = {"state": {}, "param_groups": {}}
    for flat, value in given.items():
        section, _, rest = flat.partition(".")
        name, _, key = rest.rpartition(".")
        if section not in sections or not name:
            raise ValueError(f"{_SOURCE} has {flat!r}, which is neither state nor an option of a group")
        sections[section].setdefault(name, {})[key] = value
    groups: dict[Any, dict[str, Any]] = {}
    for name, options in sections["param_groups"].items():
        group = groups.setdefault(options.get("group_name"), {**options, "params": []})
        group["params"].append(name)
    return {"state": sections["state"], "param_groups": list(groups.values())}


def own_groups(saved: Iterable[Group], own: Iterable[Group]) -> list[dict[str, Any]]:
    """The saved groups with the parameters that are ours; parameters of ours that none has keep their options."""
    own = list(own)
    names = {name for group in own for name in group["param_names"]}
    groups = [
        {**_options(group), "params": kept}
        for group in saved
        if (kept := [name for name in group["params"] if name in names]) or not group["params"]
    ]
    found = {name for group in groups for name in group["params"]}
    for group in own:
        rest = [name for name in group["param_names"] if name not in found]
        groups += [{**_options(group), "params": rest}] if rest else []
    return groups


def _options(group: Group) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
