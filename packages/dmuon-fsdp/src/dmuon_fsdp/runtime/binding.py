"""From a recorded choice to a model at work: plan, agree over ranks, give parameters to owners, attach hooks.

Binding is late: ``dedicate_params`` records; the first ``fully_shard`` of a part of the model, or ``dmuon.Muon``,
binds, so that whatever wraps the model in between (checkpoint wrappers, compile, ``to``) has its say first. Names,
not tensors, identify parameters.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from dmuon_fsdp.comm.agree import agree_on, gather, meet
from dmuon_fsdp.comm.groups import Ranks, make_ranks
from dmuon_fsdp.compat import Cover, grid_mesh
from dmuon_fsdp.planning.names import canonical, named_places, unwrap_data_parallel
from dmuon_fsdp.planning.options import PlanningOptions
from dmuon_fsdp.planning.plan import Assignment, Owner, ParamSpec
from dmuon_fsdp.runtime.group import Group, Policy
from dmuon_fsdp.runtime.model_state import ModelState
from dmuon_fsdp.runtime.owned_tensor import OwnedTensor
from dmuon_fsdp.runtime.parameter import DedicatedParam, Place
from dmuon_fsdp.runtime.traffic import Traffic

_log = logging.getLogger("dmuon.planning")
_NOTABLE_IMBALANCE = 1.05


_SETTING_UP = "setting up dedicated parameters (the first fully_shard, dmuon.Muon or plan.bind())"


@dataclass
class Dedication:
    """One call of ``dedicate_params``.

    Attributes:
        specs: the chosen parameters.
        mesh: the shard mesh.
        replicate_mesh: over the replicas, or None.
        options: how owners are chosen.
        process_group_policy: "isolated" or "shared".
        mp_policy: the user's own; None inherits.
        reshard_after_forward: the user's own; None inherits.
        ranks: the process groups; once it is bound.
        home_mesh: the mesh that the parameters at rest are on, FSDP2's; once it is bound.
    """

    specs: tuple[ParamSpec, ...]
    mesh: DeviceMesh
    replicate_mesh: DeviceMesh | None
    options: PlanningOptions
    process_group_policy: str
    mp_policy: MixedPrecisionPolicy | None
    reshard_after_forward: bool | None
    ranks: Ranks | None = None
    home_mesh: DeviceMesh | None = None
    _assignment: Assignment | None = field(default=None, repr=False)

    def assignment(self) -> Assignment:
        """The plan, made at the first call; no communication."""
        if self._assignment is None:
            replicas = 1 if self.replicate_mesh is None else self.replicate_mesh.size()
            self._assignment = Assignment.of(self.specs, self.mesh.size(), self.options, replicas=replicas)
        return self._assignment

    def agree(self) -> None:
        """Raise on all ranks alike unless all were told the same; before they make a group of our own together."""
        options = (
            f"process_group_policy={self.process_group_policy!r} mp_policy={self.mp_policy} "
            f"reshard_after_forward={self.reshard_after_forward}"
        )
        plan = self.assignment()
        agree_on(f"{plan.digest()} {options}", [*plan.lines(), options], self.groups, what="what is dedicated and how")

    @property
    def groups(self) -> list[ProcessGroup]:
        """The user's own, which one after the other reach every rank that shares the model."""
        meshes = [self.mesh] if self.replicate_mesh is None else [self.mesh, self.replicate_mesh]
        return [mesh.get_group() for mesh in meshes]


