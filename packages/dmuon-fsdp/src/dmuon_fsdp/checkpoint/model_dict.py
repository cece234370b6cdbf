"""The model's state dict, whole or in parts: torch's functions, with what they leave out.

torch's own ``get_/set_model_state_dict`` of ``torch.distributed.checkpoint.state_dict`` work on dedicated parameters.
These have the same signatures and options and add: absent ranks are named where some do not call; names and shapes are
compared, on all ranks alike, before anything is written; whole tensors travel one at a time, so that no rank holds a
second model; pending publishes are waited for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.tensor import DTensor

from dmuon_fsdp.checkpoint.names import check_names, check_shapes
from dmuon_fsdp.checkpoint.sources import (
    FROM_FIRST,
    TO_FIRST,
    Source,
    check_values,
    collect,
    meet,
    shapes_of,
    sharded,
    spec_of,
)
from dmuon_fsdp.comm.together import all_or_none
from dmuon_fsdp.runtime import registry
from dmuon_fsdp.runtime.binding import device_of
from dmuon_fsdp.runtime.inference import outside_inference_mode
from dmuon_fsdp.runtime.layout import local_of, write_
from dmuon_fsdp.runtime.materialize import materialize

_SOURCE = "the model state dict"


@outside_inference_mode
def get_model_state_dict(
    model: nn.Module, *, submodules: set[nn.Module] | None = None, options: StateDictOptions | None = None
) -> dict[str, Any]:
    """The model's state dict. ``options=None`` means full, on CPU, on rank 0, and ``{}`` on the others.

    Call it on all ranks. Otherwise as ``torch.distributed.checkpoint.state_dict.get_model_state_dict``: names, shapes
    and dtypes of the unwrapped model, buffers and every alias of a shared parameter included, so that
    ``unwrapped.load_state_dict(...)`` takes a full one. Whole tensors exist one at a time on the device.

    Args:
        options: ``StateDictOptions()`` gives this rank's parts without communication, for
            ``torch.distributed.checkpoint``; they are the model's own tensors, unless ``cpu_offload`` copies them.

    Raises:
        RuntimeError: some ranks did not make this call; they are named.
    """
    options = options or TO_FIRST
    ranks = meet(model, "dmuon.get_model_state_dict(model)")
    return collect(dsd.get_model_state_dict(model, submodules=submodules, options=sharded(options)), options, ranks)  # type: ignore[no-any-return]


@outside_inference_mode
def set_model_state_dict(
    model: nn.Module, model_state_dict: Mapping[str, Any], *, options: StateDictOptions | None = None
) -> Any:
    """Load a state dict into the model. ``options=None`` means a full one from rank 0; other ranks may give ``{}``.

    Call it on all ranks. Otherwise as ``torch.distributed.checkpoint.state_dict.set_model_state_dict``. A model on meta
    is materialised first.

    Returns:
        torch's ``missing_keys`` and ``unexpected_keys``; both empty where ``options.strict``.

    Raises:
        KeyError: missing or unexpected names, all of them; unless ``options.strict`` is False.
        ValueError: other shapes, all of them; values on meta; buffers on meta that no state dict holds.
        RuntimeError: some ranks did not make this call.
    """
    options = options or FROM_FIRST
    ranks = meet(model, "dmuon.set_model_state_dict(model, ...)", writing=True)
    source = Source(ranks, options.broadcast_from_rank0)
    specs = source.known({name: spec_of(value) for name, value in model_state_dict.items()})
    wanted = wanted_of(model, options)

    def check() -> None:
        check_model(_SOURCE, model, wanted, shapes_of(specs), strict=options.strict)
        check_values(_SOURCE, {name: model_state_dict[name] for name in wanted if source.gives and name in specs})

    all_or_none(check, ranks.groups)
    targets = begin_writing(model)
    values: dict[str, Any] = {}
    for name, spec in specs.items():
        target, value = targets.get(name), model_state_dict.get(name)
        if spec is None:
            value = source.known(value)
        elif target is not None and options.full_state_dict:
            write_(target, source.whole(value, spec, local_of(target).device))
            value = target
        values[name] = value
    # The values that were written are given as they are: what the module adds (hooks, extra state) has its say.
    return dsd.set_model_state_dict(model, values, options=StateDictOptions(strict=False))


def wanted_of(model: nn.Module, options: StateDictOptions | None = None) -> dict[str, tuple[int, ...] | None]:
    """Shape by name of everything in the model's state dict; None for what is no tensor."""
    frozen = options is not None and options.ignore_frozen_params
    values = dsd.get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=frozen))
    return shapes_of({name: spec_of(value) for name, value in values.items()})


def check_model(
    source: str,
    model: nn.Module,
    wanted: Mapping[str, tuple[int, ...] | None],
    found: Mapping[str, tuple[int, ...] | None],
    *,
    strict: bool,
) -> None:
    """Raise where a model cannot be loaded from what was found; nothing was written yet."""
    meta = on_meta(model)
    # A value that nothing loads would be what happened to be in memory.
    check_names(source, wanted, found, strict=strict or meta)
    check_shapes(source, wanted, found)
    if meta:
        lost = [name for name, buffer in model.named_buffers() if buffer.is_meta and name not in wanted]
        if lost:
            raise ValueError(
                f"the model is on meta and has buffers that no state dict holds: {', '.join(map(repr, lost))}; call "
                f"dmuon.init_weights(model) first"
            )


def begin_writing(model: nn.Module) -> dict[str, Any]:
    """The model's own tensors by name, materialised where they were on meta."""
    if on_meta(model):
        materialize(model, _device_of(model))
        registration = registry.find(model)
        for member in registration.params.values() if registration is not None else ():
            member.adopt_replacement()
        for optimizer in registration.optimizers if registration is not None else ():
            optimizer.create_state()
    return dsd.get_model_state_dict(model)


def _device_of(model: nn.Module) -> torch.device:
    meshes = (parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor))
    mesh = next(meshes, None)
    return torch.device("cpu") if mesh is None else device_of(mesh)


def on_meta(model: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
