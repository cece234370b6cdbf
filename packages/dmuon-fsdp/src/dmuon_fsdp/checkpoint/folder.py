"""Checkpoint folders: written beside the last one and swapped in whole, read and compared before anything changes.

The format is ``torch.distributed.checkpoint``'s, under the names of the unwrapped model: ``model.<name>``,
``optimizer.state.<name>.<key>``, ``optimizer.param_groups``, and ``extra``. An owner writes its matrices whole, FSDP2
its shards, so a folder does not depend on ranks, mesh or owners, and torch alone reads it too.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim.optimizer import Optimizer
from torch.serialization import get_unsafe_globals_in_checkpoint

from dmuon_fsdp.checkpoint.model_dict import begin_writing, check_model, get_model_state_dict, wanted_of
from dmuon_fsdp.checkpoint.names import check_names, check_shapes
from dmuon_fsdp.checkpoint.optimizer_dict import get_optimizer_state_dict, is_ours, nested_of, own_groups
from dmuon_fsdp.checkpoint.reading import Contents, assemble, read
from dmuon_fsdp.checkpoint.sources import meet, shapes_of, spec_of
from dmuon_fsdp.comm.together import all_or_none, said, union, world
from dmuon_fsdp.runtime.inference import outside_inference_mode
from dmuon_fsdp.runtime.layout import write_

_PARTS = StateDictOptions()
_EXTRA = "extra"
_STATE = "optimizer.state."
_GROUPS = "optimizer.param_groups"


@outside_inference_mode
def save_checkpoint(
    model: nn.Module, optimizer: Optimizer | None, folder: str | os.PathLike[str], *, extra: Any = None
) -> None:
    """Save model, optimizer and whatever else into ``folder``, on all ranks; a folder that is there is replaced.

    It is written as ``<folder>.new`` and then renamed, so that a crash at any time leaves the last checkpoint readable
    by :func:`load_checkpoint`. Nothing is gathered: every rank writes what it holds. Random numbers are not drawn.

    Args:
        optimizer: None saves the model alone.
        folder: on a file system that all ranks share; its parent must exist.
        extra: numbers, strings, containers, tensors: the step, a scheduler's state dict. The first rank's is kept.
            Classes of yours are refused, unless ``torch.serialization.add_safe_globals`` has them.

    Raises:
        RuntimeError: some ranks did not make this call; they are named.
        OSError: a rank could not write; ``folder`` is as it was.
        ValueError: the arguments are in another order; ``extra`` could not be loaded again. Nothing was written.
    """
    _check_arguments("save_checkpoint", model, optimizer)
    meet(model, "dmuon.save_checkpoint(model, ...)")
    packed = all_or_none(lambda: _packed(extra), world())
    folder = Path(folder)
    new = _beside(folder, "new")
    state: dict[str, Any] = {"model": get_model_state_dict(model, options=_PARTS)}
    if optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer, options=_PARTS)
    state[_EXTRA] = packed
    all_or_none(lambda: _on_first(lambda: shutil.rmtree(new, ignore_errors=True)), world())
    try:
        save(state, checkpoint_id=new)
    except CheckpointException as error:
        raise OSError(f"the checkpoint {folder} was not written: {_first_failure(error)}") from error
    all_or_none(lambda: _on_first(lambda: _swap(new, folder)), world())


@outside_inference_mode
def load_checkpoint(
    model: nn.Module, optimizer: Optimizer | None, folder: str | os.PathLike[str], *, strict: bool = True
) -> Any:
    """Load what :func:`save_checkpoint` or ``torch.distributed.checkpoint.save`` wrote, on any ranks, mesh and owners.

    Everything is read into host memory, this rank's parts of it, and compared by name and shape before the model
    changes: whatever is wrong with the files, the running model is as it was; only a device that runs out of memory for
    the optimizer's state may leave a part of it new. Objects in the folder are unpickled: load only what you trust.

    Args:
        model: on any mesh, on meta too. Weights that FSDP2 alone saved are taken as well, under ``model.`` or without.
        optimizer: None loads the model alone.
        strict: False loads what both have; state that was not saved begins anew.

    Returns:
        What was given as ``extra``, on every rank; None where there is none.

    Raises:
        FileNotFoundError: there is no complete checkpoint in ``folder``.
        KeyError: names that the checkpoint lacks, or has and nobody asks for; all of them.
        ValueError: other shapes; a file that is damaged, with the name of the tensor; an ``extra`` that
            :func:`save_checkpoint` did not write; parameters of the optimizer that are not the model's; the arguments
            are in another order.
        RuntimeError: some ranks did not make this call; they are named. The folder was replaced while it was read.
    """
    _check_arguments("load_checkpoint", model, optimizer)
    meet(model, "dmuon.load_checkpoint(model, ...)", writing=True)
    contents = all_or_none(lambda: Contents.of(_complete(Path(folder))), world())
    all_or_none(lambda: _on_first(contents.check_files), world())
    prefix = _check_model(model, contents, strict=strict)
    targets = begin_writing(model)
    staged = _model_templates(targets, contents, prefix)
    staged.update({_EXTRA: contents.template(_EXTRA)} if prefix and _EXTRA in contents.specs else {})
    if optimizer is not None:
        staged.update(_check_state(_state_templates(model, optimizer, contents), contents, strict=strict))
        staged.update(contents.templates(_GROUPS))
    got = read(contents, staged)
    extra = all_or_none(lambda: _unpacked(contents.folder, got.get(_EXTRA)), world())
    # The optimizer first: it looks at what it is given once more, and then nothing is left that could be refused.
    if optimizer is not None:
        _put_state(model, optimizer, contents, got)
    _put_model(model, targets, contents, prefix, got)
    return extra


def _check_arguments(call: str, model: object, optimizer: object) -> None:
    """torch.save and torch.load take the file first or second; here that would end in an error about something else."""
    if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer | None):
        raise ValueError(
            f"dmuon.{call}(model, optimizer, folder) takes the model first, then its optimizer or None, then the "
            f"folder; got {type(model).__name__}, {type(optimizer).__name__}"
        )


def _check_model(model: nn.Module, contents: Contents, *, strict: bool) -> str:
    """Compare the model's names and shapes with the checkpoint's; what stands there before its names."""
    wanted = wanted_of(model)
    prefix = "model." if any(f"model.{name}" in contents.specs for name in wanted) else ""
    asked = union(list(wanted), world())
    found = {
        name: contents.shapes[next(iter(keys))] if () in keys.values() else None
        for name, keys in contents.entries(prefix).items()
        if prefix or not name.startswith("optimizer.")
    }
    # What another rank asks for belongs to another pipeline stage.
    own = {name: shape for name, shape in found.items() if name in wanted or name not in asked}
    all_or_none(lambda: check_model(str(contents.folder), model, wanted, own, strict=strict), world())
    return prefix


def _check_state(templates: Mapping[str, Any], contents: Contents, *, strict: bool) -> dict[str, Any]:
    """Compare the optimizer's state with the checkpoint's; the templates of what is in both."""
    asked = union(list(templates), world())
    source = str(contents.folder)

    def check() -> None:
        check_names(source, asked, contents.keys_of(_STATE), strict=strict)
        check_shapes(source, shapes_of({key: spec_of(value) for key, value in templates.items()}), contents.shapes)

    all_or_none(check, world())
    return {key: value for key, value in templates.items() if key in contents.specs}


# --- the parts of a checkpoint


def _model_templates(targets: Mapping[str, Any], contents: Contents, prefix: str) -> dict[str, Any]:
    """Host memory to read the model into, by key."""
    templates: dict[str, Any] = {}
    for name, keys in contents.entries(prefix).items():
        if isinstance(targets.get(name), Tensor):
            templates[prefix + name] = _staged(targets[name])
        elif name in targets:
            templates.update({key: contents.template(key) for key in keys})
    return templates


def _state_templates(model: nn.Module, optimizer: Optimizer, contents: Contents) -> dict[str, Any]:
    """Host tensors to read the optimizer's state into, by key; a frozen parameter's where it was saved."""
    parts = get_optimizer_state_dict(model, optimizer, options=_PARTS)
    templates = {
        f"{_STATE}{name}.{key}": _staged(value)
        for name, entry in parts["state"].items()
        for key, value in entry.items()
    }
    if is_ours(model, optimizer):
        for group in optimizer.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                for key in contents.keys_of(f"{_STATE}{name}.") if name not in parts["state"] else ():
                    spec = contents.specs[key]
                    whole = spec is not None and tuple(spec[0]) == tuple(parameter.shape)
                    templates[key] = _staged(parameter, spec[1]) if whole and spec else contents.template(key)
    return templates


def _staged(value: Any, dtype: torch.dtype | None = None) -> Any:
    """Host memory laid out as ``value``; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty_like(value, device="cpu", dtype=dtype or value.dtype, requires_grad=False)


