"""What is asked of parameters by name: routes, matrix views and dtypes, as frozen values.

Policies come in order and a later one wins, field by field. The mapping form is a public predecessor's: ``defaults``
for all, then ``overrides``, each with the pieces of names that it is about and the fields that it sets.
"""

from __future__ import annotations

import fnmatch
import glob
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

import torch

from dmuon_core.views import MatrixView

Route = Literal["muon", "adamw", "sharded_adamw"]
ROUTES: tuple[str, ...] = get_args(Route)

_DTYPE_FIELDS = ("param_dtype", "reduce_dtype", "output_dtype", "master_dtype")
_DTYPE_NAMES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class ParamPolicy:
    """How the dedicated parameters whose names match are treated; a field left at None changes nothing.

    Attributes:
        match: the name in the unwrapped model, or a glob (``*.experts.*``); one of several names of a shared parameter
            is enough.
        route: ``"muon"``, the default; ``"adamw"``, updated by its owner too; ``"sharded_adamw"``, left to
            ``fully_shard`` although the predicate chose it.
        view: how it is read as matrices, a :class:`MatrixView` or its text, such as ``"batched"`` for ``[E, m, n]``.
        param_dtype: what it computes in; None as the mixed precision policy of its boundary.
        reduce_dtype: what its gradient is reduced in; None likewise.
        output_dtype: what its boundary returns floating-point outputs in; None leaves them.
        master_dtype: what the optimizer keeps and updates it in, in its state; None, or the parameter's own dtype,
            updates the parameter itself.

    Raises:
        ValueError: an unknown route or view, a dtype that is not floating point.
    """

    match: str
    route: Route | None = None
    view: MatrixView | str | None = None
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    master_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.match, str):
            raise ValueError(f"ParamPolicy.match must be a name or a glob, got {self.match!r}")
        if self.route is not None and self.route not in ROUTES:
            raise ValueError(f"ParamPolicy({self.match!r}).route must be one of {ROUTES}, got {self.route!r}")
        if self.view is not None:
            object.__setattr__(self, "view", MatrixView.parse(self.view))
        for name in _DTYPE_FIELDS:
            value = getattr(self, name)
            if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
                raise ValueError(f"ParamPolicy({self.match!r}).{name} must be a floating torch.dtype, got {value!r}")

    @property
    def patterns(self) -> tuple[str, ...]:
        """Globs, one of which must match."""
        return (self.match,)

    @property
    def is_default(self) -> bool:
        """About all parameters, whatever their route makes of it."""
        return False


@dataclass(frozen=True)
class _Default(ParamPolicy):
    """What the mapping form sets for all parameters; it need not match any."""

    match: str = "*"

    @property
    def is_default(self) -> bool:
        return True


@dataclass(frozen=True)
class _Pieces(ParamPolicy):
    """An override of the mapping form, about names that contain one of some pieces."""

    match: str = "*"
    pieces: tuple[str, ...] = ()

    @property
    def patterns(self) -> tuple[str, ...]:
        return tuple(f"*{glob.escape(piece)}*" for piece in self.pieces)


@dataclass(frozen=True)
class Treatment:
    """What policies make of one parameter; see :class:`ParamPolicy`.

    Attributes:
        view: None where no policy gives one.
        dtypes_from: the policy that set a dtype last, defaults apart; None where none did.
    """

    route: Route = "muon"
    view: MatrixView | None = None
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    master_dtype: torch.dtype | None = None
    dtypes_from: str | None = field(default=None, compare=False)

    def under(self, policy: ParamPolicy) -> Treatment:
        """This with what ``policy`` sets."""
        values = {name: getattr(policy, name) for name in ("route", "view", *_DTYPE_FIELDS)}
        given = {name: value for name, value in values.items() if value is not None}
        if not policy.is_default and any(name in given for name in _DTYPE_FIELDS):
            given["dtypes_from"] = ", ".join(policy.patterns)
        return replace(self, **given)

    def __str__(self) -> str:
        return " ".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self) if f.compare)


