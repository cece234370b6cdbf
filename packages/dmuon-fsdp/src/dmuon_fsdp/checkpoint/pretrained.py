"""Pretrained weights from safetensors files: every rank reads its own part, an owner its whole matrices.

Nothing is sent between ranks and nobody holds the model: a part goes from the file into the parameter's memory. The
package ``safetensors`` is imported when this is called.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dmuon_fsdp.checkpoint.model_dict import begin_writing, check_model, wanted_of
from dmuon_fsdp.checkpoint.sources import meet
from dmuon_fsdp.comm.together import all_or_none
from dmuon_fsdp.planning.names import named_places
from dmuon_fsdp.runtime.inference import outside_inference_mode
from dmuon_fsdp.runtime.layout import write_block_

Rename = Callable[[str], str | None]

_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


@outside_inference_mode
def load_pretrained(
    model: nn.Module, path: str | os.PathLike[str], *, rename: Rename | None = None, strict: bool = True
) -> None:
    """Load weights in the safetensors format into the model, on all ranks, each of which reads its own parts.

    Values are cast to the parameters' dtypes. A model on meta is materialised first. Names, shapes and the length of
    every file are checked before anything is written.

    Args:
        path: a ``.safetensors`` file, an index (``*.safetensors.index.json``), or a folder with ``model.safetensors``
            or ``model.safetensors.index.json``; every rank must find it.
        rename: the model's name for a name in the files; None drops that tensor.
        strict: False loads what both have.

    Raises:
        FileNotFoundError: no such files.
        KeyError: names that the files lack, or have and the model does not; all of them. Of the names of a shared
            parameter one is enough.
        ValueError: other shapes; a file that is damaged, or lacks what its index says.
        RuntimeError: the package safetensors is not installed; some ranks did not make this call.
    """
    ranks = meet(model, "dmuon.load_pretrained(model, ...)", writing=True)
    files = all_or_none(lambda: _Files.at(Path(path), rename or str), ranks.groups)
    wanted = wanted_of(model)
    for names in _shared(model):
        if any(name in files.shapes for name in names):
            wanted = {name: shape for name, shape in wanted.items() if name not in names or name in files.shapes}
    all_or_none(lambda: check_model(str(path), model, wanted, files.shapes, strict=strict), ranks.groups)
    targets = begin_writing(model)
    all_or_none(lambda: files.write_into(targets), ranks.groups)


def _shared(model: nn.Module) -> list[list[str]]:
    """The names of every parameter that has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, _, _, parameter in named_places(model):
        names.setdefault(parameter, []).append(name)
    return [each for each in names.values() if len(each) > 1]


class _Files:
    """What is in the files.

    Attributes:
        places: (file, name in it) by the model's name.
        shapes: by the model's name.
    """

    def __init__(self, places: Mapping[str, tuple[Path, str]], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.places = places
        self.shapes = shapes

    @classmethod
    def at(cls, path: Path, rename: Rename) -> _Files:
        """Read every file's header."""
        places: dict[str, tuple[Path, str]] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for file, listed in _listing(path).items():
            with _opened(file) as handle:
                held = set(handle.keys())
                lost = sorted(listed - held)
                if lost:
                    raise ValueError(f"{file} lacks {', '.join(map(repr, lost))}, which its index says are there")
                for saved in sorted(listed or held):
                    name = rename(saved)
                    if name is None:
                        continue
                    if name in places:
                        raise ValueError(f"{saved!r} of {file} and {places[name][1]!r} are both called {name!r}")
                    places[name] = file, saved
                    shapes[name] = tuple(handle.get_slice(saved).get_shape())
        return cls(places, shapes)

    def write_into(self, targets: Mapping[str, Any]) -> None:
        """This rank's part of every target, file by file."""
        by_file: dict[Path, list[tuple[str, str]]] = {}
        for name, (file, saved) in self.places.items():
            if name in targets:
                by_file.setdefault(file, []).append((name, saved))
        for file, entries in by_file.items():
            with _opened(file) as handle:
                for name, saved in entries:
                    write_block_(targets[name], _reader_of(handle, saved))


def _reader_of(handle: Any, saved: str) -> Callable[[torch.Size, torch.Size], Tensor]:
    def read(offsets: torch.Size, sizes: torch.Size) -> Tensor:
        if not offsets:
            return handle.get_tensor(saved)  # type: ignore[no-any-return]
        block = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
        return handle.get_slice(saved)[block]  # type: ignore[no-any-return]

    return read


def _listing(path: Path) -> dict[Path, set[str]]:
    """The names that an index puts into each file; no names where there is no index."""
    if path.is_dir():
        path = path / (_INDEX if (path / _INDEX).is_file() else _FILE)
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is no file: load_pretrained takes a .safetensors file, its index, or a folder with {_FILE} or "
            f"{_INDEX}"
        )
    if path.suffix != ".json":
        return {path: set()}
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
        listing: dict[Path, set[str]] = {}
        for name, file in weight_map.items():
            listing.setdefault(path.parent / file, set()).add(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no index of safetensors files: {error!r}") from error
    return listing


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise RuntimeError(
            "load_pretrained needs the package safetensors: install it, or dmuon-fsdp with its extra 'safetensors'"
        ) from error
    if not file.is_file():
        raise FileNotFoundError(f"{file} is not there, although its index names it")
    try:
        handle = safe_open(file, framework="pt", device="cpu")
    except SafetensorError as error:
        raise ValueError(f"{file} is no safetensors file, or is damaged: {error}") from error
    with handle as opened:
        yield opened
