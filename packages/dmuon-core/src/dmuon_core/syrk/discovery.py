"""Finding backends: the two built in, and whatever installed distributions offer under the entry-point group.

An optional package may be broken in any way (missing symbol, wrong version, an assertion in its own import): each
failure becomes a reason that users can read, never an exception here.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib import metadata

from dmuon_core.notices import warn_once
from dmuon_core.syrk.builtin import CUBLAS, TORCH
from dmuon_core.syrk.contract import API, ENTRY_POINT_GROUP, SyrkSpec


@dataclass(frozen=True)
class Found:
    """One name in the registry.

    Attributes:
        name: the backend's name.
        distribution: "dmuon-kernels 0.1.0", who offers it.
        spec: the backend, or None when it cannot be used.
        reason: why ``spec`` is None, else empty.
    """

    name: str
    distribution: str
    spec: SyrkSpec | None
    reason: str = ""


@functools.cache
def discover() -> tuple[Found, ...]:
    """Every known backend, highest priority first. Cached: ``discover.cache_clear()`` after installing a package."""
    own = _distribution_label("dmuon-core")
    found = {spec.name: Found(spec.name, own, spec) for spec in (CUBLAS, TORCH)}
    for entry in sorted(metadata.entry_points(group=ENTRY_POINT_GROUP), key=lambda e: (e.name, e.value)):
        candidate = _load(entry, own)
        taken = found.get(candidate.name)
        if taken is None or (taken.spec is None and candidate.spec is not None):
            found[candidate.name] = candidate
        elif taken.distribution != candidate.distribution:
            label = f"{candidate.name}@{candidate.distribution}"
            found[label] = Found(label, candidate.distribution, None, f"the name is taken by {taken.distribution}")
    return tuple(sorted(found.values(), key=_ladder_order))


def _ladder_order(found: Found) -> tuple[int, str]:
    return (-found.spec.priority if found.spec else 1, found.name)


def _load(entry: metadata.EntryPoint, own: str) -> Found:
    who = f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value
    try:
        spec = entry.load()
    except Exception as error:
        warn_once(f"dmuon: the kernels of {who} are left out, its import failed: {describe_error(error)}")
        return Found(entry.name, who, None, f"{who} failed to import: {describe_error(error)}")
    if not isinstance(spec, SyrkSpec):
        return Found(entry.name, who, None, f"{who} offers a {type(spec).__name__} where a SyrkSpec is expected")
    if spec.api != API:
        return Found(
            entry.name,
            who,
            None,
            f"{who} is written for kernel contract {spec.api}, {own} has {API}: install versions that match",
        )
    return Found(spec.name, who, spec)


def _distribution_label(name: str) -> str:
    try:
        return f"{name} {metadata.version(name)}"
    except metadata.PackageNotFoundError:
        return f"{name} (not installed, imported from source)"


def describe_error(error: BaseException) -> str:
    """``ImportError: no module named x``, on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
