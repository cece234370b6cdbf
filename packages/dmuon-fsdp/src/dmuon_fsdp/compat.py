"""Every private name of torch that this package uses, and the only file that may import one.

Each section says what is missing from the public surface. Whatever a section offers is a function or class of ours,
so that a change in torch is answered here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = [
    "AUTOGRAD_KEEPS_SUBCLASSES",
    "Cover",
    "RoutedDTensor",
    "SeamHandler",
    "SeatedShard",
    "at_end_of_backward",
    "build_dtensor",
    "build_like",
    "coalescing",
    "contiguous_strides",
    "copy_all",
    "default_store",
    "divide_all",
    "fsdp_controls",
    "get_parameter",
    "grid_mesh",
    "group_timeout",
    "in_backward",
    "install_seam",
    "is_alone",
    "local_tensor",
    "plain_dtensor",
    "preserving_versions",
    "put_parameter",
    "run_post_accumulate_hooks",
    "seam_complaint",
    "shard_extent",
    "tensors_with_grad",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "uninstall_seam",
]

# --- DTensor internals
#
# - DTensorSpec, TensorMeta and DTensor.__new__: `DTensor.from_local` returns a plain DTensor, there is no public
#   constructor of a subclass.
# - `_local_tensor`, `_spec`: `to_local()` is an autograd function and returns a new tensor each time; the at-rest
#   tensor itself is needed for its version counter, its address, and to write into it.
# - compute_local_shape_and_global_offset: where a shard lies in the whole tensor; DCP asks it, so we ask the same.
# - `_concatenate`, `_get_root_mesh`, and what `from_group` sets: HSDP's mesh from its two dimensions, with or without
#   names.
# - tree_leaves, tree_map: the arguments of an operator are lists of lists; `torch.utils.pytree` is not in 2.11.

D = TypeVar("D", bound=DTensor)


def build_dtensor(
    cls: type[D], local: Tensor, *, shape: torch.Size, mesh: DeviceMesh, placements: Sequence[Placement]
) -> D:
    """Return a ``cls`` of this global shape around ``local``, which may have any number of rows."""
    meta = TensorMeta(shape, contiguous_strides(shape), local.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    return DTensor.__new__(cls, local, spec, requires_grad=False)  # type: ignore[return-value]


def build_like(cls: type[D], template: DTensor, local: Tensor) -> D:
    """A ``cls`` around ``local`` with the very spec of ``template``, which must describe it; spares making one."""
    return DTensor.__new__(cls, local, template._spec, requires_grad=False)  # type: ignore[return-value]


def local_tensor(dtensor: DTensor) -> Tensor:
    """The tensor that a DTensor holds on this rank, itself and without autograd."""
    return dtensor._local_tensor


def plain_dtensor(dtensor: DTensor, local: Tensor | None = None) -> DTensor:
    """A DTensor of exactly that class with the same spec, around ``local`` or the same local tensor.

    torch's own rules for an operator apply to it: a subclass that routes operators hands this on.
    """
    spec = dtensor._spec
    return DTensor.__new__(DTensor, dtensor._local_tensor if local is None else local, spec, requires_grad=False)


def shard_extent(shape: torch.Size, mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[torch.Size, torch.Size]:
    """Offsets and sizes of this rank's part of a tensor of that global shape."""
    sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, tuple(placements))
    return torch.Size(offsets), torch.Size(sizes)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a row-major tensor."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(shape[dim + 1], 1)
    return tuple(strides)


