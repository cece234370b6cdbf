"""The door: what users call on a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import NoneType
from typing import Any, Literal, get_args

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from dmuon_fsdp.compat import (
    drop_unsharded_gradients,
    gradient_sync_of,
    install_seam,
    reset_iteration,
    set_gradient_sync_of,
    uninstall_seam,
)
from dmuon_fsdp.optim.clipping import Gradients, clip_
from dmuon_fsdp.optim.muon import Muon
from dmuon_fsdp.planning.names import bare
from dmuon_fsdp.planning.options import PlanningOptions
from dmuon_fsdp.planning.plan import OwnershipPlan
from dmuon_fsdp.planning.policy import ParamPolicy, as_policies
from dmuon_fsdp.planning.select import ParamPredicate, select_params
from dmuon_fsdp.runtime import registry
from dmuon_fsdp.runtime.binding import Dedication, Registration
from dmuon_fsdp.runtime.inference import outside_inference_mode
from dmuon_fsdp.runtime.materialize import initialize
from dmuon_fsdp.runtime.parameter import DedicatedParam

ProcessGroupPolicy = Literal["isolated", "shared"]


def dedicate_params(
    model: nn.Module,
    mesh: DeviceMesh,
    predicate: ParamPredicate,
    *,
    replicate_mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | None = None,
    hook_boundary_predicate: Callable[[nn.Module], bool] | None = None,
    hook_boundary_strict: bool = True,
    mp_policy: MixedPrecisionPolicy | None = None,
    param_policy: Sequence[ParamPolicy] | Mapping[str, Any] = (),
    process_group_policy: ProcessGroupPolicy = "isolated",
    planning: PlanningOptions | None = None,
    patch: bool = True,
) -> OwnershipPlan:
    """Give every matrix that ``predicate`` chooses to one owner rank. Call it before ``fully_shard``.

    It records the choice; owners are assigned and parameters handed over at the first ``fully_shard`` of a part of the
    model or at ``dmuon.Muon(model)``, whichever comes first. Values on the owner are the model.

    Args:
        model: unsharded, on any device or meta.
        mesh: the 1-D mesh that ``fully_shard`` gets, over the ranks that share the model; for HSDP its shard dimension.
        predicate: ``predicate(name, param)``; names are those of the unwrapped model.
        replicate_mesh: for HSDP, the replicate dimension of the 2-D mesh that ``fully_shard`` gets. Every rank of every
            replica may own: gradients are reduced within replicas, then over them, and new weights come back.
        reshard_after_forward: free other ranks' weights after forward; None does as the covering ``fully_shard``.
        hook_boundary_predicate: ``predicate(module)``, where to gather and reduce; None: outermost elements of stacks.
        hook_boundary_strict: raise where a predicate of yours gives a parameter no boundary.
        mp_policy: compute, reduce and output dtypes; None does as the covering ``fully_shard``.
        param_policy: routes, matrix views and dtypes by name, a list of :class:`ParamPolicy` of which a later one wins,
            or a mapping with ``defaults`` and ``overrides``.
        process_group_policy: ``"isolated"`` makes a process group of our own, ``"shared"`` uses the mesh's.
        planning: how owners are chosen.
        patch: install the seam into ``fully_shard``. False: give it ``ignored_params=dmuon.ignored_params(model)``.

    Returns:
        The plan: a mapping from names to owners, computed when it is first looked at.

    Raises:
        ValueError: a mesh that is not 1-D, a parameter that cannot be dedicated (again), a policy without a match.
        RuntimeError: the seam does not fit this torch.
    """
    _check_types(model, predicate, reshard_after_forward, planning, mp_policy, process_group_policy)
    _check_meshes(mesh, replicate_mesh)
    policies = as_policies(param_policy)
    known = registry.find(model)
    _refuse_another_root(known, model)
    specs = select_params(model, predicate, hook_boundary_predicate, strict=hook_boundary_strict, policies=policies)
    _refuse_twice(known, [spec.fqn for spec in specs])
    if patch:
        install_patch()
    registration = registry.register(model)
    planning = planning or PlanningOptions()
    dedication = Dedication(
        specs, mesh, replicate_mesh, planning, process_group_policy, mp_policy, reshard_after_forward
    )
    registration.dedications.append(dedication)  # without a match too: another rank may have one, and they compare
    return OwnershipPlan(dedication.assignment, registration.bind)


def _check_types(
    model: object,
    predicate: object,
    reshard_after_forward: object,
    planning: object,
    mp_policy: object,
    process_group_policy: object,
) -> None:
    for name, value, kinds in (
        ("model", model, nn.Module),
        ("reshard_after_forward", reshard_after_forward, (bool, NoneType)),
        ("planning", planning, (PlanningOptions, NoneType)),
        ("mp_policy", mp_policy, (MixedPrecisionPolicy, NoneType)),
    ):
        if not isinstance(value, kinds):
            allowed = [kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,))]
            raise TypeError(f"{name} must be {' or '.join(allowed).replace('NoneType', 'None')}, got {value!r}")
    if not callable(predicate):
        raise TypeError(
            f"predicate must be a function predicate(name, param) -> bool, got {predicate!r}; such as "
            f'lambda name, p: "proj" in name and p.ndim == 2'
        )
    if process_group_policy not in get_args(ProcessGroupPolicy):
        raise ValueError(f"process_group_policy must be 'isolated' or 'shared', got {process_group_policy!r}")


def _check_meshes(mesh: DeviceMesh, replicate_mesh: DeviceMesh | None) -> None:
    _check_mesh("mesh", mesh, 'mesh["shard"]')
    if replicate_mesh is not None:
        _check_mesh("replicate_mesh", replicate_mesh, 'mesh["replicate"]')
        _check_grid(mesh, replicate_mesh)


def _check_mesh(argument: str, mesh: object, remedy: str) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(
            f"{argument} must be a 1-D DeviceMesh, got {mesh!r}; make one with "
            f'torch.distributed.device_mesh.init_device_mesh("cuda", (dist.get_world_size(),))'
        )
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        raise ValueError(
            f"{argument} must be 1-D, got {mesh.ndim} dimensions {tuple(mesh.shape)}"
            f"{f' named {names}' if names else ''}; give the sharding dimension alone, such as "
            f"mesh[{_last_name(mesh)!r}], and for HSDP the other one as replicate_mesh; here {remedy}"
        )
    _check_order(argument, mesh)


def _check_order(argument: str, mesh: DeviceMesh) -> None:
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {dist.get_rank()} is not in the {argument} over ranks {mesh.mesh.tolist()}: call "
            f"dmuon.dedicate_params on the ranks that share the model, with their mesh"
        )
    # Coordinates would not be ranks of the group; torch itself takes now one, now the other.
    in_mesh, in_group = mesh.mesh.tolist(), dist.get_process_group_ranks(mesh.get_group())
    if in_mesh != in_group:
        raise ValueError(
            f"{argument} has its ranks in the order {in_mesh}, their process group in {in_group}; make a mesh whose "
            f"ranks increase, such as init_device_mesh gives"
        )


def _check_grid(mesh: DeviceMesh, replicate_mesh: DeviceMesh) -> None:
    ours, theirs = mesh.mesh.tolist(), replicate_mesh.mesh.tolist()
    if mesh.device_type != replicate_mesh.device_type or set(ours) & set(theirs) != {dist.get_rank()}:
        raise ValueError(
            f"mesh (on {mesh.device_type}, ranks {ours}) and replicate_mesh (on {replicate_mesh.device_type}, ranks "
            f"{theirs}) must be the two dimensions of one mesh, which have this rank ({dist.get_rank()}) in common and "
            f"no other; such as hsdp['shard'] and hsdp['replicate']"
        )


def _last_name(mesh: DeviceMesh) -> str:
    return mesh.mesh_dim_names[-1] if mesh.mesh_dim_names else "shard"


def _refuse_another_root(known: Registration | None, model: nn.Module) -> None:
    if known is not None and bare(known.model) is not bare(model):
        raise ValueError(
            f"dedicate_params was called on a {type(bare(known.model)).__name__} before, and this "
            f"{type(bare(model)).__name__} is a part of it or around it; names are those of one model: call it on the "
            f"same module each time"
        )


def _refuse_twice(known: Registration | None, names: list[str]) -> None:
    if known is None:
        return
    earlier = {name for spec in known.specs for name in (spec.fqn, *spec.aliases)}
    twice = [name for name in names if name in earlier]
    if twice:
        raise ValueError(
            f"dedicated already: {', '.join(map(repr, twice))}; let the predicates of the two dedicate_params calls "
            f"choose different parameters"
        )


def install_patch() -> None:
    """Teach ``fully_shard`` to leave dedicated parameters alone, however it was imported. Idempotent.

    Raises:
        RuntimeError: this torch's FSDP2 does not fit.
    """
    install_seam(registry.FsdpHandler())


def uninstall_patch() -> None:
    """Put torch's own functions back."""
    uninstall_seam()


