"""Which kernel is fastest for which operands: what was measured here, what ships, and where it is kept.

A verdict holds for a machine: device, multiprocessors, driver and the versions of everything that makes kernels. Of
one machine all verdicts are in one JSON file under ``DMUON_CACHE_DIR``, written whole and renamed into place, so that
a reader sees the old file or the new one. A file that cannot be read, written or understood is left alone: the process
then goes by what it measured itself.

Legend: B matrices, M rows, K columns, as in ``dmuon_core.syrk.contract``.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dmuon_core.env import read_settings
from dmuon_core.notices import warn_once
from dmuon_core.syrk.discovery import describe_error, discover

FORMAT = 1
BMM = "bmm"
"""What a verdict on a whole product calls ``torch.bmm``."""

_EXACT_BATCHES = 4
_MAKERS = ("torch", "triton", "quack-kernels", "nvidia-cutlass-dsl")


@dataclass(frozen=True)
class Verdict:
    """The fastest kernel for some operands.

    Attributes:
        kernel: a backend's name.
        config: one of the backend's configurations, or None for its own choice.
        microseconds: what one product took; None where unknown.
    """

    kernel: str
    config: str | None = None
    microseconds: float | None = None


def operands_key(a: Tensor, b: Tensor | None, c: Tensor | None, *, exact: bool = True) -> str:
    """What a choice depends on, as ``float16 k · c 16x1024x4096``: dtype, majors of A and B, whether C, sizes.

    A ``~`` follows where D need not equal its transpose bitwise and a kernel might make use of that.
    """
    m, k = a.shape[-2:]
    second = "·" if b is None else _major(b)
    dtype = str(a.dtype).removeprefix("torch.")
    loose = "" if exact or (b is None and c is None) else " ~"
    return (
        f"{dtype} {_major(a)} {second} {'·' if c is None else 'c'} {batch_class(a.shape[:-2].numel())}x{m}x{k}{loose}"
    )


def product_key(a_BMK: Tensor, b_BKN: Tensor) -> str:
    """Of a whole product A B: ``float16 k k product 16x1024x1024x4096``, majors as the rows lie, sizes B, M, K, N."""
    dtype = str(a_BMK.dtype).removeprefix("torch.")
    batch, m, k = a_BMK.shape
    sizes = f"{batch_class(batch)}x{m}x{k}x{b_BKN.shape[2]}"
    return f"{dtype} {_major(a_BMK)} {_major(b_BKN)} product {sizes}"


def _major(x: Tensor) -> str:
    return "k" if x.stride(-1) == 1 or x.stride(-2) != 1 else "m"


def batch_class(batch: int) -> int:
    """Batches that share a verdict: 1 to 4 have their own, then up to the next power of two."""
    return batch if batch <= _EXACT_BATCHES else 1 << (batch - 1).bit_length()


@functools.cache
def machine(device: torch.device) -> str:
    """What a measurement holds for, in words."""
    if device.type != "cuda":
        return f"{device.type} · {_versions()}"
    properties = torch.cuda.get_device_properties(device)
    return f"{hardware(device)} · SM{properties.major}{properties.minor} · {_driver()} · {_versions()}"


def _driver() -> str:
    """The major version of CUDA that the driver speaks; torch has no public name for it."""
    version = ctypes.c_int(0)
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return "driver unknown"
    return "driver unknown" if failed else f"driver CUDA {version.value // 1000}"


def hardware(device: torch.device) -> str:
    """What a shipped verdict holds for, in words."""
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name} · {properties.multi_processor_count} SMs"


def _versions() -> str:
    found = []
    for name in _MAKERS:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found + sorted({each.distribution for each in discover()}))


class _Book:
    """The verdicts of this process, by machine and operands."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.epoch = 0
        self._pages: dict[str, dict[str, Verdict]] = {}

    def page(self, name: str) -> dict[str, Verdict]:
        """The verdicts of one machine, read from its file the first time."""
        if name not in self._pages:
            self._pages[name] = _read(name)
        return self._pages[name]

    def add(self, name: str, verdicts: Mapping[str, Verdict]) -> None:
        self.page(name).update(verdicts)
        self.epoch += 1

    def replace(self, pages: dict[str, dict[str, Verdict]]) -> None:
        self._pages.update(pages)
        self.epoch += 1


