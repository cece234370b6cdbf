"""From a model and a predicate to specs, with every refusal that can be made before a rank talks to another."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dmuon_fsdp.planning.boundaries import (
    BoundaryPredicate,
    boundary_of,
    find_boundaries,
    is_out_of_reach,
    without_forward,
)
from dmuon_fsdp.planning.names import named_places
from dmuon_fsdp.planning.plan import ParamSpec
from dmuon_fsdp.planning.policy import ParamPolicy, Treatment, treat

ParamPredicate = Callable[[str, nn.Parameter], bool]


@dataclass
class _Candidate:
    parameter: nn.Parameter
    names: list[str] = field(default_factory=list)
    chosen: list[bool] = field(default_factory=list)


def select_params(
    model: nn.Module,
    predicate: ParamPredicate,
    boundary_predicate: BoundaryPredicate | None,
    *,
    strict: bool,
    policies: Sequence[ParamPolicy] = (),
) -> tuple[ParamSpec, ...]:
    """The parameters that ``predicate`` chooses, in the order of the model, a shared one once.

    Those whose route leaves them to ``fully_shard`` are not among them.

    Raises:
        ValueError: a parameter that cannot be dedicated or not be treated as its policies say, one that has no boundary
            under a strict predicate, or a policy that matches nothing; named.
    """
    candidates = _ask(model, predicate)
    chosen = [candidate for candidate in candidates if any(candidate.chosen)]
    if not chosen:
        _warn_about_no_match(candidates)
    treatments = treat(policies, [candidate.names for candidate in chosen])
    for candidate, treatment in zip(chosen, treatments, strict=True):
        if treatment.route != "sharded_adamw":
            _refuse(candidate.names[0], candidate.parameter)
        _refuse_treatment(candidate.names[0], candidate.parameter, treatment)
    boundaries, silent = find_boundaries(model, boundary_predicate), without_forward(model)
    strict = strict and boundary_predicate is not None
    specs = tuple(
        _spec(candidate, treatment, boundaries, silent, strict=strict)
        for candidate, treatment in zip(chosen, treatments, strict=True)
        if treatment.route != "sharded_adamw"
    )
    _refuse_two_outputs(specs)
    return specs


def _ask(model: nn.Module, predicate: ParamPredicate) -> list[_Candidate]:
    by_id: dict[int, _Candidate] = {}
    for name, _, _, parameter in named_places(model):
        candidate = by_id.setdefault(id(parameter), _Candidate(parameter))
        candidate.names.append(name)
        candidate.chosen.append(bool(predicate(name, parameter)))
    return list(by_id.values())


def _spec(
    candidate: _Candidate, treatment: Treatment, boundaries: set[str], silent: set[str], *, strict: bool
) -> ParamSpec:
    first, *rest = candidate.names
    boundary = boundary_of(candidate.names, boundaries, strict=strict, silent=silent)
    if boundary is None:
        path = first.split(".")[:-1]
        above = [".".join(path[: i + 1]) for i in range(len(path))]
        raise ValueError(
            f"no hook boundary for {first!r}: hook_boundary_predicate holds for none of the modules on its path, "
            f"{above}; make it hold for one of them, or pass hook_boundary_strict=False to take {'.'.join(path)!r}"
        )
    if any(is_out_of_reach(name, boundary, silent) for name in candidate.names):
        raise ValueError(
            f"{first!r} is read from outside of its boundary {boundary!r}, which has no forward of its own for hooks: "
            f"give that a forward, put the parameter into a module that has one, or leave it out of the predicate"
        )
    parameter = candidate.parameter
    return ParamSpec(first, tuple(rest), tuple(parameter.shape), parameter.dtype, boundary, treatment)


def _refuse(name: str, parameter: Tensor) -> None:
    kind = type(parameter.data)
    if kind.__name__ == "OwnedTensor":
        raise ValueError(f"{name!r} is dedicated already: one call of dmuon.dedicate_params per parameter")
    if kind.__name__ == "DTensor":
        raise ValueError(
            f"{name!r} is sharded already: call dmuon.dedicate_params before fully_shard; tensor-parallel parameters "
            f"cannot be dedicated yet"
        )
    if kind is not Tensor:
        raise ValueError(
            f"{name!r} is a {kind.__name__}; a dedicated parameter must be a plain tensor: leave it "
            f"out of the predicate"
        )
    if parameter.layout != torch.strided or not parameter.dtype.is_floating_point:
        raise ValueError(
            f"{name!r} is {parameter.dtype}, {parameter.layout}; a dedicated parameter must be dense and real floating "
            f"point: leave it out of the predicate"
        )
    if parameter.ndim == 0:
        raise ValueError(f"{name!r} has no dimensions, there is no row to own: leave it out of the predicate")


def _refuse_treatment(name: str, parameter: Tensor, treatment: Treatment) -> None:
    shape, route, view = tuple(parameter.shape), treatment.route, treatment.view
    if route == "muon" and view is None and len(shape) != 2:
        raise ValueError(
            f"{name!r} has shape {shape}; Muon takes matrices: add `and param.ndim == 2` to the predicate, or say with "
            f"param_policy=[dmuon.ParamPolicy({name!r}, view=...)] how it is read as matrices ('batched' for a stack, "
            f"'flattened' for a convolution), or give it route='adamw'"
        )
    if route == "muon" and view is not None:
        view.check(shape, repr(name))
    elif view is not None:
        raise ValueError(f"{name!r} has view={str(view)!r} and route={route!r}, which reads no matrices: drop one")
    if route == "sharded_adamw" and treatment.dtypes_from is not None:
        raise ValueError(
            f"{name!r} is left to fully_shard by route='sharded_adamw', so the mp_policy of fully_shard decides its "
            f"dtypes: drop those of the policy for {treatment.dtypes_from!r}"
        )
    master = treatment.master_dtype
    if master is not None and torch.promote_types(master, parameter.dtype) != master:
        raise ValueError(
            f"{name!r} is {parameter.dtype} and cannot have a master in {master}, which holds less: take a wider one"
        )


def _refuse_two_outputs(specs: Sequence[ParamSpec]) -> None:
    wanted: dict[str, ParamSpec] = {}
    for spec in specs:
        if spec.treatment.output_dtype is not None:
            first = wanted.setdefault(spec.boundary, spec)
            if first.treatment.output_dtype != spec.treatment.output_dtype:
                raise ValueError(
                    f"param_policy: {first.fqn!r} has output_dtype={first.treatment.output_dtype}, {spec.fqn!r} "
                    f"{spec.treatment.output_dtype}; their boundary {spec.boundary!r} has one output: make them equal"
                )


def _warn_about_no_match(candidates: list[_Candidate]) -> None:
    matrices = [candidate.names[0] for candidate in candidates if candidate.parameter.ndim == 2]
    shown = ", ".join(matrices[:20]) + (", …" if len(matrices) > 20 else "")
    warnings.warn(
        f"dmuon.dedicate_params: the predicate matches no parameter, so nothing is dedicated; the model's 2-D "
        f"parameters are: {shown or 'none'}",
        UserWarning,
        stacklevel=4,
    )