def _put_state(model: nn.Module, optimizer: Optimizer, contents: Contents, got: Mapping[str, Any]) -> None:
    state: dict[str, dict[str, Any]] = {}
    for key, value in got.items():
        if key.startswith(_STATE):
            name, _, entry = key[len(_STATE) :].rpartition(".")
            state.setdefault(name, {})[entry] = value
    groups = contents.groups({key: value for key, value in got.items() if key.startswith(_GROUPS)}, _GROUPS)
    saved = nested_of(groups)["param_groups"]
    if is_ours(model, optimizer):
        optimizer.load_state_dict({"state": state, "param_groups": own_groups(saved, optimizer.param_groups)})
    else:
        nested = {"state": state, "param_groups": saved}
        dsd.set_optimizer_state_dict(model, optimizer, nested, options=StateDictOptions(strict=False))


def _put_model(
    model: nn.Module, targets: Mapping[str, Any], contents: Contents, prefix: str, got: Mapping[str, Any]
) -> None:
    given: dict[str, Any] = {}
    for name, keys in contents.entries(prefix).items():
        target = targets.get(name)
        if isinstance(target, Tensor):
            write_(target, got[prefix + name])
            given[name] = target
        elif name in targets:
            given[name] = assemble({place: got[key] for key, place in keys.items()})
    dsd.set_model_state_dict(model, given, options=StateDictOptions(strict=False))


