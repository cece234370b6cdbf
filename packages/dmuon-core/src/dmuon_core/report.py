"""What really runs, in words: the line users paste into bug reports, and every backend with its reason."""

from __future__ import annotations

from typing import Protocol, TypedDict, runtime_checkable

import torch

from dmuon_core.newton_schulz import NewtonSchulz
from dmuon_core.syrk.contract import SyrkSpec
from dmuon_core.syrk.discovery import describe_error
from dmuon_core.syrk.ladder import KernelChoice, Rung, default_device, survey


@runtime_checkable
class HasNewtonSchulz(Protocol):
    """An optimizer that orthogonalizes."""

    newton_schulz: NewtonSchulz


class BackendStatus(TypedDict):
    """One backend on one device; ``reason`` is empty where it is available, ``notes`` may then say how it runs."""

    available: bool
    reason: str
    distribution: str
    notes: str


def get_backend_status(device: torch.device | str | None = None) -> dict[str, BackendStatus]:
    """Every known SYRK backend, best first, on ``device`` (None: the current CUDA device, else the CPU). Loads none."""
    where = default_device() if device is None else torch.device(device)
    return {rung.name: _status(rung, where) for rung in survey(where)}


def _status(rung: Rung, device: torch.device) -> BackendStatus:
    notes = ""
    if rung.spec is not None:
        try:
            notes = rung.spec.notes(device)
        except Exception as error:
            notes = f"its notes failed: {describe_error(error)}"
    return BackendStatus(
        available=rung.spec is not None, reason=rung.reason, distribution=rung.distribution, notes=notes
    )


def get_ns_backend(optimizer: HasNewtonSchulz | NewtonSchulz | None = None) -> str:
    """The Newton-Schulz form and the kernel that runs, such as ``Gram NS · kernel=triton (SM90, DMuon internal)``.

    Args:
        optimizer: a Muon, or a NewtonSchulz; after a step the line names the kernel that ran most and adds the launches
            counted, and says "Gram and direct" where nearly square matrices took the direct form. Products that are
            computed whole are not counted. None: what a new optimizer would take on the current device.
    """
    if optimizer is None:
        return _line("Gram", KernelChoice.of("auto").expected(default_device()), default_device())
    if not isinstance(optimizer, (HasNewtonSchulz, NewtonSchulz)):
        raise TypeError(f"get_ns_backend takes a Muon or a NewtonSchulz, got {type(optimizer).__name__}")
    ns = optimizer if isinstance(optimizer, NewtonSchulz) else optimizer.newton_schulz
    form = "Gram and direct" if {ns.backend, *ns.forms} == {"gram", "direct"} else ns.backend.capitalize()
    if not ns.kernel.launches:
        device = _home(optimizer)
        return _line(form, ns.kernel.expected(device), device)
    counts = ns.kernel.launches.most_common()
    spec, device = ns.kernel.ran[counts[0][0]]
    return f"{_line(form, spec, device)} · launches: {', '.join(f'{name} {count}' for name, count in counts)}"


def _home(optimizer: object) -> torch.device:
    """Where an optimizer's matrices are; for anything else the default device."""
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else []
    devices = (p.device for group in groups for p in group["params"] if p.ndim >= 2)
    return next(devices, default_device())


def _line(form: str, spec: SyrkSpec, device: torch.device) -> str:
    return f"{form} NS · kernel={spec.name} ({architecture(device)}, {spec.origin})"


def architecture(device: torch.device) -> str:
    """``SM90`` for a CUDA device, ``CPU`` for the CPU, else the device type in capitals."""
    if device.type != "cuda":
        return device.type.upper()
    major, minor = torch.cuda.get_device_capability(device)
    return f"SM{major}{minor}"
