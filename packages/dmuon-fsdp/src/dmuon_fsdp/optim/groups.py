"""Parameter groups: which parameter goes where, the same on every rank."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dmuon_fsdp.planning.names import named_places
from dmuon_fsdp.runtime.binding import Registration

_MUON_KEYS = ("lr", "weight_decay", "momentum", "nesterov", "ns_steps", "adjust_lr_fn")
_ADAMW_KEYS = ("lr", "weight_decay", "betas", "eps")


@dataclass(frozen=True)
class Entry:
    """A parameter of the model as the optimizer sees it.

    Attributes:
        names: canonical names, more than one where it is shared.
        parameter: at rest.
        algorithm: what steps it.
        dedicated: whether it has an owner.
        home: the model it belongs to.
    """

    names: tuple[str, ...]
    parameter: nn.Parameter
    algorithm: str
    dedicated: bool
    home: Registration


def entries_of(registrations: Sequence[Registration]) -> list[Entry]:
    """Every parameter once, in the order of the models."""
    found: dict[nn.Parameter, tuple[list[str], Registration]] = {}
    dedicated = {member.param: member for registration in registrations for member in registration.params.values()}
    for registration in registrations:
        for name, _, _, parameter in named_places(registration.model):
            names, _ = found.setdefault(parameter, ([], registration))
            names.append(name)
    routes = {parameter: member.route for parameter, member in dedicated.items()}
    return [
        Entry(tuple(names), parameter, routes.get(parameter, "adamw"), parameter in dedicated, home)
        for parameter, (names, home) in found.items()
    ]


def build_groups(
    entries: Sequence[Entry], wanted: Sequence[Mapping[str, Any]] | None, muon: dict[str, Any], adamw: dict[str, Any]
) -> list[dict[str, Any]]:
    """torch's ``param_groups``: ``muon`` and ``adamw``, or ``<group>/muon`` and ``<group>/adamw`` for each wanted one.

    Args:
        wanted: dicts with ``params`` (Parameters, or names in which ``*`` matches anything), ``group_name`` and
            options; ``muon_*`` and ``adamw_*`` forms win over plain ones. The first match wins; the rest go to the
            defaults.

    Raises:
        ValueError: a group without ``params``, a pattern or Parameter that matches nothing, a ``muon_*`` or ``adamw_*``
            option that there is not; named.
    """
    rest = list(entries)
    groups: list[dict[str, Any]] = []
    for index, group in enumerate(wanted or ()):
        name = str(group.get("group_name", f"group{index}"))
        _check_keys(group, name)
        taken = _take(rest, group["params"], name)
        groups += _split(taken, f"{name}/", _options(group, muon, "muon_"), _options(group, adamw, "adamw_"))
    return groups + _split(rest, "", muon, adamw)


def _check_keys(group: Mapping[str, Any], name: str) -> None:
    if "params" not in group:
        raise ValueError(
            f"param_groups: group {name!r} has no 'params'; give it Parameters, or names in which * matches anything"
        )
    allowed = {f"muon_{key}" for key in _MUON_KEYS} | {f"adamw_{key}" for key in _ADAMW_KEYS}
    unknown = [key for key in group if key.startswith(("muon_", "adamw_")) and key not in allowed]
    if unknown:
        raise ValueError(
            f"param_groups: group {name!r} has {', '.join(map(repr, unknown))}; with these prefixes there are "
            f"{', '.join(sorted(allowed))}"
        )


def describe_group(group: Mapping[str, Any]) -> str:
    """A group in one line, without the names of its parameters."""
    algorithm = group["algorithm"]
    foreign = set(_ADAMW_KEYS if algorithm == "muon" else _MUON_KEYS) - set(
        _MUON_KEYS if algorithm == "muon" else _ADAMW_KEYS
    )
    hidden = {"params", "param_names", "group_name", "algorithm", *foreign}
    options = ", ".join(f"{key}={_plain(value)!r}" for key, value in sorted(group.items()) if key not in hidden)
    return f"{group['group_name']}: {algorithm}, {len(group['params'])} parameters, {options}"


def digest_lines(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line a parameter, with its group's options; equal on ranks that agree."""
    lines = []
    for group in groups:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        shown = " ".join(f"{key}={_plain(value)!r}" for key, value in sorted(options.items()))
        lines += [f"{name} {shown}" for name, _ in group["params"]]
    return lines


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _take(rest: list[Entry], selectors: Any, group_name: str) -> list[Entry]:
    chosen = [selectors] if isinstance(selectors, (str, nn.Parameter)) else list(selectors)
    taken: list[Entry] = []
    for selector in chosen:
        matching: list[Entry] = []
        others: list[Entry] = []
        for entry in rest:
            (matching if _matches(entry, selector) else others).append(entry)
        if not matching and not any(_matches(entry, selector) for entry in taken):
            what = selector if isinstance(selector, str) else f"a Parameter of shape {tuple(selector.shape)}"
            raise ValueError(
                f"param_groups: {what!r} of group {group_name!r} matches no parameter of the model that an earlier "
                f"group did not take; names are those of the unwrapped model, * matches anything"
            )
        taken += matching
        rest[:] = others
    return taken


def _matches(entry: Entry, selector: Any) -> bool:
    if isinstance(selector, str):
        return any(fnmatch.fnmatchcase(name, selector) for name in entry.names)
    return entry.parameter is selector


def _options(group: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    keys = _MUON_KEYS if prefix == "muon_" else _ADAMW_KEYS
    options = dict(defaults)
    for key, value in group.items():
        if key in ("params", "group_name") or key.startswith(("muon_", "adamw_")):
            continue
        if key in keys or key not in (*_MUON_KEYS, *_ADAMW_KEYS):
            options[key] = value
    options.update({key[len(prefix) :]: value for key, value in group.items() if key.startswith(prefix)})
    return options


def _split(
    entries: Sequence[Entry], prefix: str, muon: Mapping[str, Any], adamw: Mapping[str, Any]
) -> list[dict[str, Any]]:
    groups = []
    for algorithm, options in (("muon", muon), ("adamw", adamw)):
        members = [(entry.names[0], entry.parameter) for entry in entries if entry.algorithm == algorithm]
        if members:
            named = {"params": members, "group_name": f"{prefix}{algorithm}", "algorithm": algorithm}
            groups.append({**options, **named})
    return groups
