"""Counters for the programs that share a tile: int32, zero between launches, at an address that only one launch uses.

Launches of one stream follow each other, so a stream's launches share counters. A captured launch keeps its own for
good: its graph may be replayed on any stream, beside anything.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

_BANK = 1 << 20
"""Counters per device, 4 MiB: 7,000 captured launches of the largest split product."""

_SHARE = 1 << 12
"""Counters that each stream has for launches outside of a capture."""


class _Bank:
    """One device's counters, given out from the front."""

    def __init__(self, device: torch.device) -> None:
        self.counters = torch.zeros(_BANK, dtype=torch.int32, device=device)
        self.taken = 0
        self.of_stream: dict[int, Tensor] = {}
        # Any stream may be the first to use them.
        torch.cuda.synchronize(device)

    def take(self, count: int) -> Tensor | None:
        # Every share begins at a multiple of 16 bytes: Triton compiles anew for other addresses, which a capture does
        # not survive.
        count = -(-count // 4) * 4
        if self.taken + count > _BANK:
            return None
        self.taken += count
        return self.counters[self.taken - count : self.taken]


_banks: dict[torch.device, _Bank] = {}
_lock = threading.Lock()


def arrival_counters(device: torch.device, count: int) -> Tensor:
    """``count`` counters at zero for a launch on the current stream of ``device``.

    What does not fit into the bank, or is captured before there is one, is zeroed by a launch of its own.
    """
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    capturing = torch.cuda.is_current_stream_capturing()
    with _lock:
        counters = _captured_share(device, count) if capturing else _stream_share(device, count)
    return torch.zeros(count, dtype=torch.int32, device=device) if counters is None else counters


def _captured_share(device: torch.device, count: int) -> Tensor | None:
    bank = _banks.get(device)
    return None if bank is None else bank.take(count)


def _stream_share(device: torch.device, count: int) -> Tensor | None:
    if count > _SHARE:
        return None
    if device not in _banks:
        _banks[device] = _Bank(device)
    bank, stream = _banks[device], torch.cuda.current_stream(device).cuda_stream
    if stream not in bank.of_stream:
        share = bank.take(_SHARE)
        if share is None:
            return None
        bank.of_stream[stream] = share
    return bank.of_stream[stream]
