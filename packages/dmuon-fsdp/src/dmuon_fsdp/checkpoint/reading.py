"""What a folder of ``torch.distributed.checkpoint`` holds, and reading it with file and key in an error."""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.futures import Future
from torch.serialization import get_crc32_options

from dmuon_fsdp.checkpoint.records import Records, Section, is_plain
from dmuon_fsdp.checkpoint.sources import Spec
from dmuon_fsdp.comm.together import all_or_none, said, world
from dmuon_fsdp.runtime.routing import cut

_TABLE = ".metadata"
_THREADS = 4
"""That read tensors, of every rank."""


@dataclass(frozen=True)
class Contents:
    """The table of a checkpoint.

    Attributes:
        folder: where it is.
        metadata: torch's.
        specs: shape and dtype by key; None for what is no tensor.
        stamp: of the file, which is another one in a folder that replaces this one.
    """

    folder: Path
    metadata: Metadata
    specs: Mapping[str, Spec | None]
    stamp: tuple[int, ...]

    @classmethod
    def of(cls, folder: Path) -> Contents:
        """Read the table.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is damaged, or none of torch.distributed.checkpoint.
        """
        file = folder / _TABLE
        stamp = _stamp(file)
        try:
            metadata = FileSystemReader(folder).read_metadata()
            specs: dict[str, Spec | None] = {
                key: (tuple(entry.size), entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None
                for key, entry in metadata.state_dict_metadata.items()
            }
            _check_table(metadata)
        except OSError:
            raise
        except Exception as error:  # whatever damaged bytes make of pickle
            raise ValueError(
                f"{file} is no table of torch.distributed.checkpoint, or is damaged: {said(error)}"
            ) from error
        return cls(folder, metadata, specs, stamp)

    def check_unchanged(self) -> None:
        """Raise RuntimeError where the folder is another one by now: what was read since may be of both."""
        try:
            same = _stamp(self.folder / _TABLE) == self.stamp
        except FileNotFoundError:
            same = False
        if not same:
            raise RuntimeError(f"{self.folder} was replaced while it was read; load again")

    @property
    def shapes(self) -> dict[str, tuple[int, ...] | None]:
        return {key: None if spec is None else spec[0] for key, spec in self.specs.items()}

    def check_files(self) -> None:
        """Raise ValueError naming a file that is missing or too short, and the key that is in the missing part."""
        sizes: dict[str, int] = {}
        for index, stored in (self.metadata.storage_data or {}).items():
            file = self.folder / stored.relative_path
            if stored.relative_path not in sizes:
                sizes[stored.relative_path] = file.stat().st_size if file.is_file() else -1
            size = sizes[stored.relative_path]
            if size < stored.offset + stored.length:
                self.check_unchanged()
                what = "is missing" if size < 0 else f"ends after {size} bytes, of {stored.offset + stored.length}"
                raise ValueError(f"{file} {what}: {index.fqn!r} is not there; the checkpoint is damaged")

    def keys_of(self, section: str) -> Iterator[str]:
        return (key for key in self.specs if key.startswith(section))

    def entries(self, section: str) -> dict[str, dict[str, tuple[Any, ...]]]:
        """By name in a section the keys that hold it, each with the place inside: torch takes containers apart."""
        depth = 1 if section else 0
        found: dict[str, dict[str, tuple[Any, ...]]] = {}
        for key in self.keys_of(section):
            path = self._path(key)
            nested = len(path) > depth
            name, place = (str(path[depth]), path[depth + 1 :]) if nested else (key[len(section) :], ())
            found.setdefault(name, {})[key] = place
        return found

    def _path(self, key: str) -> tuple[Any, ...]:
        return tuple((self.metadata.planner_data or {}).get(key, ()))

    def template(self, key: str) -> Any:
        """What to read ``key`` into: host memory for the whole tensor; None for an object."""
        spec = self.specs[key]
        return None if spec is None else torch.empty(spec[0], dtype=spec[1])

    def templates(self, section: str) -> dict[str, Any]:
        return {key: self.template(key) for key in self.keys_of(section)}

    def groups(self, values: Mapping[str, Any], section: str) -> dict[str, Any]:
        """The optimizer's groups as a state dict: a list of dicts, or torch's flattened form.

        Args:
            values: by key ``<section>.<index>.<option>``, or ``<section>.<parameter>.<option>``.
        """
        nested = {self._path(key)[2:]: value for key, value in values.items() if len(self._path(key)) > 3}
        if not nested:
            return {key[len(section) - len("param_groups") :]: value for key, value in values.items()}
        return {"state": {}, "param_groups": [{"params": [], **group} for group in assemble(nested)]}


def _stamp(file: Path) -> tuple[int, ...]:
    found = file.stat()
    return found.st_dev, found.st_ino, found.st_mtime_ns


def _check_table(metadata: Metadata) -> None:
    """Raise where a part of a tensor is missing, or without a place in a file.

    What is not read would be what happened to be in memory, and torch's reader goes through the parts that are there.
    """
    for key, entry in metadata.state_dict_metadata.items():
        places = [MetadataIndex(key)]
        if isinstance(entry, TensorStorageMetadata):
            _check_parts(key, entry)
            places = [MetadataIndex(key, part.offsets) for part in entry.chunks if math.prod(part.sizes)]
        for place in places:
            if place not in metadata.storage_data:
                raise ValueError(f"{key!r} is in no file, or not all of it")
            stored = metadata.storage_data[place]
            if not Path(stored.relative_path).name or stored.offset < 0 or stored.length < 0:
                raise ValueError(f"{key!r} is in no file")
            if Path(stored.relative_path).is_absolute() or ".." in Path(stored.relative_path).parts:
                raise ValueError(f"{key!r} is in {stored.relative_path!r}, which is not in this folder")


def _check_parts(key: str, entry: TensorStorageMetadata) -> None:
    parts = [part for part in entry.chunks if math.prod(part.sizes)]
    for part in parts:
        bounds = zip(part.offsets, part.sizes, entry.size, strict=True)
        if not all(offset >= 0 and size > 0 and offset + size <= whole for offset, size, whole in bounds):
            raise ValueError(f"{key!r} of shape {tuple(entry.size)} has a part outside of it")
    found, wanted = sum(math.prod(part.sizes) for part in parts), math.prod(entry.size)
    if found != wanted:
        raise ValueError(f"{key!r} of shape {tuple(entry.size)} has parts with {found} of {wanted} values")
    if _overlap(parts):  # as many values, so others are in no part
        raise ValueError(f"{key!r} of shape {tuple(entry.size)} has parts that overlap")


def _overlap(parts: Sequence[ChunkStorageMetadata]) -> bool:
    """Whether any two boxes have a place in common; each is compared with those it meets along the finest dimension."""
    if len(parts) < 2:
        return False
    dims = range(len(parts[0].sizes))
    along = max(dims, key=lambda dim: len({part.offsets[dim] for part in parts}))
    near: list[ChunkStorageMetadata] = []
    for part in sorted(parts, key=lambda part: part.offsets[along]):
        near = [other for other in near if _meet(other, part, along)]
        if any(all(_meet(other, part, dim) for dim in dims) for other in near):
            return True
        near.append(part)
    return False


def _meet(one: ChunkStorageMetadata, other: ChunkStorageMetadata, dim: int) -> bool:
    ends = one.offsets[dim] + one.sizes[dim], other.offsets[dim] + other.sizes[dim]
    return one.offsets[dim] < ends[1] and other.offsets[dim] < ends[0]


def assemble(values: Mapping[tuple[Any, ...], Any]) -> Any:
    """The container of which these are the parts by place: numbers count in a list, all else is a key."""
    if list(values) == [()]:
        return values[()]
    inner: dict[Any, dict[tuple[Any, ...], Any]] = {}
    for place, value in values.items():
        inner.setdefault(place[0], {})[place[1:]] = value
    if all(isinstance(key, int) for key in inner):
        return [assemble(inner[index]) for index in sorted(inner)]
    return {key: assemble(parts) for key, parts in inner.items()}


def read(contents: Contents, templates: Mapping[str, Any]) -> dict[str, Any]:
    """The values of these keys: tensors in the templates' memory, objects as they were saved. On all ranks.

    Raises:
        ValueError: a file cannot be read; it and the key are named, on every rank alike.
        RuntimeError: the folder was replaced meanwhile.
    """
    values = dict(templates)
    failure: CheckpointException | None = None
    try:
        load(values, storage_reader=_Reader(contents))
    except CheckpointException as error:
        failure = error
    all_or_none(lambda: _check_read(contents, failure), world())
    return values


def _check_read(contents: Contents, failure: CheckpointException | None) -> None:
    """A folder that was replaced may have failed to be read, or not: its files have the names of the last one."""
    contents.check_unchanged()
    if failure is not None:
        failures = failure.failures
        first = failures[min(failures)][0] if failures else failure
        raise ValueError(str(first) if isinstance(first, ValueError) else said(first)) from failure


class _Reader(FileSystemReader):
    """torch's, item by item, so that a failure has a name, and looking at the checksums, which torch only writes."""

    def __init__(self, contents: Contents) -> None:
        super().__init__(contents.folder)
        self._metadata = contents.metadata
        self._beside = threading.Lock()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The table that was compared with the model, not what stands there by now."""
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Tensors side by side: reading, summing and copying let other threads of Python run."""
        checked = get_crc32_options()  # of this context: the threads have others
        tensors = [item for item in plan.items if item.type is not LoadItemType.BYTE_IO]
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                self._read(item, planner, checked=checked)
        with ThreadPoolExecutor(_THREADS) as pool:
            for _ in pool.map(lambda item: self._read(item, planner, checked=checked), tensors):
                pass  # raises what the item raised
        return super().read_data(replace(plan, items=[]), planner)

    def _read(self, item: ReadItem, planner: LoadPlanner, *, checked: bool) -> None:
        stored = self.storage_data[item.storage_index]
        file = Path(self.path) / stored.relative_path
        try:
            if stored.transform_descriptors:
                super().read_data(LoadPlan([item]), planner)
                return
            # Opened once: what is checked and what is read are the same file, whatever becomes of the folder.
            with file.open("rb") as stream:
                section = Section(stream, stored.offset, stored.length)
                if item.type is LoadItemType.BYTE_IO:
                    _read_object(item, planner, section, checked=checked)
                else:
                    self._read_tensor(item, planner, section, checked=checked)
        except Exception as error:  # whatever a damaged file makes of the reader
            raise ValueError(f"{file}: {item.dest_index.fqn!r} cannot be read: {said(error)}") from error

    def _read_tensor(self, item: ReadItem, planner: LoadPlanner, section: Section, *, checked: bool) -> None:
        """What says how the values are to be understood is checked before, the values where they arrive."""
        records = Records(section)
        saved = None
        if checked:
            records.check_tables()
            saved = records.described()
        target = planner.resolve_tensor(item).detach()
        if saved is not None and (saved.shape, saved.dtype) == (target.shape, target.dtype) and is_plain(target):
            records.read_into_(target)
        else:
            with self._beside:  # one whole record at a time, so that host memory does not grow with the threads
                target.copy_(_part(_whole(records, saved, checked=checked), item))
        planner.commit_tensor(item, target)


def _read_object(item: ReadItem, planner: LoadPlanner, section: Section, *, checked: bool) -> None:
    if checked:
        Records(section).check()
    section.seek(0)
    planner.load_bytes(item, io.BytesIO(section.read()))


def _whole(records: Records, saved: Tensor | None, *, checked: bool) -> Tensor:
    """The record in memory of its own."""
    if saved is None:
        if checked:
            records.check()
        return records.loaded()
    whole = torch.empty_like(saved, device="cpu", requires_grad=False)
    records.read_into_(whole)
    return whole


def _part(whole: Tensor, item: ReadItem) -> Tensor:
    """What the item is about, of the tensor that was saved."""
    part = cut(whole, item.storage_offsets, item.lengths) if whole.ndim else whole
    if part.shape != item.lengths:
        raise ValueError(f"{tuple(whole.shape)} was saved, which has no {tuple(item.lengths)}")
    return part