class Registration:
    """What DMuon knows of one model, from the first ``dedicate_params`` on. Held by the model, holds it weakly."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self.dedications: list[Dedication] = []
        self.params: dict[str, DedicatedParam] = {}
        self.state = ModelState()
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.covers: weakref.WeakKeyDictionary[nn.Module, Cover] = weakref.WeakKeyDictionary()
        self._outer: tuple[weakref.ref[nn.Module], Cover] | None = None
        self._covering: dict[str, tuple[nn.Module, Cover] | None] | None = None
        self._modules: dict[str, nn.Module] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Registration:
        raise ValueError(
            "a model with dedicated parameters cannot be copied with copy.deepcopy; copy it before "
            "dmuon.dedicate_params, or build a second one and load the first one's state dict"
        )

    @property
    def model(self) -> nn.Module:
        model = self._model()
        assert model is not None, "the model holds this object"
        return model

    @property
    def specs(self) -> Iterator[ParamSpec]:
        return (spec for dedication in self.dedications for spec in dedication.specs)

    @property
    def ranks(self) -> Ranks:
        """Those that share the model; once it is bound."""
        ranks = self.dedications[0].ranks
        assert ranks is not None, "bound"
        return ranks

    def bind(self) -> None:
        """Put every recorded choice to work; nothing to do where that is done. On all ranks alike."""
        for dedication in self.dedications:
            if dedication.ranks is None:
                self._bind(dedication)

    def meet(self, call: str) -> None:
        """Wait for every rank that shares the model to make this call."""
        for dedication in self.dedications:
            meet(call, dedication.groups, dedication.mesh.device_type)

    def rest(self) -> None:
        """The modules hold the Parameters at rest again, FSDP2's (its root keeps its own after forward) and ours."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        self.state.rest()
        for member in self.params.values():
            member.adopt_replacement()

    def _bind(self, dedication: Dedication) -> None:
        self._covering = None
        plan = dedication.assignment()
        meet(_SETTING_UP, dedication.groups, dedication.mesh.device_type)
        dedication.agree()
        ranks = make_ranks(dedication.mesh, dedication.replicate_mesh, dedication.process_group_policy)
        dedication.home_mesh = _home_mesh(dedication, ranks)
        dedication.ranks = ranks
        if not plan.specs:
            return
        if ranks.is_first:
            warn_about_imbalance(plan)
        traffic = Traffic(ranks, device_of(dedication.mesh))
        if not self.state.traffics:
            self.state.attach_root(self.model)
        self.state.traffics.append(traffic)
        self._give_to_owners(dedication, plan, traffic.device)
        for specs in plan.groups().values():
            cast = len({spec.treatment.param_dtype for spec in specs}) == 1
            for part in of_equal_dtypes(specs):
                members = [self.params[spec.fqn] for spec in part]
                self._attach(members, traffic, _Wanted.of(dedication, specs, part[0], cast=cast))

    def _give_to_owners(self, dedication: Dedication, plan: Assignment, device: torch.device) -> None:
        places: dict[str, list[Place]] = {}
        found: dict[str, nn.Parameter] = {}
        for name, module, attribute, parameter in named_places(self.model):
            places.setdefault(name, []).append(Place(module, attribute))
            found.setdefault(name, parameter)
        for spec in plan.specs:
            _check_unchanged(spec, found.get(spec.fqn))
        for spec in plan.specs:
            owner = plan.owners[spec.fqn]
            resting = _to_rest(found[spec.fqn], spec.fqn, _mesh_of(dedication), owner, device)
            everywhere = [place for name in (spec.fqn, *spec.aliases) for place in places[name]]
            member = DedicatedParam(spec, owner, tuple(everywhere), resting)
            member.show(resting)
            self.params[spec.fqn] = member

    def _attach(self, members: Sequence[DedicatedParam], traffic: Traffic, wanted: _Wanted) -> None:
        boundary = members[0].spec.boundary
        module = self.module_at(boundary)
        group = Group(boundary, members, traffic, lambda: self._policy(boundary, wanted))
        if is_headless(module):
            self.state.attach(group, list(_called_children(module)), module)
        else:
            self.state.attach(group, [module], None)

    def module_at(self, boundary: str) -> nn.Module:
        """The outermost module with that canonical name: hooks go around checkpoint and compile wrappers."""
        if boundary not in self._modules:
            self._modules = modules_by_name(self.model)
        return self._modules[boundary]

    def note_cover(self, module: nn.Module, cover: Cover) -> None:
        """``fully_shard`` was called on ``module``: a part of the model, or something around it."""
        if self.optimizers:
            raise ValueError(
                f"fully_shard({type(module).__name__}) after dmuon.Muon(model): the optimizer would go on with "
                f"parameters that are no longer the model's; the order is dedicate_params, fully_shard, Muon"
            )
        if module in set(self.model.modules()):
            self.covers[module] = cover
        else:
            self._outer = weakref.ref(module), cover
        self._covering = None
        for dedication in self.dedications:
            for boundary, specs in dedication.assignment().groups().items():
                found = self.covering(boundary)
                if found is not None and found[0] is module:
                    self._check_cover(boundary, specs, dedication, *found)

    def covering(self, boundary: str) -> tuple[nn.Module, Cover] | None:
        """The innermost ``fully_shard`` call around a boundary."""
        if self._covering is None:
            self._covering = self._find_covers()
        return self._covering[boundary]

    def _find_covers(self) -> dict[str, tuple[nn.Module, Cover] | None]:
        """For all boundaries in one walk: this runs again after every ``fully_shard`` of a stack."""
        covered: dict[str, tuple[nn.Module, Cover]] = {}
        for name, module in unwrap_data_parallel(self.model).named_modules():
            if module in self.covers:
                covered[canonical(name)] = module, self.covers[module]  # of several with one name the innermost
        outer = self._outer and self._outer[0]()
        around = None if outer is None or self._outer is None else (outer, self._outer[1])
        boundaries = {spec.boundary for spec in self.specs}
        return {
            boundary: next((covered[name] for name in _ancestors(boundary) if name in covered), around)
            for boundary in boundaries
        }

    def _policy(self, boundary: str, wanted: _Wanted) -> Policy:
        found = self.covering(boundary)
        mp_policy = wanted.mp_policy or MixedPrecisionPolicy()
        reshard = wanted.reshard_after_forward
        if found is not None:
            module, cover = found
            mp_policy = wanted.mp_policy or cover.mp_policy
            if reshard is None:
                # FSDP2 keeps the weights of its root, which the backward needs first and which are few.
                kept = cover.automatic and self._is_root(module) and not self._holds_covers(boundary)
                reshard = cover.reshard_after_forward and not kept
        param_dtype = wanted.param_dtype or mp_policy.param_dtype
        return Policy(
            param_dtype,
            wanted.reduce_dtype or mp_policy.reduce_dtype,
            True if reshard is None else reshard,
            param_dtype if wanted.casts_inputs else None,
            wanted.output_dtype,
        )

    def _is_root(self, module: nn.Module) -> bool:
        return module is unwrap_data_parallel(self.model)

    def _holds_covers(self, boundary: str) -> bool:
        """Whether ``fully_shard`` was called on parts of a boundary, as on the blocks of a stage."""
        own = self.module_at(boundary)
        return not self._is_root(own) and any(part in self.covers for part in own.modules() if part is not own)

    def _check_cover(
        self, boundary: str, specs: Sequence[ParamSpec], dedication: Dedication, module: nn.Module, cover: Cover
    ) -> None:
        if isinstance(cover.offload_policy, CPUOffloadPolicy):
            raise ValueError(
                f"{boundary!r} is under a fully_shard with CPUOffloadPolicy, which dedicated parameters do not support "
                f"yet: use OffloadPolicy() there, or leave its parameters out of the predicate"
            )
        # A dimension of size 1 is as good as none.
        theirs, ours = cover.mesh.mesh.squeeze().tolist(), _mesh_of(dedication).mesh.squeeze().tolist()
        if theirs != ours:
            raise ValueError(
                f"{boundary!r}: fully_shard was given a mesh over ranks {theirs}, dedicate_params one over {ours}; "
                f"give both the same: a 1-D mesh, or for HSDP fully_shard(mesh=hsdp) and dedicate_params(model, "
                f"hsdp['shard'], predicate, replicate_mesh=hsdp['replicate']), where hsdp is init_device_mesh("
                f"{cover.mesh.device_type!r}, (replicas, shards), mesh_dim_names=('replicate', 'shard'))"
            )
        wanted = dedication.mp_policy
        if wanted is not None and wanted.param_dtype != cover.mp_policy.param_dtype:
            raise ValueError(
                f"{boundary!r}: dedicate_params has mp_policy.param_dtype={wanted.param_dtype}, its fully_shard "
                f"{cover.mp_policy.param_dtype}; what enters a module has one dtype: make them equal"
            )
        ours_out = {_Wanted.of(dedication, [spec], spec, cast=False).output_dtype for spec in specs}
        theirs_out = cover.mp_policy.output_dtype
        if module is self.module_at(boundary) and theirs_out is not None and ours_out - {None, theirs_out}:
            raise ValueError(
                f"{boundary!r}: dedicate_params has an output dtype of {(ours_out - {None, theirs_out}).pop()}, its "
                f"fully_shard {theirs_out}; give one of them"
            )


