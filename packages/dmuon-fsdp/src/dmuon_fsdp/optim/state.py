"""The optimizer's state by parameter: how it begins, and what a state dict that is loaded must hold.

State exists before the first step, zeros on every rank, so that the keys of a checkpoint never depend on which
gradients were seen, and so that nobody has to make a step to get them. A loaded dict is read whole and checked before
anything changes; parameters are found by name where it has names, else by position.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dmuon_fsdp.optim.masters import KEY as MASTER
from dmuon_fsdp.runtime.layout import is_laid_out, laid_out, local_of

State = MutableMapping[Any, dict[str, Any]]
Group = Mapping[str, Any]

# Options of dmuon_core.Muon's groups that have no meaning here, and what is never taken from a saved group.
_NOT_LOADED = frozenset({"params", "param_names", "group_name", "algorithm", "view", "ns_coefficients"})
_OPTIONS = {
    "muon": frozenset({"momentum", "nesterov", "ns_steps", "adjust_lr_fn"}),
    "adamw": frozenset({"betas", "eps"}),
}
_MOMENTS = {"muon": ("momentum_buffer",), "adamw": ("exp_avg", "exp_avg_sq")}


@dataclass(frozen=True)
class StateRules:
    """How state looks.

    Attributes:
        momentum_dtype: dtype of momentum, whatever the parameter's.
        master_dtypes: of the parameters that are stepped in a wider copy.
    """

    momentum_dtype: torch.dtype
    master_dtypes: Mapping[nn.Parameter, torch.dtype] = field(default_factory=dict)

    def keys(self, parameter: nn.Parameter, algorithm: str) -> tuple[str, ...]:
        own = ("step", *_MOMENTS["adamw"]) if algorithm == "adamw" else _MOMENTS["muon"]
        return (*own, MASTER) if parameter in self.master_dtypes else own

    def fresh(self, parameter: nn.Parameter, algorithm: str) -> dict[str, Tensor]:
        """What a parameter has that was never stepped; as torch.optim.AdamW begins, and with no momentum."""
        dtype = self._dtype(parameter, algorithm)
        moments = {key: torch.zeros_like(parameter, dtype=dtype) for key in _MOMENTS[algorithm]}
        if parameter in self.master_dtypes:
            moments[MASTER] = parameter.detach().to(self.master_dtypes[parameter])
        if algorithm == "muon":
            return moments
        return {"step": torch.zeros((), dtype=torch.float32, device=_step_device(parameter)), **moments}

    def loaded(
        self, parameter: nn.Parameter, algorithm: str, saved: Mapping[str, Any], own: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """``saved``, which was checked, in the parameter's layout and our dtypes: copies.

        Args:
            own: the state that this replaces. A tensor of it that is given back, as after
                ``torch.distributed.checkpoint.load`` into it, stays where it is, the count of steps like the others.
        """

        def taken(key: str, dtype: torch.dtype) -> Tensor:
            value: Tensor = saved[key]
            given_back = own.get(key) is saved[key] and is_laid_out(value, parameter, dtype=dtype)
            return value if given_back else laid_out(value, parameter, dtype=dtype)

        dtype = self._dtype(parameter, algorithm)
        state = {key: taken(key, dtype) for key in _MOMENTS[algorithm]}
        if parameter in self.master_dtypes:
            state[MASTER] = taken(MASTER, self.master_dtypes[parameter])
        if algorithm == "muon":
            return state
        return {"step": self._step(parameter, saved["step"], own.get("step")), **state}

    def _step(self, parameter: nn.Parameter, saved: Any, own: Any) -> Tensor:
        device = _step_device(parameter)
        if isinstance(own, Tensor) and own is saved and (own.dtype, own.device) == (torch.float32, device):
            return own
        return torch.as_tensor(saved, dtype=torch.float32).detach().reshape(()).to(device, copy=True)

    def _dtype(self, parameter: nn.Parameter, algorithm: str) -> torch.dtype:
        return self.momentum_dtype if algorithm == "muon" else self.master_dtypes.get(parameter, parameter.dtype)

    def fits(self, parameter: nn.Parameter, algorithm: str, state: Mapping[str, Any]) -> bool:
        """Whether fresh state would have these dtypes, on this device."""
        wanted = local_of(parameter).device, self._dtype(parameter, algorithm)
        moments = all((local_of(state[key]).device, state[key].dtype) == wanted for key in _MOMENTS[algorithm])
        return moments and (MASTER in state) == (parameter in self.master_dtypes)


def _step_device(parameter: nn.Parameter) -> torch.device:
    # The fused kernel wants it beside the parameter, every other one on the host.
    device = local_of(parameter).device
    return device if device.type == "cuda" else torch.device("cpu")


def create_missing(state: State, groups: Sequence[Group], rules: StateRules) -> None:
    """Fresh state for every parameter that has none and is stepped; parameters on meta wait."""
    for group in groups:
        for parameter in group["params"]:
            if not state.get(parameter) and _is_stepped(parameter) and parameter.device.type != "meta":
                state[parameter] = rules.fresh(parameter, group["algorithm"])


def _is_stepped(parameter: nn.Parameter) -> bool:
    # What was frozen after a backward still has its gradient, which is all that a step looks at.
    return parameter.requires_grad or parameter.grad is not None


def refresh(state: State, groups: Sequence[Group], rules: StateRules) -> None:
    """Begin again where ``module.to`` changed a parameter since its state, never used so far, was made."""
    for group in groups:
        for parameter in group["params"]:
            if state.get(parameter) and not rules.fits(parameter, group["algorithm"], state[parameter]):
                state[parameter] = rules.fresh(parameter, group["algorithm"])


@dataclass(frozen=True)
class _Entry:
    name: str
    parameter: nn.Parameter
    algorithm: str
    saved: Mapping[str, Any] | None


@dataclass(frozen=True)
class Loaded:
    """A state dict that was read and found right.

    Attributes:
        groups: options by group.
        entries: what was saved, by parameter.
        own: the state that is there.
    """

    groups: list[dict[str, Any]]
    entries: list[_Entry]
    own: dict[nn.Parameter, dict[str, Any]]

    def put(self, state: State, rules: StateRules) -> None:
        """Into ``state`` what was saved: of what it replaces no more than one parameter's is there beside the new.

        Nothing in it can fail but an allocation, after which some parameters have new state and others still the old.
        """
        state.update(self.own)
        self.own.clear()
        for entry in self.entries:
            own = state.get(entry.parameter) or {}
            if entry.saved is not None:
                state[entry.parameter] = rules.loaded(entry.parameter, entry.algorithm, entry.saved, own)
            elif entry.parameter.requires_grad:
                state.pop(entry.parameter, None)


def read_state_dict(given: Mapping[str, Any], state: State, groups: Sequence[Group], rules: StateRules) -> Loaded:
    """What :meth:`Muon.load_state_dict` is to take over; nothing has changed yet.

    A trained parameter without an entry begins anew, a frozen one keeps what it has.

    Raises:
        ValueError: the groups or parameters are others, a state lacks a key or has another shape; all are named.
    """
    saved = list(given["param_groups"])
    sources = _pair_groups(saved, groups)
    entries = list(_entries(given["state"], sources, saved, groups))
    complaints = [c for entry in entries for c in _complaints(entry, rules)]
    if complaints:
        raise ValueError(f"the optimizer state does not fit: {'; '.join(complaints)}")
    own = {entry.parameter: state[entry.parameter] for entry in entries if state.get(entry.parameter)}
    options = [_options(source, group) for source, group in zip(sources, groups, strict=True)]
    return Loaded(options, entries, own)


def _names(group: Group) -> list[str] | None:
    """torch's setter puts names for ``params``; ours keep them beside the numbers."""
    if group["params"] and all(isinstance(key, str) for key in group["params"]):
        return list(group["params"])
    names = group.get("param_names")
    return list(names) if names is not None and len(names) == len(group["params"]) else None