class SeatedShard(Shard):
    """``Shard(0)`` whose rows all sit at one coordinate of its mesh dimension, ``seat``.

    torch slices a full tensor by `_local_shard_size_and_offset` of a DTensor's placements when it loads a full state
    dict into a sharded model, when it loads onto a meta tensor, and when it names a shard in a checkpoint. An even
    `Shard(0)` there would write a few rows of a matrix over all of it. This class is what `placements` shows; the
    spec inside the DTensor has `Shard(0)`, whose rules for operators are right.
    """

    def __new__(cls, seat: int) -> SeatedShard:
        return super().__new__(cls, 0)  # type: ignore[call-arg]

    def __init__(self, seat: int) -> None:
        super().__init__(0)
        self.seat = seat

    def __reduce__(self) -> tuple[type[SeatedShard], tuple[int]]:
        return SeatedShard, (self.seat,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SeatedShard) and other.seat == self.seat

    def __hash__(self) -> int:
        return hash((type(self), self.seat))

    def __repr__(self) -> str:
        return f"SeatedShard(seat={self.seat})"

    def _local_shard_size_and_offset(self, curr_local_size: Any, num_chunks: Any, rank: Any) -> tuple[Any, Any]:
        return (curr_local_size, 0) if rank == self.seat else (0, curr_local_size)


def grid_mesh(replicate: DeviceMesh, shard: DeviceMesh, ranks: Tensor) -> DeviceMesh:
    """The 2-D mesh of which these are the two dimensions; equal to the one that ``fully_shard`` gets for HSDP.

    Args:
        ranks: [replicas, shards], for meshes that are no slices of a common one.
    """
    if replicate.mesh_dim_names and shard.mesh_dim_names and replicate._get_root_mesh() is shard._get_root_mesh():
        return DeviceMesh._concatenate([replicate, shard])
    names = (*(replicate.mesh_dim_names or ()), *(shard.mesh_dim_names or ()))
    made = DeviceMesh(
        shard.device_type,
        ranks.to(torch.int),
        mesh_dim_names=names if len(set(names)) == 2 else None,
        _init_backend=False,
    )
    groups = [replicate.get_group(), shard.get_group()]
    made._dim_group_names = [group.group_name for group in groups]
    made._pg_registry.update({group.group_name: group for group in groups})
    return made


# --- Operators of a DTensor subclass
#
# Since 2.12 torch hands an operator to the `__torch_dispatch__` of a subclass that overrides it, and DTensor's own
# works when called. Before, its C++ path took every subclass for a DTensor and `__torch_dispatch__` was a stub that
# raised. There the Python call is caught by `__torch_function__`, and the operators under it by a dispatch mode, which
# goes before that path. What autograd's engine runs by itself escapes: a gradient that it accumulates would become a
# plain DTensor.


def _hands_operators_to_subclasses() -> bool:
    try:
        DTensor.__torch_dispatch__(torch.no_grad, ())  # type: ignore[no-untyped-call]
    except NotImplementedError:
        return False
    return True


AUTOGRAD_KEEPS_SUBCLASSES = _hands_operators_to_subclasses()


class RoutedDTensor(DTensor):
    """A DTensor all of whose operators come to `route`."""

    @classmethod
    def route(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    if AUTOGRAD_KEEPS_SUBCLASSES:

        @classmethod
        def __torch_dispatch__(  # type: ignore[override]
            cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            return cls.route(func, args, kwargs or {})

    else:

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            with _RouteMode(cls), torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))


class _RouteMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, routed: type[RoutedDTensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.routed = routed

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(leaf, self.routed) for leaf in tree_leaves((args, kwargs))):
            return self.routed.route(func, args, kwargs)
        return func(*args, **kwargs)


# --- Collectives
#
# - `_coalescing_manager`: one NCCL group call for several collectives has no public spelling.
# - a group's timeout can be given when it is made, but not read.
# - the store behind `init_process_group`, where ranks can wait for each other by name.