@dataclass(frozen=True)
class _Wanted:
    """What ``dedicate_params`` was told of some parameters of one boundary; None leaves it to the covering call.

    Attributes:
        mp_policy, reshard_after_forward: of the call.
        param_dtype, reduce_dtype: by name.
        output_dtype: of the boundary, by name or of the call.
        casts_inputs: what enters the boundary is cast to the compute dtype here, since it was given here and holds for
            the whole boundary. Where only some of its parameters have a dtype of their own, the module casts for them.
    """

    mp_policy: MixedPrecisionPolicy | None
    reshard_after_forward: bool | None
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    output_dtype: torch.dtype | None
    casts_inputs: bool

    @classmethod
    def of(cls, dedication: Dedication, specs: Sequence[ParamSpec], one: ParamSpec, *, cast: bool) -> _Wanted:
        """Of the parameters that have the dtypes of ``one``, at the boundary of all ``specs``."""
        mp_policy, own = dedication.mp_policy, one.treatment
        by_name = next((s.treatment.output_dtype for s in specs if s.treatment.output_dtype is not None), None)
        return cls(
            mp_policy,
            dedication.reshard_after_forward,
            own.param_dtype,
            own.reduce_dtype,
            by_name or (None if mp_policy is None else mp_policy.output_dtype),
            cast and (own.param_dtype is not None or (mp_policy is not None and mp_policy.cast_forward_inputs)),
        )