def _packed(extra: Any) -> bytes:
    """One object, whatever it holds: torch.distributed.checkpoint would take containers apart."""
    buffer = io.BytesIO()
    try:
        torch.save(extra, buffer)
        foreign = get_unsafe_globals_in_checkpoint(io.BytesIO(buffer.getvalue()))
        if foreign:
            raise TypeError(f"it has {', '.join(foreign)}, which torch.serialization.add_safe_globals does not name")
        _load(buffer.getvalue())
    except Exception as error:
        raise ValueError(
            f"extra could not be loaded again; give numbers, strings, containers and tensors: {said(error)}"
        ) from error
    return buffer.getvalue()


def _unpacked(folder: Path, packed: object) -> Any:
    if packed is None:
        return None
    try:
        if not isinstance(packed, bytes):
            raise TypeError(f"it is {type(packed).__name__}, not bytes")
        return _load(packed)
    except Exception as error:
        raise ValueError(
            f"{folder}: {_EXTRA!r} is not what dmuon.save_checkpoint writes; read this folder by "
            f"torch.distributed.checkpoint: {said(error)}"
        ) from error


def _load(packed: bytes) -> Any:
    return torch.load(io.BytesIO(packed), map_location="cpu", weights_only=True, mmap=False)


# --- the folder


def _on_first(work: Any) -> None:
    if dist.get_rank() == 0:
        work()


def _beside(folder: Path, kind: str) -> Path:
    return folder.with_name(f"{folder.name}.{kind}")


def _swap(new: Path, folder: Path) -> None:
    """``new`` in the place of ``folder``. Between the renames the last one is ``<folder>.old``, and complete."""
    old = _beside(folder, "old")
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(folder, old)
    os.rename(new, folder)
    _flush(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _flush(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _complete(folder: Path) -> Path:
    """The folder, or the one that was being replaced by it; the metadata is written last."""
    for candidate in (folder, _beside(folder, "old")):
        if (candidate / ".metadata").is_file():
            return candidate
    raise FileNotFoundError(
        f"{folder} is no complete checkpoint: it has no file .metadata, which torch.distributed.checkpoint writes last"
    )


def _first_failure(error: CheckpointException) -> str:
    failures = error.failures
    if not failures:
        return str(error)
    rank = min(failures)
    return f"rank {rank}: {said(failures[rank][0])}"
