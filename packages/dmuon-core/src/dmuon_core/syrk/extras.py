"""What backends bring beside their kernel: each loaded once, checked on the device that it is to run on, and kept."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch

from dmuon_core.notices import warn_once
from dmuon_core.syrk.discovery import describe_error

Extra = TypeVar("Extra")


class CheckedExtras(Generic[Extra]):
    """Extras of one kind, by what they are for; one that fails in any way is None from then on, after a warning."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Hashable, torch.device], Extra | None] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def get(
        self,
        what: Hashable,
        device: torch.device,
        load: Callable[[], Extra],
        complaint_of: Callable[[Extra], str | None],
        *,
        warning: str,
    ) -> Extra | None:
        """``load()``, or None where it fails or has a complaint, or where it is unchecked and must wait.

        A check reads its result, which would end a capture: what was not checked before one is not there inside.

        Args:
            what: the extra's key.
            complaint_of: runs it on ``device`` and says what is wrong with the result.
            warning: what is done without it; the reason follows.
        """
        key = what, device
        with self._lock:
            if key not in self._kept and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return None
            if key not in self._kept:
                self._kept[key] = self._load(load, complaint_of, warning)
            return self._kept[key]

    @staticmethod
    def _load(load: Callable[[], Extra], complaint_of: Callable[[Extra], str | None], warning: str) -> Extra | None:
        try:
            extra = load()
            complaint = complaint_of(extra)
        except Exception as error:
            complaint = f"it failed: {describe_error(error)}"
        if complaint is None:
            return extra
        warn_once(f"dmuon: {warning}: {complaint}")
        return None
