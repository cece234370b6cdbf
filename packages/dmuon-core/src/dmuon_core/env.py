"""The environment variables of DMuon, all of them, and the only place that reads them.

They are read when an object is constructed, never inside a step.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

NS_KERNEL = "DMUON_NS_KERNEL"


@dataclass(frozen=True)
class Settings:
    """What the environment asks for.

    Attributes:
        ns_kernel: name of the SYRK backend that replaces ``kernel="auto"``; ``"auto"`` when unset.
    """

    ns_kernel: str


def read_settings() -> Settings:
    """Read the environment now."""
    return Settings(ns_kernel=os.environ.get(NS_KERNEL, "").strip() or "auto")
