"""AdamW on what a rank holds: FSDP2's shards, whole parameters of an owner, plain ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from dmuon_core.optimizer import adamw_step
from dmuon_fsdp.compat import adamw_if_, copy_all
from dmuon_fsdp.optim.masters import Masters
from dmuon_fsdp.runtime.layout import local_of
from dmuon_fsdp.runtime.parameter import DedicatedParam

State = MutableMapping[Tensor, Any]
Local = Callable[[Tensor], Tensor]


def adamw_on_parts(
    parameters: Sequence[nn.Parameter],
    group: Mapping[str, Any],
    state: State,
    known: Mapping[nn.Parameter, DedicatedParam],
    masters: Masters,
) -> None:
    """One step of ``group``'s AdamW on ``parameters``, which have gradients and state.

    An owner leaves alone what no rank used, momentum and decay included, without the host knowing it.

    Args:
        known: the dedicated parameters.
        masters: in whose place of theirs those are stepped that have one.
    """
    members = [known[parameter] for parameter in parameters if parameter in known]
    wide = masters.of(members, state)
    parts = {id(member.param): master for member, master in wide.items()}
    parts |= {id(m.param.grad): local_of(cast(Tensor, m.param.grad)).to(w.dtype) for m, w in wide.items()}

    def local(tensor: Tensor) -> Tensor:
        return parts[id(tensor)] if id(tensor) in parts else local_of(tensor)

    presence = {member.param: member.presence for member in members if member.is_owner}
    conditional = {parameter: present for parameter, present in presence.items() if present is not None}
    _step_if(conditional, group, state, local)
    for batch in _by_device([parameter for parameter in parameters if parameter not in conditional]):
        fused = local_of(batch[0]).device.type == "cuda"
        adamw_step(batch, cast(MutableMapping[str, Any], group), state, local=local, fused=fused or None)
    masters.write_back(wide)


def _step_if(
    conditional: Mapping[nn.Parameter, Tensor],
    group: Mapping[str, Any],
    state: State,
    local: Callable[[Tensor], Tensor],
) -> None:
    """Each by its own 0/1, which is on its device; counts of steps go up by it."""
    together: dict[object, list[_Conditional]] = {}
    for parameter, present in conditional.items():
        own = state[parameter]
        grad, moments = local(cast(Tensor, parameter.grad)), (local(own["exp_avg"]), local(own["exp_avg_sq"]))
        each = _Conditional(present, local(parameter), grad, *moments, own["step"])
        if each.weight.numel() <= _SMALL and each.weight.is_contiguous():
            together.setdefault((each.weight.device, each.weight.dtype, each.grad.dtype), []).append(each)
        else:
            _step_alone(each, group)
    for batch in together.values():
        _step_together(batch, group)


_SMALL = 2**16
"""Entries up to which parameters are stepped together: a launch costs more than to copy them."""


class _Conditional(NamedTuple):
    """What a parameter is stepped with, and whether it is."""

    present: Tensor
    weight: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor


def _step_alone(each: _Conditional, group: Mapping[str, Any]) -> None:
    lr = group["lr"]
    adamw_if_(
        *each,
        # A copy that waits would make the host wait for the device.
        lr=lr.to(each.present.device, non_blocking=True) if isinstance(lr, Tensor) else lr,
        betas=group["betas"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
    )


def _step_together(batch: Sequence[_Conditional], group: Mapping[str, Any]) -> None:
    """torch.optim.AdamW's update of all of them as one vector, in a number of launches that does not grow."""
    presence, weights, grads, averages, squares, steps = map(list, zip(*batch, strict=True))
    sizes = [weight.numel() for weight in weights]

    def spread(values: Tensor) -> Tensor:
        return torch.cat([value.expand(size) for value, size in zip(values, sizes, strict=True)])

    def flat(tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([tensor.reshape(-1) for tensor in tensors])

    beta1, beta2 = group["betas"]
    lr, decay, eps = group["lr"], group["weight_decay"], group["eps"]
    lr = lr.reshape(()).to(weights[0].device, non_blocking=True) if isinstance(lr, Tensor) else lr
    step, there = torch.stack(steps) + torch.stack(presence), spread(torch.stack(presence)) != 0
    wide = torch.promote_types(weights[0].dtype, torch.float32)
    weight, grad, average, square = (flat(tensors).to(wide) for tensors in (weights, grads, averages, squares))
    new_average = average.lerp(grad, 1 - beta1)
    new_square = square * beta2 + (1 - beta2) * grad * grad
    # Of a parameter that was never stepped both are 0, and what is divided by them is not taken.
    rate, scale = lr / (1 - beta1**step), (1 - beta2**step).sqrt()
    stepped = weight * (1 - lr * decay) - spread(rate) * new_average / (new_square.sqrt() / spread(scale) + eps)
    new = [
        torch.where(there, after, before).split(sizes)
        for after, before in ((stepped, weight), (new_average, average), (new_square, square))
    ]
    old = [weights, averages, squares]
    copy_all(
        [tensor.view(-1) for tensors in old for tensor in tensors] + steps,
        [part for parts in new for part in parts] + list(step.unbind()),
    )


def _by_device(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    batches: dict[torch.device, list[nn.Parameter]] = {}
    for parameter in parameters:
        batches.setdefault(local_of(parameter).device, []).append(parameter)
    return list(batches.values())
