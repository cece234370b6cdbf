"""What bench_step.py reads out of torch's profiler: exposed communication, idle time, time by kernel, a trace.

The profiler makes every launch dearer to the host, so that a device waits longer for it than without: idle time is an
upper bound, to be compared between variants. A profiled step starts on an idle device and is waited for, hence
communication at its end counts as exposed also where the next step would hide it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
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


@dataclass(frozen=True)
class Span:
    """One kernel or copy on the device."""

    name: str
    start_us: float
    end_us: float


def step(run: Callable[[], object], device: torch.device, trace_to: Path | None = None) -> dict[str, float]:
    """How one ``run()`` occupies the device, see :func:`occupancy`; nothing on a CPU. To be called on all ranks.

    ``trace_to`` is a file for rank 0's trace, named ``.json.gz``: kernels and launches; on a CPU its operators.
    """
    on_gpu = device.type == "cuda"
    profile = _profile(run, ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU)
    if trace_to is not None and dist.get_rank() == 0:
        trace_to.parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(trace_to))
    return occupancy(_on_device(profile)) if on_gpu else {}


def occupancy(spans: Iterable[Span]) -> dict[str, float]:
    """Milliseconds in which NCCL works and nothing else does, and in which nothing does from first to last span."""
    intervals = list(_intervals(spans))
    if not intervals:
        return {"exposed_communication_ms": 0.0, "idle_ms": 0.0}
    exposed_us = sum(end - start for start, end, kinds in intervals if kinds == {"nccl"})
    whole_us = intervals[-1][1] - intervals[0][0]
    return {"exposed_communication_ms": exposed_us / 1e3, "idle_ms": (whole_us - _busy_us(intervals)) / 1e3}


def profiled(run: Callable[[], object], device: torch.device) -> Profile:
    """Kernels of one ``run()`` that starts on an idle device, longest first; on all ranks. On a CPU its operators."""
    if device.type == "cpu":
        profile = _profile(run, ProfilerActivity.CPU)
        operators = [
            Kernel(e.key, e.count, e.self_cpu_time_total) for e in profile.key_averages() if not e.is_user_annotation
        ]
        return Profile(_longest_first(operators), sum(o.total_us for o in operators) / 1e3)
    spans = _on_device(_profile(run, ProfilerActivity.CUDA))
    launches: dict[str, int] = {}
    total_us: dict[str, float] = {}
    for span in spans:
        launches[span.name] = launches.get(span.name, 0) + 1
        total_us[span.name] = total_us.get(span.name, 0.0) + span.end_us - span.start_us
    kernels = [Kernel(name, count, total_us[name]) for name, count in launches.items()]
    return Profile(_longest_first(kernels), _busy_us(_intervals(spans)) / 1e3)


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


def _profile(run: Callable[[], object], activity: ProfilerActivity) -> torch.profiler.profile:
    on_gpu = activity == ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[activity]):
        pass  # its first start takes a while, and while one rank starts the others would wait in collectives
    if on_gpu:
        torch.cuda.synchronize()
    dist.barrier()
    with torch.profiler.profile(activities=[activity]) as profile:
        run()
        if on_gpu:
            torch.cuda.synchronize()
    return profile


def _on_device(profile: torch.profiler.profile) -> list[Span]:
    """Kernels and copies; ranges that were named by the program cover them and are left out."""
    return [
        Span(event.name, event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation and event.time_range.elapsed_us() > 0
    ]


def _intervals(spans: Iterable[Span]) -> Iterator[tuple[float, float, set[str]]]:
    """Start, end and what runs, ``nccl`` or ``other``, of every stretch of time in which anything does, in order."""
    edges: list[tuple[float, int, str]] = []
    for span in spans:
        kind = "nccl" if "nccl" in span.name.lower() else "other"
        edges += [(span.start_us, 1, kind), (span.end_us, -1, kind)]
    running, last = {"nccl": 0, "other": 0}, 0.0
    for time_us, change, kind in sorted(edges):
        kinds = {each for each, count in running.items() if count}
        if kinds:
            yield last, time_us, kinds
        running[kind] += change
        last = time_us


def _busy_us(intervals: Iterable[tuple[float, float, set[str]]]) -> float:
    return sum(end - start for start, end, _ in intervals)


def _longest_first(kernels: list[Kernel]) -> tuple[Kernel, ...]:
    return tuple(sorted(kernels, key=lambda kernel: -kernel.total_us))
