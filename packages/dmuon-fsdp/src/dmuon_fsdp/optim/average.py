"""Gradients of parameters that neither an owner nor FSDP2 reduces: averaged in the step, where the user asks for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dmuon_fsdp.comm.groups import Ranks
from dmuon_fsdp.optim.groups import Entry
from dmuon_fsdp.runtime.binding import Registration


def averages_of(entries: Sequence[Entry], policy: str | None, registrations: Sequence[Registration]) -> list[Average]:
    """What the step must average; one for each model.

    Raises:
        ValueError: there is such a parameter and ``policy`` is not ``"average"``; named.
    """
    if policy not in (None, "average"):
        raise ValueError(f"unsynchronized must be None or 'average', got {policy!r}")
    averages = []
    for registration in registrations:
        loose = [entry for entry in entries if entry.home is registration and _is_loose(entry)]
        if loose and registration.ranks.size > 1:
            averages.append(Average(loose, registration.ranks, allowed=policy == "average"))
            averages[-1].check_allowed()
    return averages


def _is_loose(entry: Entry) -> bool:
    return not entry.dedicated and not isinstance(entry.parameter, DTensor)


class Average:
    """The mean over ranks of some gradients, one collective a mesh dimension however many there are."""

    def __init__(self, entries: Sequence[Entry], ranks: Ranks, *, allowed: bool) -> None:
        self.entries = tuple(entries)
        self.ranks = ranks
        self.allowed = allowed

    @property
    def home(self) -> Registration:
        """The model that they belong to."""
        return self.entries[0].home

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that train now: they may be frozen and thawed between steps, on all ranks alike."""
        return [entry.parameter for entry in self.entries if entry.parameter.requires_grad]

    def check_allowed(self) -> None:
        """Raise ValueError where there is something to average and the user did not ask for it."""
        names = [entry.names[0] for entry in self.entries if entry.parameter.requires_grad]
        if names and not self.allowed:
            shown = ", ".join(map(repr, names[:10])) + (", …" if len(names) > 10 else "")
            raise ValueError(
                f"nobody averages the gradients of {shown} over the {self.ranks.size} ranks: neither dedicated nor "
                f"under fully_shard. Call fully_shard on the module that holds them before dmuon.Muon, or pass "
                f"unsynchronized='average' to it"
            )

    def reduce(self) -> None:
        """Every ``.grad`` becomes the mean over ranks, a missing one counted as zero; missing everywhere stays None.

        A rank joins whatever gradients it has, so ranks that differ in them do not wait for each other.
        """
        self.check_allowed()
        parameters = self.parameters
        if not parameters:
            return
        device = parameters[0].device
        grads = [parameter.grad for parameter in parameters]
        # Filled on the device: a copy of the host's numbers would make the host wait.
        present = torch.ones(len(grads), device=device)
        for index, grad in enumerate(grads):
            if grad is None:
                present[index].zero_()
        parts = [
            torch.zeros(parameter.numel(), device=device) if grad is None else grad.flatten().float()
            for parameter, grad in zip(parameters, grads, strict=True)
        ]
        flat = torch.cat([present, *parts])
        for group in self.ranks.groups:
            dist.all_reduce(flat, group=group)
        # Only a rank that misses some must ask whether anybody has them.
        somewhere = flat[: len(grads)].tolist() if any(grad is None for grad in grads) else None
        _deliver(flat[len(grads) :] / self.ranks.size, parameters, somewhere)


def _deliver(mean: Tensor, parameters: Sequence[nn.Parameter], somewhere: list[float] | None) -> None:
    parts = mean.split([parameter.numel() for parameter in parameters])
    for index, (parameter, part) in enumerate(zip(parameters, parts, strict=True)):
        if parameter.grad is not None:
            parameter.grad.copy_(part.view_as(parameter))
        elif somewhere is not None and somewhere[index]:
            parameter.grad = part.view_as(parameter).to(parameter.dtype)