def of_equal_dtypes(specs: Sequence[ParamSpec]) -> list[list[ParamSpec]]:
    """Parts whose parameters can share a bucket."""
    parts: dict[tuple[torch.dtype | None, ...], list[ParamSpec]] = {}
    for spec in specs:
        wanted = spec.treatment
        # The boundary's compute dtype, not known yet, takes the place of a parameter's own; a dtype by name does not.
        own = spec.dtype if wanted.param_dtype is None else None
        parts.setdefault((wanted.param_dtype, own, wanted.reduce_dtype), []).append(spec)
    return list(parts.values())


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """Modules by canonical name, of several with one name the outermost."""
    found: dict[str, nn.Module] = {}
    for name, module in unwrap_data_parallel(model).named_modules():
        found.setdefault(canonical(name), module)
    return found


def _ancestors(name: str) -> Iterator[str]:
    """The name itself, then every module above it, the root last."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def _check_unchanged(spec: ParamSpec, parameter: nn.Parameter | None) -> None:
    """What was chosen is still there, whole, when it is to be given to its owner."""
    if parameter is None:
        raise ValueError(
            f"{spec.fqn!r} is dedicated but the model has no such parameter any more: change the model first, then "
            f"call dmuon.dedicate_params"
        )
    if isinstance(parameter, DTensor):
        raise ValueError(
            f"{spec.fqn!r} is dedicated, but fully_shard has sharded it: with patch=False call "
            f"fully_shard(module, ignored_params=dmuon.ignored_params(model)) on every module"
        )
    if tuple(parameter.shape) != spec.shape:
        raise ValueError(
            f"{spec.fqn!r} had shape {spec.shape} at dmuon.dedicate_params and has {tuple(parameter.shape)} now: "
            f"change the model first"
        )


def warn_about_imbalance(plan: Assignment) -> None:
    if plan.imbalance > _NOTABLE_IMBALANCE:
        _log.warning(
            "the most loaded of %d ranks has %.0f %% more Newton-Schulz work than the mean: %d matrices of these sizes "
            "divide no better; see plan.describe()",
            plan.ranks,
            100 * (plan.imbalance - 1),
            len(plan.specs),
        )


def is_headless(module: nn.Module) -> bool:
    """A container without a forward: no hook of its own ever fires."""
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward


def _called_children(container: nn.Module) -> Iterator[nn.Module]:
    """What is called in place of a container without a forward, where it has parameters."""
    for child in container.children():
        if is_headless(child):
            yield from _called_children(child)
        elif any(True for _ in child.parameters()):
            yield child


def device_of(mesh: DeviceMesh) -> torch.device:
    """Where the mesh's tensors live on this rank."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


def _mesh_of(dedication: Dedication) -> DeviceMesh:
    assert dedication.home_mesh is not None, "bound"
    return dedication.home_mesh


def _home_mesh(dedication: Dedication, ranks: Ranks) -> DeviceMesh:
    """The mesh that ``fully_shard`` gets. A rank knows its own row and column of it; asking them gives the rest."""
    if dedication.replicate_mesh is None:
        return dedication.mesh
    groups = dedication.groups
    grid = gather(dist.get_rank(), groups)
    agree_on(str(grid), [f"rank {rank} of the mesh {grid}" for rank in grid], groups, what="the mesh")
    return grid_mesh(dedication.replicate_mesh, dedication.mesh, torch.tensor(grid).view(-1, ranks.shards))


def _to_rest(parameter: nn.Parameter, name: str, mesh: DeviceMesh, owner: Owner, device: torch.device) -> nn.Parameter:
    if parameter.device.type == "meta":
        device = parameter.device
    rank = int(mesh.mesh[owner.shard] if mesh.ndim == 1 else mesh.mesh[owner.replicate, owner.shard])
    mine = rank == dist.get_rank()
    local = parameter.detach().to(device) if mine else None
    owned = OwnedTensor.wrap(
        local, shape=parameter.shape, dtype=parameter.dtype, device=device, mesh=mesh, owner=rank, name=name
    )
    resting = nn.Parameter(owned, requires_grad=parameter.requires_grad)
    resting.__dict__.update({key: value for key, value in parameter.__dict__.items() if key != "home"})
    return resting