def coalescing(group: ProcessGroup, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Collectives launched inside go out as one call; the current stream is ordered after it on leaving."""
    return torch.distributed._coalescing_manager(  # type: ignore[attr-defined, no-any-return]
        group=group, device=device, async_ops=False
    )


def default_store() -> Any:
    """The store that all ranks of the default process group share."""
    return dist.distributed_c10d._get_default_store()


def group_timeout(group: ProcessGroup, device_type: str) -> timedelta | None:
    """The timeout that collectives of ``group`` have on this kind of device; None where the backend does not say."""
    options = getattr(group._get_backend(torch.device(device_type)), "options", None)
    return getattr(options, "_timeout", None)


# --- Autograd
#
# - `_unsafe_preserve_version_counter`: a bucket is freed and filled again between forward and backward with the same
#   values; autograd must not take that for a change of what it saved.
# - the engine's callbacks and the id of the running graph task: FSDP2 finds the end of a backward the same way.


def preserving_versions(tensors: Sequence[Tensor]) -> contextlib.AbstractContextManager[Any]:
    """In-place writes inside do not count as changes of ``tensors``."""
    return torch.autograd._unsafe_preserve_version_counter(tuple(tensors))  # type: ignore[attr-defined, no-any-return]


def in_backward() -> bool:
    """Whether autograd's engine is running on this thread."""
    return torch._C._current_graph_task_id() != -1


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the running backward has computed every gradient."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


# --- Many tensors at once
#
# - `_foreach_copy_`, `_foreach_div_`: one launch for all tensors of a group has no public spelling.
# - `_storage_Use_Count`: autograd hands out gradients that share memory with each other, or with one that still flows.


def copy_all(into: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """``into[i].copy_(sources[i])`` for all i."""
    if into:
        torch._foreach_copy_(list(into), list(sources))


def divide_all(tensors: Sequence[Tensor], divisor: float) -> None:
    """``tensors[i].div_(divisor)`` for all i."""
    if tensors:
        torch._foreach_div_(list(tensors), divisor)


def is_alone(tensor: Tensor) -> bool:
    """Whether no other tensor can read or write this one's memory."""
    return _holders(tensor) <= _HOLDERS_OF_A_LONE_TENSOR


def _holders(tensor: Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))  # type: ignore[attr-defined]


_LONE = torch.empty(0)
_HOLDERS_OF_A_LONE_TENSOR = _holders(_LONE)  # itself and the handle that counts


# --- Parameters of a module


def put_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Register without the walk through every hook and base class that `setattr` takes: this is the hot path."""
    module._parameters[name] = parameter


def get_parameter(module: nn.Module, name: str) -> nn.Parameter:
    parameter = module._parameters[name]
    assert parameter is not None
    return parameter


def run_post_accumulate_hooks(parameter: nn.Parameter) -> None:
    """What `register_post_accumulate_grad_hook` registered; autograd runs it only where it accumulates by itself."""
    for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
        hook(parameter)


def tensors_with_grad(tree: Any) -> list[Tensor]:
    """Every tensor of a module's input or output that takes part in autograd; dataclasses and mappings included."""
    found: list[Tensor] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[Tensor]) -> None:
    if isinstance(tree, Tensor):
        if tree.requires_grad:
            found.append(tree)
    elif isinstance(tree, Mapping):
        for value in tree.values():
            _collect(value, found)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            _collect(value, found)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for entry in dataclasses.fields(tree):
            _collect(getattr(tree, entry.name), found)


# --- The FSDP2 seam
#
# `fully_shard` has no way to be told, from outside and for all callers, which parameters it must leave alone, nor any
# to accept a container without a forward. Four functions are replaced, looked up where torch looks them up, so it does
# not matter when a caller imported `fully_shard`:
#
# - `_get_managed_states` (parameters to shard): ours are added to `ignored_params`.
# - `_validate_module`: a container that holds dedicated parameters may pass.
# - `_init_param_group`: its arguments are the only place where mesh and policies of a call stand together.
# - `FSDPState._root_post_backward_final_callback`: the end of a backward, which torch.distributed.pipelining calls too.
#
# FSDPModule's setters loop over FSDP2's own parameter groups, of which a fully dedicated module has none; each is
# wrapped so that it reaches the dedicated groups as well.


@dataclasses.dataclass(frozen=True)
class Cover:
    """What a call of ``fully_shard`` decided for the modules it was given.

    Attributes:
        mesh: its mesh.
        mp_policy: its mixed precision policy.
        offload_policy: its offload policy.
        reshard_after_forward: whether weights are freed after forward.
        automatic: the user left that to FSDP2, which keeps the root's weights.
    """

    mesh: DeviceMesh
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    reshard_after_forward: bool
    automatic: bool