def _pair_groups(saved: Sequence[Group], groups: Sequence[Group]) -> list[Group]:
    """For every group of ours the saved one that its options come from."""
    if not _has_names(saved):
        _check_positions(saved, groups)
        return list(saved)
    holder = {name: group for group in saved for name in _names(group) or ()}
    ours = [name for group in groups for name in group["param_names"]]
    missing = [name for name in ours if name not in holder]
    extra = [name for name in holder if name not in set(ours)]
    if missing or extra:
        raise ValueError(
            f"the saved optimizer has other parameters: it lacks {missing}, and has {extra} too; load it into the same "
            f"model, or use dmuon.set_optimizer_state_dict with StateDictOptions(strict=False)"
        )
    return [_source_of(group, holder, saved) for group in groups]


def _has_names(saved: Sequence[Group]) -> bool:
    return all(_names(group) is not None for group in saved if group["params"])


def _check_positions(saved: Sequence[Group], groups: Sequence[Group]) -> None:
    theirs, ours = ([len(group["params"]) for group in each] for each in (saved, groups))
    if theirs != ours:
        raise ValueError(
            f"the saved optimizer has groups of {theirs} parameters without names, this one of {ours}; make dmuon.Muon "
            f"with the same param_groups, or save with dmuon.get_optimizer_state_dict, which keeps names"
        )


