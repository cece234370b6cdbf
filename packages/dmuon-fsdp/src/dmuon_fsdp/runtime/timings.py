"""Where the time of a step went: recorded on the compute stream, read when somebody asks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

Mark = float | torch.Event


@dataclass
class Timings:
    """Spans of one step by name; a name may have several.

    On a GPU a span lies between two events of the current stream, so a wait for communication counts with the time in
    which the stream had nothing else to do. On a CPU it is the host's time.
    """

    device: torch.device
    _spans: list[tuple[str, Mark, Mark]] = field(default_factory=list)
    _finished: list[tuple[str, Mark, Mark]] = field(default_factory=list)

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        begin = self._mark()
        yield
        self._spans.append((name, begin, self._mark()))

    def end_step(self) -> None:
        """What was recorded since the last call is the last step's."""
        self._finished, self._spans = self._spans, []

    def milliseconds(self) -> dict[str, float]:
        """Of the last step, by name. Waits for the device."""
        total: dict[str, float] = {}
        for name, begin, end in self._finished:
            total[name] = total.get(name, 0.0) + _elapsed(begin, end)
        return total

    def _mark(self) -> Mark:
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self.device))
        return event


def _elapsed(begin: Mark, end: Mark) -> float:
    if isinstance(begin, torch.Event) and isinstance(end, torch.Event):
        end.synchronize()
        return float(begin.elapsed_time(end))
    assert isinstance(begin, float)
    assert isinstance(end, float)
    return 1e3 * (end - begin)
