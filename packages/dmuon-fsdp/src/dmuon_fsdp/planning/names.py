"""Canonical names: what wrappers put between a model and its parameters does not count."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def canonical(name: str) -> str:
    """``layers.0._checkpoint_wrapped_module.q.weight`` → ``layers.0.q.weight``."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def unwrap_data_parallel(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel, whose ``module.`` is no part of a name."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def bare(model: nn.Module) -> nn.Module:
    """The module inside whatever wraps a whole model."""
    while True:
        inner = [child for name, child in model.named_children() if name in _WRAPPERS]
        if inner:
            model = inner[0]
        elif isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        else:
            return model


def named_places(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """(canonical name, module, attribute, parameter) of every place a parameter stands in, shared ones repeatedly."""
    for prefix, module in unwrap_data_parallel(model).named_modules(remove_duplicate=False):
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield canonical(f"{prefix}.{attribute}".lstrip(".")), module, attribute, parameter