def _source_of(group: Group, holder: Mapping[str, Group], saved: Sequence[Group]) -> Group:
    mine = group["group_name"]
    if not group["params"]:
        return next((each for each in saved if each.get("group_name") == mine), group)
    found: list[Group] = []
    for name in group["param_names"]:
        source = holder.get(name)
        if source is not None and not any(source is each for each in found):
            found.append(source)
    same = [each for each in found if each.get("group_name") == mine]
    if len(found) > 1 and not same:
        raise ValueError(
            f"the parameters of group {mine!r} were in the groups {[each.get('group_name') for each in found]}: make "
            f"dmuon.Muon with the same param_groups"
        )
    source = (same or found or [group])[0]
    if source.get("algorithm", group["algorithm"]) != group["algorithm"]:
        raise ValueError(
            f"group {mine!r} is stepped by {group['algorithm']}, but {group['param_names'][0]!r} was saved from "
            f"{source['algorithm']}: dedicate the same parameters, or load the model alone"
        )
    return source


def _entries(
    state: Mapping[Any, Any], sources: Sequence[Group], saved: Sequence[Group], groups: Sequence[Group]
) -> Iterator[_Entry]:
    keys: dict[str, Any] = {}
    if _has_names(saved):
        keys = {name: key for each in saved for name, key in zip(_names(each) or (), each["params"], strict=True)}
    for source, group in zip(sources, groups, strict=True):
        for index, (name, parameter) in enumerate(zip(group["param_names"], group["params"], strict=True)):
            key = keys.get(name) if keys else source["params"][index]
            yield _Entry(name, parameter, group["algorithm"], state.get(key) or None)


def _complaints(entry: _Entry, rules: StateRules) -> Iterator[str]:
    if entry.saved is None:
        return
    wanted = rules.keys(entry.parameter, entry.algorithm)
    missing = [key for key in wanted if key not in entry.saved]
    extra = [key for key in entry.saved if key not in wanted]
    if missing or extra:
        yield f"{entry.name} has {', '.join(map(repr, entry.saved))} where {', '.join(map(repr, wanted))} belong"
        return
    for key in wanted:
        value = entry.saved[key]
        if isinstance(value, Tensor) and value.is_meta:
            yield f"{key} of {entry.name} is on meta and has no values"
        elif isinstance(value, Tensor) and not _is_plain(local_of(value)):
            yield f"{key} of {entry.name} must be dense and real and have its memory ({value.dtype}, {value.layout})"
        elif key == "step":
            if not _is_count(value):
                yield f"step of {entry.name} is {_shape(value)}, not a number of steps"
        elif not isinstance(value, Tensor) or value.shape != entry.parameter.shape:
            yield f"{key} of {entry.name} is {_shape(value)}, its parameter {tuple(entry.parameter.shape)}"


def _is_plain(local: Tensor) -> bool:
    """Whether it can be copied."""
    if local.layout is not torch.strided or local.is_quantized or local.is_complex():
        return False
    return local.numel() == 0 or local.untyped_storage().nbytes() > 0


def _is_count(value: Any) -> bool:
    """Whether it is one number, finite, not negative, no flag and in float32's range."""
    if isinstance(value, bool) or (isinstance(value, Tensor) and (value.numel() != 1 or value.dtype == torch.bool)):
        return False
    if not isinstance(value, (int, float, Tensor)):
        return False
    try:
        return 0 <= float(value) <= torch.finfo(torch.float32).max
    except OverflowError:
        return False


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, Tensor) else repr(value)


def _options(source: Group, group: Group) -> dict[str, Any]:
    foreign = frozenset().union(*_OPTIONS.values()) - _OPTIONS[group["algorithm"]]
    own = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    taken = {
        key: deepcopy(value)
        for key, value in source.items()
        if key not in _NOT_LOADED and (key in group or key not in foreign)
    }
    return {**own, **taken, "params": list(range(len(group["params"])))}
