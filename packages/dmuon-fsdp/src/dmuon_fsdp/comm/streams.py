"""Streams and events of one device, or nothing on a CPU: the same code runs on both."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work

_HERE = contextlib.nullcontext()


@dataclass
class Ticket:
    """Asynchronous work, consumed once.

    Attributes:
        event: when the work is done on its stream; None on a CPU.
        works: collectives to wait for on the host; empty on a GPU.
        pinned: what a stream still reads or writes until the event.
    """

    event: torch.Event | None = None
    works: tuple[Work, ...] = ()
    pinned: tuple[Tensor, ...] = ()

    def settle(self) -> None:
        """Make what follows on the current stream come after the work, and let go of what it kept alive."""
        for work in self.works:
            work.wait()
        if self.event is not None:
            torch.accelerator.current_stream(self.event.device).wait_event(self.event)
        self.works = ()
        self.pinned = ()


@dataclass
class Lane:
    """A side stream of ``device``; on a CPU the caller's own line of execution."""

    device: torch.device
    stream: torch.Stream | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.device.type != "cpu":
            # Communication goes first where both have work.
            self.stream = torch.Stream(self.device, priority=-1)

    def running(self) -> AbstractContextManager[Any]:
        """Launch on the lane."""
        return _HERE if self.stream is None else self.stream

    def follow_current(self) -> None:
        """What comes next on the lane waits for what the current stream has so far."""
        if self.stream is not None:
            self.stream.wait_stream(torch.accelerator.current_stream(self.device))

    def follow(self, other: Lane) -> None:
        """What comes next on this lane waits for what ``other`` has so far."""
        if self.stream is not None and other.stream is not None:
            self.stream.wait_stream(other.stream)

    def event(self) -> torch.Event | None:
        return None if self.stream is None else self.stream.record_event()
