"""Autograd's engine, what it leaves on parameters, and many tensors in one launch.

- the engine's callbacks and the id of the running graph task: FSDP2 finds the end of a backward the same way.
- `_storage_Use_Count`: autograd hands out gradients that share memory with each other, or with one that still flows.
- `_post_accumulate_grad_hooks`: autograd runs them only where it accumulates by itself.
- `_fused_adamw_`: an update that a number on the device may call off; `torch.optim` takes one for all parameters.
- `_foreach_copy_`, `_foreach_div_`, `_foreach_mul_`, `_foreach_norm`: one launch for all tensors of a group has no
  public spelling.
- `_unsafe_preserve_version_counter`: memory that is freed and filled with the same values again has not changed.
- `_profiler_enabled`: a range costs an operator call each way, also where nobody records a profile.
- `_parameters`: registering through `setattr` walks every hook and base class, and views stand in a module's place for
  its parameters twice in every step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.profiler import record_function


def in_backward() -> bool:
    """Whether autograd's engine is running on this thread."""
    return torch._C._current_graph_task_id() != -1


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the running backward has computed every gradient."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


_NOTHING = contextlib.nullcontext()


def profiled(name: str) -> AbstractContextManager[Any]:
    """A range of that name in a profile, where one is being recorded."""
    recording = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
    return record_function(name) if recording else _NOTHING


def copy_all(into: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """``into[i].copy_(sources[i])`` for all i."""
    if into:
        torch._foreach_copy_(list(into), list(sources))


def preserving_versions(tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
    """What is written to ``tensors`` inside is what autograd saved them with."""
    return torch.autograd._unsafe_preserve_version_counter(tuple(tensors))  # type: ignore[attr-defined]


def divide_all(tensors: Sequence[Tensor], divisor: float) -> None:
    """``tensors[i].div_(divisor)`` for all i."""
    if tensors:
        torch._foreach_div_(list(tensors), divisor)


def scale_all(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """``tensors[i].mul_(factor)`` for all i; ``factor`` is 0-dim, on their device, and not read by the host."""
    if tensors:
        torch._foreach_mul_(list(tensors), factor)


def norms_of(tensors: Sequence[Tensor], order: float, dtype: torch.dtype) -> list[Tensor]:
    """The norm over all elements of each tensor, which has some, computed in ``dtype``."""
    return list(torch._foreach_norm(list(tensors), order, dtype=dtype))


def adamw_if_(
    present: Tensor,
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    weight_decay: float,
    eps: float,
) -> None:
    """torch's fused AdamW on one parameter where ``present`` is 1; where it is 0 nothing changes. In place.

    Args:
        present: 0-dim fp32, on the device of all others, not read by the host.
        step: 0-dim fp32.
    """
    step.add_(present)
    torch._fused_adamw_(  # type: ignore[call-overload]
        [weight],
        [grad],
        [exp_avg],
        [exp_avg_sq],
        [],
        [step],
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        found_inf=1 - present,
    )
    increment_version((weight, exp_avg, exp_avg_sq))  # torch does not


def is_alone(tensor: Tensor) -> bool:
    """Whether no other tensor can read or write this one's memory."""
    return _holders(tensor) <= _HOLDERS_OF_A_LONE_TENSOR


def _holders(tensor: Tensor) -> int:
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))  # type: ignore[attr-defined]


_LONE = torch.empty(0)
_HOLDERS_OF_A_LONE_TENSOR = _holders(_LONE)  # itself and the handle that counts


def put_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Register without the walk through every hook and base class that `setattr` takes: this is the hot path."""
    module._parameters[name] = parameter


def get_parameter(module: nn.Module, name: str) -> nn.Parameter:
    parameter = module._parameters[name]
    assert parameter is not None
    return parameter


def run_post_accumulate_hooks(parameter: nn.Parameter) -> None:
    """What `register_post_accumulate_grad_hook` registered; autograd runs it only where it accumulates by itself."""
    for hook in (parameter._post_accumulate_grad_hooks or {}).values():
        hook(parameter)