def registration_of(model: nn.Module) -> Registration:
    """The bound registration of ``model``; ValueError where nothing was dedicated."""
    registration = registry.find(model)
    if registration is None:
        raise ValueError(
            f"this {type(model).__name__} has no dedicated parameters: call dmuon.dedicate_params(model, mesh, "
            f"predicate) first, then fully_shard, then dmuon.Muon"
        )
    registration.bind()
    return registration


def dedicated_params(model: nn.Module) -> list[DedicatedParam]:
    """Every dedicated parameter of ``model``, in its order."""
    return list(registration_of(model).params.values())


def owned_params(model: nn.Module) -> list[DedicatedParam]:
    """Those that this rank owns."""
    return [member for member in dedicated_params(model) if member.is_owner]


def ignored_params(model: nn.Module) -> set[nn.Parameter]:
    """The set for ``fully_shard(ignored_params=...)`` where ``dedicate_params`` was called with ``patch=False``."""
    return {member.param for member in dedicated_params(model)}


def reset(model: nn.Module) -> None:
    """A clean state after an exception in forward or backward, on all ranks: what was not reduced is dropped.

    FSDP2's own state is reset too, with the gradients that it had not reduced.
    """
    registration = registration_of(model)
    registration.state.reset()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            reset_iteration(module)
            drop_unsharded_gradients(module)


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients without communication inside, dedicated and FSDP2's alike. Nests; restores on exception."""
    groups = registration_of(model).state.groups
    before = [(group.reduce_grads, group.all_reduce_grads) for group in groups]
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    theirs = [gradient_sync_of(module) for module in sharded]
    try:
        for group in groups:
            group.reduce_grads = group.all_reduce_grads = False
        for module in sharded:
            set_gradient_sync_of(module, [(False, False)] * len(gradient_sync_of(module)))
        yield
    finally:
        for group, (reduce, all_reduce) in zip(groups, before, strict=True):
            group.reduce_grads, group.all_reduce_grads = reduce, all_reduce
        for module, values in zip(sharded, theirs, strict=True):
            set_gradient_sync_of(module, values)