def treat(policies: Sequence[ParamPolicy], names: Iterable[Sequence[str]]) -> list[Treatment]:
    """What the policies make of every parameter, each given by all its names.

    Raises:
        ValueError: a policy that matches none of them, named.
    """
    parameters = [tuple(each) for each in names]
    treatments = [Treatment()] * len(parameters)
    for policy in policies:
        matching = [i for i, each in enumerate(parameters) if _matches(policy, each)]
        if not matching and not policy.is_default:
            raise ValueError(
                f"param_policy: {' or '.join(map(repr, policy.patterns))} matches no parameter that the predicate "
                f"chooses; names are those of the unwrapped model, * matches anything, and the predicate must choose "
                f"what a policy is about"
            )
        for i in matching:
            treatments[i] = treatments[i].under(policy)
    return treatments


def _matches(policy: ParamPolicy, names: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in policy.patterns)


def as_policies(given: Sequence[ParamPolicy] | Mapping[str, Any] | None) -> tuple[ParamPolicy, ...]:
    """The policies in order, from a sequence of them or from the mapping form.

    Raises:
        ValueError: an unknown field, or a value that a field cannot have; named.
        TypeError: something else.
    """
    if given is None:
        return ()
    if isinstance(given, Mapping):
        return _from_mapping(given)
    policies = (given,) if isinstance(given, ParamPolicy) else tuple(given)
    for policy in policies:
        if not isinstance(policy, ParamPolicy):
            raise TypeError(
                f"param_policy must be a list of dmuon.ParamPolicy, or a mapping with 'defaults' and 'overrides'; got "
                f"{policy!r} in it"
            )
    return policies


def _from_mapping(given: Mapping[str, Any]) -> tuple[ParamPolicy, ...]:
    _only(given, ("defaults", "overrides"), "param_policy")
    policies: list[ParamPolicy] = []
    if given.get("defaults"):
        policies.append(_Default(**_fields(given["defaults"], "param_policy['defaults']")))
    for index, override in enumerate(given.get("overrides") or ()):
        where = f"param_policy['overrides'][{index}]"
        _only(override, ("name", "contains", "set"), where)
        pieces = override["name"] if "name" in override else override.get("contains")
        if not pieces or "set" not in override or ("name" in override and "contains" in override):
            raise ValueError(f"{where} must have 'name' or 'contains' (pieces of names) and 'set', got {override!r}")
        named = (pieces,) if isinstance(pieces, str) else tuple(pieces)
        policies.append(_Pieces(pieces=named, **_fields(override["set"], f"{where}['set']")))
    return tuple(policies)


def _fields(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    known = ("route", "view", *_DTYPE_FIELDS, "grad_dtype", "optim_dtype", "cast_forward_inputs")
    _only(given, known, where)
    # Two fields of the predecessor whose other values have no meaning here.
    if _dtype(given.get("optim_dtype")) not in (None, torch.float32):
        raise ValueError(f"{where}['optim_dtype'] can be fp32 alone: give dmuon.Muon momentum_dtype instead")
    if given.get("cast_forward_inputs", True) is not True:
        raise ValueError(f"{where}['cast_forward_inputs'] can be True alone: leave param_dtype out to cast nothing")
    values = {name: given[name] for name in ("route", "view", *_DTYPE_FIELDS) if name in given}
    if given.get("grad_dtype") is not None:
        values["reduce_dtype"] = given["grad_dtype"]
    return {name: _dtype(value) if name in _DTYPE_FIELDS else value for name, value in values.items()}


def _dtype(value: Any) -> Any:
    return _DTYPE_NAMES.get(value.removeprefix("torch."), value) if isinstance(value, str) else value


def _only(given: object, known: Sequence[str], where: str) -> None:
    if not isinstance(given, Mapping):
        raise TypeError(f"{where} must be a mapping with {', '.join(map(repr, known))}, got {given!r}")
    unknown = [key for key in given if key not in known]
    if unknown:
        raise ValueError(f"{where} has {', '.join(map(repr, unknown))}; there are {', '.join(map(repr, known))}")
