"""The environment variables of DMuon, all of them, and the only place that reads them.

They are read when an object is constructed, never inside a step.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

NS_KERNEL = "DMUON_NS_KERNEL"
NS_CUDA_GRAPH = "DMUON_NS_CUDA_GRAPH"
CACHE_DIR = "DMUON_CACHE_DIR"

_OFF = ("0", "false", "off", "no")


@dataclass(frozen=True)
class Settings:
    """What the environment asks for.

    Attributes:
        ns_kernel: name of the SYRK backend that replaces ``kernel="auto"``; ``"auto"`` when unset.
        ns_cuda_graph: whether Newton-Schulz replays CUDA graphs; ``DMUON_NS_CUDA_GRAPH=0`` turns that off.
        cache_dir: where measured choices are kept over processes; the user's cache directory when unset.
    """

    ns_kernel: str
    ns_cuda_graph: bool
    cache_dir: Path | None


def read_settings() -> Settings:
    """Read the environment now."""
    return Settings(
        ns_kernel=os.environ.get(NS_KERNEL, "").strip() or "auto",
        ns_cuda_graph=os.environ.get(NS_CUDA_GRAPH, "").strip().lower() not in _OFF,
        cache_dir=_cache_dir(),
    )


def _cache_dir() -> Path | None:
    """None where there is neither a variable nor a home."""
    named = os.environ.get(CACHE_DIR, "").strip()
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME", "").strip()
    try:
        return (Path(base) if base else Path.home() / ".cache") / "dmuon"
    except RuntimeError:
        return None