def clip_grad_norm_(
    model_or_optimizer: nn.Module | Muon,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    buckets: Mapping[str, float] | None = None,
    process_groups: Sequence[ProcessGroup] = (),
) -> Tensor:
    """Clip the gradients of all parameters together: dedicated, FSDP2's and plain ones, on any mesh, in place.

    Call it on all ranks after the step's last backward. A gradient that is divided over ranks, or whole on one, counts
    once; so does one that ranks repeat, by its mean over them where they differ. Gradients within the norm stay as they
    are, bit for bit. What ``unsynchronized="average"`` leaves to the step is averaged here.

    Args:
        model_or_optimizer: a model with dedicated parameters, or its ``dmuon.Muon``.
        max_norm: what the norm may be at most; infinity clips nothing and returns the norm.
        norm_type: the order p of the norm (Σ|g|ᵖ)^(1/p), infinity for the maximum.
        error_if_nonfinite: raise where the norm is not finite; the host waits for it.
        buckets: limits of their own, for their own norms, by ``"muon"``, ``"adamw"``, or with an optimizer the name of
            a group, which goes first. What is in none has ``max_norm``.
        process_groups: further groups to add up over, such as the stages of a pipeline, whose ranks all make the call.

    Returns:
        The norm of all gradients before clipping, 0-dim and fp32, the same number on all ranks; on the device.

    Raises:
        ValueError: a limit or order out of range, a bucket that there is not.
        RuntimeError: gradients accumulated under ``no_sync`` were never reduced, or a norm is not finite.
    """
    if isinstance(model_or_optimizer, Muon):
        gradients = model_or_optimizer._gradients()
    else:
        gradients = _gradients_of(registration_of(model_or_optimizer))
    return clip_(
        gradients,
        max_norm,
        norm_type,
        error_if_nonfinite=error_if_nonfinite,
        buckets=buckets,
        process_groups=process_groups,
    )


def _gradients_of(registration: Registration) -> Gradients:
    averages = [average for optimizer in registration.optimizers for average in optimizer._gradients().averages]
    return Gradients.of_model(registration, [average for average in averages if average.home is registration])


def publish(model: nn.Module) -> None:
    """Make writes outside of ``step()`` visible on all ranks: the values on a parameter's owner are the model.

    Call it on all ranks after writing a dedicated parameter on its owner alone (through ``.local``, or with a
    checkpoint loaded in place). Writes through operators on the parameter itself, ``load_state_dict`` and
    ``init_weights`` are noticed without it, and so is everything where there are no replicas.

    Raises:
        RuntimeError: some ranks did not make this call.
    """
    registration = registration_of(model)
    registration.meet("dmuon.publish(model)")
    registration.rest()
    registration.state.publish()


def wait_for_publish(model: nn.Module) -> None:
    """What follows on the current stream finds the weights of the last step, or of :func:`publish`, on every rank."""
    registration_of(model).state.settle_publishes()


@outside_inference_mode
def init_weights(model: nn.Module, fn: Callable[[nn.Module], None] | None = None) -> None:
    """Initialise a model, from meta or anew, boundary by boundary: all ranks draw the same, the owner keeps the result.

    Args:
        fn: ``fn(module)`` initialises the module's own parameters and buffers; None calls ``reset_parameters``.
    """
    registration = registration_of(model)
    initialize(registration, fn)
    for optimizer in registration.optimizers:
        optimizer.create_state()  # what it could not do for a model on meta
