"""The seam in FSDP2.

`fully_shard` has no way to be told, from outside and for all callers, which parameters it must leave alone, nor any to
accept a container without a forward. Four functions are replaced, looked up where torch looks them up, so it does not
matter when a caller imported `fully_shard`:

- `_get_managed_states` (parameters to shard): ours are added to `ignored_params`.
- `_validate_module`: a container that holds dedicated parameters may pass.
- `_init_param_group`: its arguments are the only place where mesh and policies of a call stand together.
- `FSDPState._root_post_backward_final_callback`: the end of a backward, which torch.distributed.pipelining calls too.

FSDPModule's setters loop over FSDP2's own parameter groups, of which a fully dedicated module has none; each is wrapped
so that it reaches the dedicated groups as well.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy


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