class SeamHandler(Protocol):
    """What the seam asks of the runtime."""

    def dedicated_among(self, modules: Sequence[nn.Module]) -> set[nn.Parameter]: ...

    def accepts_container(self, module: nn.Module) -> bool: ...

    def covered(self, modules: Sequence[nn.Module], cover: Cover) -> None: ...

    def knows(self, module: nn.Module) -> bool: ...

    def entering(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]: ...

    def leaving(self, module: nn.Module, args: Any, output: Any) -> Any: ...

    def backward_ended(self, module: nn.Module) -> None: ...

    def control(self, module: nn.Module, name: str, arguments: dict[str, Any]) -> None: ...


_originals: dict[tuple[Any, str], Any] = {}
_seam_lock = threading.Lock()


def install_seam(handler: SeamHandler) -> None:
    """Replace the functions above, once; raises where this torch's do not look as expected."""
    with _seam_lock:
        if _originals:
            return
        _require_fitting_torch()
        from torch.distributed.fsdp._fully_shard import _fsdp_init, _fully_shard
        from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

        _replace(_fsdp_init, "_get_managed_states", _ignoring(handler))
        _replace(_fully_shard, "_validate_module", _accepting(handler))
        _replace(_fully_shard, "_init_param_group", _noting(handler))
        _replace(FSDPState, "_root_post_backward_final_callback", _announcing(handler))
        for name in fsdp_controls():
            _replace(FSDPModule, name, _controlling(handler, name))


def uninstall_seam() -> None:
    """Put the very functions back."""
    with _seam_lock:
        for (place, name), original in _originals.items():
            setattr(place, name, original)
        _originals.clear()


def fsdp_controls() -> list[str]:
    """Public methods of FSDPModule on this torch."""
    return sorted(name for name, value in vars(FSDPModule).items() if callable(value) and not name.startswith("_"))


