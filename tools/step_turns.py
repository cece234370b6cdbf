"""How turns of bench_step.py end, so that a variant that fails ends its own turn alone.

One that fails on every rank is easy. One that fails on some, for want of memory say, leaves the others in a collective
that nobody joins, on a device that does nothing else until its process ends. So ranks tell each other how a turn went
by files, which need no device. Where one stays silent the others leave; torchrun, given ``--max-restarts``, starts all
of them anew, and they find here what is known already and whom to leave out.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

PATIENCE_S = 30.0
"""How long a rank whose turn is over waits for the others: they leave a turn together, or work on what fails there."""


@dataclass(frozen=True)
class Turns:
    """A log of turns, counted from 0, in a folder on this host that outlives the ranks.

    Attributes:
        folder: of this run alone; there it is.
    """

    folder: Path

    def keep(self, done: int, results: Any) -> None:
        """Remember what is known after ``done`` turns. Of rank 0."""
        if dist.get_rank() == 0:
            _write(self.folder / "kept", pickle.dumps((done, results)))

    def kept(self) -> tuple[int, Any] | None:
        """What :meth:`keep` was last given, before a restart; None in a run that was not restarted. Of all ranks."""
        file = self.folder / "kept"
        found = pickle.loads(file.read_bytes()) if file.exists() else None
        dist.barrier()  # nobody goes on to write while another still reads
        return found

    def end(self, turn: int, reason: str, drain: Callable[[], None]) -> str:
        """What kept ranks from finishing the turn; "" if nothing did. Of all ranks, with each one's own reason or "".

        ``drain`` waits for the device. It never returns where that waits for a rank that failed, and so keeps this rank
        silent: a collective left over here would be taken for one of the next turn.

        Does not return where a rank stays silent or has left: this one leaves too.
        """
        rank, ranks = dist.get_rank(), range(dist.get_world_size())
        _write(self._reason(turn, rank), reason.encode())
        drain()
        _write(self._ended(turn, rank), b"")
        deadline = time.monotonic() + PATIENCE_S
        while not all(self._ended(turn, each).exists() for each in ranks):
            if time.monotonic() > deadline:
                self._leave(turn)
            time.sleep(0.02)
        if self._left(turn).exists():
            self._leave(turn)
        return self.said(turn)

    def said(self, turn: int) -> str:
        """What kept ranks from finishing the turn, by their own account."""
        files = {rank: self._reason(turn, rank) for rank in range(dist.get_world_size())}
        said = {rank: file.read_text(encoding="utf-8") for rank, file in files.items() if file.exists()}
        if len(said) == len(files) and len(set(said.values())) == 1:
            return said[0]
        silent = dict.fromkeys(files.keys() - said.keys(), "not a word")
        return "; ".join(f"rank {rank}: {reason}" for rank, reason in sorted((said | silent).items()) if reason)

    def _leave(self, turn: int) -> None:
        _write(self._left(turn), b"")
        print(
            f"rank {dist.get_rank()} leaves a turn that others cannot: {self.said(turn)}. "
            "Under torchrun --max-restarts the rest is measured all the same.",
            flush=True,
        )
        os._exit(1)  # the usual way out waits for the device

    def _reason(self, turn: int, rank: int) -> Path:
        return self.folder / f"turn-{turn}-reason-{rank}"

    def _ended(self, turn: int, rank: int) -> Path:
        return self.folder / f"turn-{turn}-ended-{rank}"

    def _left(self, turn: int) -> Path:
        return self.folder / f"turn-{turn}-left"


def _write(file: Path, content: bytes) -> None:
    """Whole or not at all, for whoever looks meanwhile."""
    unfinished = file.with_name(f"{file.name}-{dist.get_rank()}-unfinished")
    unfinished.write_bytes(content)
    unfinished.replace(file)
