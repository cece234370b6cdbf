"""What bench_step.py reads out of torch's profiler: exposed communication, and time by kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity


@dataclass(frozen=True)
class Kernel:
    """All launches of one name."""

    name: str
    launches: int
    total_us: float


@dataclass(frozen=True)
class Profile:
    """Of one run. ``busy_ms`` is the time in which any kernel ran; on a CPU the sum over operators."""

    kernels: tuple[Kernel, ...]
    busy_ms: float

    @property
    def kernels_ms(self) -> float:
        """The sum over kernels, more than ``busy_ms`` where streams overlap."""
        return sum(kernel.total_us for kernel in self.kernels) / 1e3


def exposed_communication(run: Callable[[], object]) -> float:
    """Milliseconds of one ``run()`` in which NCCL works and nothing else does; on all ranks."""
    exposed = 0.0
    for start_us, end_us, kinds in _intervals(_traced(run, ProfilerActivity.CUDA)):
        if kinds == {"nccl"}:
            exposed += end_us - start_us
    return exposed / 1e3


def profiled(run: Callable[[], object], device: torch.device) -> Profile:
    """Kernels of one ``run()`` that starts on an idle device, longest first; on all ranks. On a CPU its operators."""
    if device.type == "cpu":
        trace = _traced(run, ProfilerActivity.CPU)
        operators = [
            Kernel(e.key, e.count, e.self_cpu_time_total) for e in trace.key_averages() if not e.is_user_annotation
        ]
        return Profile(_longest_first(operators), sum(o.total_us for o in operators) / 1e3)
    trace = _traced(run, ProfilerActivity.CUDA)
    launches: dict[str, int] = {}
    total_us: dict[str, float] = {}
    for event in _on_device(trace):
        launches[event.name] = launches.get(event.name, 0) + 1
        total_us[event.name] = total_us.get(event.name, 0.0) + event.time_range.elapsed_us()
    kernels = [Kernel(name, count, total_us[name]) for name, count in launches.items()]
    return Profile(_longest_first(kernels), sum(end - start for start, end, _ in _intervals(trace)) / 1e3)


def markdown(profile: Profile, rows: int = 40, width: int = 90) -> str:
    """A table of the longest ``rows`` kernels, names cut at ``width``, and the sums."""
    lines = ["| kernel | launches | total µs |", "|---|---|---|"]
    for kernel in profile.kernels[:rows]:
        name = kernel.name if len(kernel.name) <= width else kernel.name[: width - 1] + "…"
        lines.append(f"| `{name.replace('|', '¦')}` | {kernel.launches} | {kernel.total_us:.1f} |")
    rest = profile.kernels[rows:]
    if rest:
        lines.append(f"| {len(rest)} others | {sum(k.launches for k in rest)} | {sum(k.total_us for k in rest):.1f} |")
    lines.append(f"| all | {sum(k.launches for k in profile.kernels)} | {profile.kernels_ms * 1e3:.1f} |")
    return "\n".join(lines)


def _traced(run: Callable[[], object], activity: ProfilerActivity) -> torch.profiler.profile:
    on_gpu = activity == ProfilerActivity.CUDA
    if on_gpu:
        torch.cuda.synchronize()
    dist.barrier()
    with torch.profiler.profile(activities=[activity]) as trace:
        run()
        if on_gpu:
            torch.cuda.synchronize()
    return trace


def _on_device(trace: torch.profiler.profile) -> list[FunctionEvent]:
    """Kernels and copies; ranges that were named by the program cover them and are left out."""
    return [
        event
        for event in trace.events()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation and event.time_range.elapsed_us() > 0
    ]


def _intervals(trace: torch.profiler.profile) -> Iterator[tuple[float, float, set[str]]]:
    """Start, end and what runs, ``nccl`` or ``other``, of every stretch of time in which anything does."""
    edges: list[tuple[float, int, str]] = []
    for event in _on_device(trace):
        kind = "nccl" if "nccl" in event.name.lower() else "other"
        edges += [(event.time_range.start, 1, kind), (event.time_range.end, -1, kind)]
    running, last = {"nccl": 0, "other": 0}, 0.0
    for time_us, change, kind in sorted(edges):
        kinds = {each for each, count in running.items() if count}
        if kinds:
            yield last, time_us, kinds
        running[kind] += change
        last = time_us


def _longest_first(kernels: list[Kernel]) -> tuple[Kernel, ...]:
    return tuple(sorted(kernels, key=lambda kernel: -kernel.total_us))