def _replace(place: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    original = vars(place)[name]
    _originals[place, name] = original
    setattr(place, name, functools.wraps(original)(wrap(original)))


def _ignoring(handler: SeamHandler) -> Callable[[Any], Any]:
    def wrap(original: Any) -> Any:
        def get_managed_states(modules: list[nn.Module], ignored_params: set[nn.Parameter] | None = None) -> Any:
            ours = handler.dedicated_among(modules)
            return original(modules, (ignored_params or set()) | ours if ours else ignored_params)

        return get_managed_states

    return wrap


def _accepting(handler: SeamHandler) -> Callable[[Any], Any]:
    def wrap(original: Any) -> Any:
        def validate_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if isinstance(module, nn.Module) and handler.accepts_container(module):
                return None
            return original(module, *args, **kwargs)

        return validate_module

    return wrap


def _noting(handler: SeamHandler) -> Callable[[Any], Any]:
    def wrap(original: Any) -> Any:
        signature = inspect.signature(original)

        def init_param_group(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            cover = Cover(
                mesh=given["mesh_info"].mesh,
                mp_policy=given["mp_policy"],
                offload_policy=given["offload_policy"],
                reshard_after_forward=given["post_forward_mesh_info"] is not None,
                automatic=bool(given["state"]._auto_reshard_after_forward),
            )
            handler.covered(given["modules"], cover)
            if any(handler.knows(module) for module in given["modules"]):
                _follow_forward_methods(handler, given["state"])
            return original(*args, **kwargs)

        return init_param_group

    return wrap


def _follow_forward_methods(handler: SeamHandler, state: Any) -> None:
    """Methods given to ``register_fsdp_forward_method`` look these two up on the state at each call, while the hooks of
    a module's own forward hold the class's functions: what is set on the instance is seen by such methods alone."""
    before, after = state._pre_forward, state._post_forward

    def pre_forward(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return handler.entering(module, *before(module, args, kwargs))

    def post_forward(module: nn.Module, args: Any, output: Any) -> Any:
        return after(module, args, handler.leaving(module, args, output))

    state._pre_forward, state._post_forward = pre_forward, post_forward


def _announcing(handler: SeamHandler) -> Callable[[Any], Any]:
    def wrap(original: Any) -> Any:
        def root_post_backward_final_callback(state: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(state, *args, **kwargs)
            handler.backward_ended(state._modules[0])
            return result

        return root_post_backward_final_callback

    return wrap


def _controlling(handler: SeamHandler, name: str) -> Callable[[Any], Any]:
    def wrap(original: Any) -> Any:
        signature = inspect.signature(original)

        def control(module: Any, *args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(module, *args, **kwargs)
            bound.apply_defaults()
            arguments = dict(list(bound.arguments.items())[1:])
            handler.control(module, name, arguments)
            return original(module, *args, **kwargs)

        return control

    return wrap


_TESTED = "2.11 to 2.14"
_EXPECTED_PARAMETERS = {
    "_get_managed_states": {"modules", "ignored_params"},
    "_validate_module": {"module"},
    "_init_param_group": {
        "state",
        "modules",
        "mesh_info",
        "post_forward_mesh_info",
        "mp_policy",
        "offload_policy",
    },
}


def seam_complaint() -> str | None:
    """Why this torch's FSDP2 cannot take the seam, None where it can. Probed by structure, not by version."""
    try:
        from torch.distributed.fsdp._fully_shard import _fsdp_init, _fully_shard
        from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

        places = {
            "_get_managed_states": _fsdp_init,
            "_validate_module": _fully_shard,
            "_init_param_group": _fully_shard,
        }
        for name, place in places.items():
            missing = _EXPECTED_PARAMETERS[name] - set(inspect.signature(vars(place)[name]).parameters)
            if missing:
                return f"{name} has no parameter {', '.join(sorted(missing))}"
        if "_root_post_backward_final_callback" not in vars(FSDPState):
            return "FSDPState has no _root_post_backward_final_callback"
    except (ImportError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _require_fitting_torch() -> None:
    complaint = seam_complaint()
    if complaint is not None:
        raise RuntimeError(
            f"the FSDP2 of torch {torch.__version__} is not the one this version of dmuon knows ({complaint}; tested: "
            f"{_TESTED}). Go without the patch: dmuon.dedicate_params(..., patch=False), then "
            f"fully_shard(module, ignored_params=dmuon.ignored_params(model))"
        )


# --- FSDP2's own state
#
# - `set_requires_gradient_sync` sets but nothing reads: restoring what was there needs the parameter groups.
# - whether a module is a root, which `reset_iter_state` must not be called on before a forward, nothing tells.
# - `reset_iter_state` leaves gradients on the unsharded parameters, which the next backward would add to.


def _param_groups(module: FSDPModule) -> list[Any]:
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []


def gradient_sync_of(module: FSDPModule) -> list[tuple[bool, bool]]:
    """(reduce, all-reduce) of the module's own parameter groups."""
    return [(group.reduce_grads, group.all_reduce_grads) for group in _param_groups(module)]


def set_gradient_sync_of(module: FSDPModule, values: Sequence[tuple[bool, bool]]) -> None:
    for group, (reduce, all_reduce) in zip(_param_groups(module), values, strict=True):
        group.reduce_grads, group.all_reduce_grads = reduce, all_reduce


def reset_iteration(module: FSDPModule) -> None:
    """FSDP2's own reset, and where a torch before 2.13 has none, the same on its state."""
    state: Any = module._get_fsdp_state()
    if not state._is_root:  # only a root has anything to reset, and none is one before its forward
        return
    if hasattr(module, "reset_iter_state"):
        module.reset_iter_state()
        return
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    state._comm_ctx.all_gather_state = None
    state._comm_ctx.reduce_scatter_state = None
    state._comm_ctx.post_forward_order.clear()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False
    for each in state._state_ctx.all_states:
        each._modules_to_run_forward.clear()
        each._training_state = TrainingState.IDLE
        for group in [each._fsdp_param_group] if each._fsdp_param_group else []:
            group.finalize_backward()
            group._partial_reduce_output = None
            group._training_state = TrainingState.IDLE
            group._to_sharded()


def drop_unsharded_gradients(module: FSDPModule) -> None:
    """Forget what autograd left on FSDP2's unsharded parameters and what it accumulated there."""
    for group in _param_groups(module):
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
