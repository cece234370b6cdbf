"""Initial weights: module by module, the same draw on every rank, kept where it belongs."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dmuon_fsdp.compat import put_parameter
from dmuon_fsdp.planning.names import canonical
from dmuon_fsdp.runtime.binding import Registration, device_of
from dmuon_fsdp.runtime.owned_tensor import OwnedTensor


def initialize(registration: Registration, fn: Callable[[nn.Module], None] | None) -> None:
    """Materialise what is on meta, then let ``fn`` initialise every module as if it stood alone in one process.

    Whole parameters exist for one module at a time. Every rank must start with the same generator state, and draws the
    same numbers in the order of ``model.modules()``; an owner keeps a dedicated one, every rank its rows of a sharded
    one. ``fn`` finds the values that are there, and not-a-number where the model was on meta.

    Raises:
        ValueError: fn is None and a module with parameters has no ``reset_parameters``, or something that was on meta
            was left as it was; named.
    """
    model = registration.model
    registration.rest()
    device = device_of(registration.dedications[0].mesh) if registration.dedications else torch.device("cpu")
    materialize(model, device)
    with torch.no_grad():
        for name, module in model.named_modules():
            _initialize_module(module, canonical(name), fn)
    for member in registration.params.values():
        member.adopt_replacement()


def materialize(model: nn.Module, device: torch.device) -> None:
    """Memory for a model that is on meta, in any part; not-a-number in all of it: nothing is taken for a value."""
    tensors = [*model.parameters(), *model.buffers()]
    if not any(tensor.device.type == "meta" for tensor in tensors):
        return
    model.to_empty(device=device)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.fill_(math.nan)


def _initialize_module(module: nn.Module, name: str, fn: Callable[[nn.Module], None] | None) -> None:
    """A shared parameter is drawn by every module that holds it, as in one process, and the last draw stays."""
    own = dict(module.named_parameters(recurse=False))
    if not own and not list(module.buffers(recurse=False)):
        return
    initialise = fn if fn is not None else _reset_parameters(name, module)
    for attribute, parameter in own.items():
        put_parameter(module, attribute, _whole(parameter))
    try:
        initialise(module)
        values = {attribute: module.get_parameter(attribute) for attribute in own}
    finally:
        for attribute, parameter in own.items():
            put_parameter(module, attribute, parameter)
    _refuse_left_alone(name, {**values, **dict(module.named_buffers(recurse=False))})
    for attribute, parameter in own.items():
        _keep(parameter, values[attribute])


def _refuse_left_alone(name: str, tensors: dict[str, torch.Tensor]) -> None:
    for attribute, tensor in tensors.items():
        if tensor.is_floating_point() and not isinstance(tensor, DTensor) and tensor.isnan().any():
            raise ValueError(
                f"dmuon.init_weights: {f'{name}.{attribute}'.lstrip('.')!r} is not initialised; "
                f"let fn (or the module's reset_parameters) set every parameter and buffer of the module it is given"
            )


def _reset_parameters(name: str, module: nn.Module) -> Callable[[nn.Module], None]:
    reset = next(
        (vars(base)["reset_parameters"] for base in type(module).__mro__ if "reset_parameters" in vars(base)), None
    )
    if reset is None:
        raise ValueError(
            f"{name!r} ({type(module).__name__}) has parameters or buffers but no reset_parameters: give "
            f"dmuon.init_weights a function that initialises its own parameters"
        )
    return reset  # type: ignore[no-any-return]


def _whole(parameter: nn.Parameter) -> nn.Parameter:
    """A plain parameter of the global shape with the values that are there. A collective."""
    if isinstance(parameter, DTensor):
        return nn.Parameter(parameter.full_tensor().detach(), requires_grad=parameter.requires_grad)
    return parameter


def _keep(parameter: nn.Parameter, value: torch.Tensor) -> None:
    if isinstance(parameter, OwnedTensor):
        parameter.count_write()
        if parameter.is_owner:
            parameter.local.copy_(value)
    elif isinstance(parameter, DTensor):
        from torch.distributed.tensor import distribute_tensor

        shard = distribute_tensor(value.detach(), parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.to_local().copy_(shard.to_local())
