"""AdamW on what a rank holds: FSDP2's shards, whole parameters of an owner, plain ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from dmuon_core.optimizer import adamw_step
from dmuon_fsdp.compat import adamw_if_
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
    lr = group["lr"]
    for parameter, present in conditional.items():
        own = state[parameter]
        adamw_if_(
            present,
            local(parameter),
            local(cast(Tensor, parameter.grad)),
            local(own["exp_avg"]),
            local(own["exp_avg_sq"]),
            own["step"],
            # A copy that waits would make the host wait for the device.
            lr=lr.to(present.device, non_blocking=True) if isinstance(lr, Tensor) else lr,
            betas=group["betas"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
        )


def _by_device(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    batches: dict[torch.device, list[nn.Parameter]] = {}
    for parameter in parameters:
        batches.setdefault(local_of(parameter).device, []).append(parameter)
    return list(batches.values())