_book = _Book()


def epoch() -> int:
    """Changes with every new verdict."""
    return _book.epoch


def find(device: torch.device, key: str) -> tuple[Verdict, ...]:
    """What was measured on this machine, else what ships for this hardware, best first: one for each kernel."""
    with _book.lock:
        measured = _book.page(machine(device)).get(key)
    if measured is not None:
        return (measured,)
    return _shipped(hardware(device)).get(key, ()) if device.type == "cuda" else ()


def add(device: torch.device, verdicts: Mapping[str, Verdict], *, keep: bool = True) -> None:
    """Take verdicts for this process and, with ``keep``, for later ones."""
    name = machine(device)
    with _book.lock:
        _book.add(name, verdicts)
        if keep:
            _write(name, _book.page(name))


def export_verdicts() -> dict[str, Any]:
    """Every verdict this process has measured or read, as plain data for :func:`use_verdicts` or JSON."""
    with _book.lock:
        return {
            "format": FORMAT,
            "machines": {
                name: {key: asdict(verdict) for key, verdict in page.items()} for name, page in _book._pages.items()
            },
        }


def use_verdicts(verdicts: Mapping[str, Any]) -> None:
    """Go by ``verdicts`` of :func:`export_verdicts` for their machines from now on, in this process alone.

    The same on every rank makes the same choice on every rank.

    Raises:
        ValueError: not of this version's form.
    """
    try:
        if verdicts["format"] != FORMAT:
            raise ValueError(f"format {verdicts['format']!r}")
        pages = {str(name): _parse(page) for name, page in verdicts["machines"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"use_verdicts takes what export_verdicts returned, of format {FORMAT}: {describe_error(error)}"
        ) from error
    with _book.lock:
        _book.replace(pages)


def _parse(page: Mapping[str, Any]) -> dict[str, Verdict]:
    return {str(key): _checked(Verdict(**value)) for key, value in page.items()}


def _checked(verdict: Verdict) -> Verdict:
    """Times are compared and names looked up in the middle of a step."""
    right = (
        isinstance(verdict.kernel, str)
        and isinstance(verdict.config, (str, type(None)))
        and isinstance(verdict.microseconds, (int, float, type(None)))
    )
    if not right:
        raise TypeError(f"{verdict} has a value of another type")
    return verdict


def _file(name: str) -> Path | None:
    folder = read_settings().cache_dir
    return None if folder is None else folder / f"verdicts-{hashlib.sha256(name.encode()).hexdigest()[:16]}.json"


def _read(name: str) -> dict[str, Verdict]:
    path = _file(name)
    try:
        if path is None or not path.exists():
            return {}
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT or content["machine"] != name:
            raise ValueError("written for another machine or by another version")
        return _parse(content["verdicts"])
    except Exception as error:
        warn_once(f"dmuon: kernel choices in {path} are ignored: {describe_error(error)}")
        return {}


def _write(name: str, page: Mapping[str, Verdict]) -> None:
    path = _file(name)
    if path is None:
        return
    content = {"format": FORMAT, "machine": name, "verdicts": {key: asdict(page[key]) for key in sorted(page)}}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(content, file, indent=1)
            os.replace(draft, path)
        except BaseException:
            os.unlink(draft)
            raise
    except OSError as error:
        warn_once(f"dmuon: kernel choices stay in this process, {path} cannot be written: {describe_error(error)}")


@functools.cache
def _shipped(name: str) -> dict[str, tuple[Verdict, ...]]:
    """Of every kernel its best configuration, as ``[kernel, config, microseconds]``."""
    text = resources.files("dmuon_core.syrk").joinpath("shipped_verdicts.json").read_text(encoding="utf-8")
    page = json.loads(text)["hardware"].get(name, {})
    return {str(key): tuple(Verdict(*row) for row in rows) for key, rows in page.items()}
