"""The records of what ``torch.save`` wrote, read into memory that is there and held against their checksums.

They are those of a zip archive without compression: a few small ones that say what a tensor looks like, and one with
its values. torch writes a CRC-32 for each and its reader looks at none; it makes a new tensor of what it reads, too.
"""

from __future__ import annotations

import ctypes
import io
import sys
import zipfile
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Buffer

_PIECE = 2**20


class Section(io.RawIOBase):
    """A part of a file, as a file of its own."""

    def __init__(self, file: io.BufferedReader, offset: int, length: int) -> None:
        self._file = file
        self._offset = offset
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def readinto(self, buffer: Buffer) -> int:
        self._file.seek(self._offset + self._at)
        count = self._file.readinto(memoryview(buffer)[: max(0, self._length - self._at)])
        self._at += count
        return count


class Records:
    """Of one section; none where it is no zip archive, which is left to torch.

    Every check raises zipfile.BadZipFile where a checksum or a header is wrong, and EOFError where a record is cut
    short. What else damaged headers make of ``zipfile`` (RuntimeError, NotImplementedError, zlib.error) or of
    ``torch.load`` (errors of any kind) comes through.
    """

    def __init__(self, section: Section) -> None:
        self._section = section
        self._archive = zipfile.ZipFile(section) if zipfile.is_zipfile(section) else None
        self._all = [] if self._archive is None else self._archive.infolist()

    def check_tables(self) -> None:
        """All but the values of tensors."""
        for record in self._all:
            if not _holds_values(record):
                self._check(record)

    def check(self) -> None:
        for record in self._all:
            self._check(record)

    def described(self) -> Tensor | None:
        """The one tensor that was saved, on meta, by the tables, which must have been checked.

        None where its bytes are not simply its values in the order of its indices and of this machine.
        """
        if sum(map(_holds_values, self._all)) != 1 or not self._in_our_order():
            return None
        try:
            saved = self._load("meta")
        except NotImplementedError:  # a kind that cannot be on meta: quantized
            return None
        whole = isinstance(saved, Tensor) and is_plain(saved) and saved.untyped_storage().nbytes() == saved.nbytes
        return saved if whole else None

    def read_into_(self, target: Tensor) -> None:
        """The values into ``target``, plain host memory and else as :meth:`described`; no other copy of them is made.

        Raises:
            ValueError: the record is longer or shorter than ``target``.
        """
        assert is_plain(target), "its bytes lie as those of the file"
        assert target.device.type == "cpu", "they are memory of this process"
        assert self._archive is not None, "there are records"
        values = next(record for record in self._all if _holds_values(record))
        if values.file_size != target.nbytes:
            raise ValueError(f"{values.filename} has {values.file_size} bytes, its tensor {target.nbytes}")
        # A buffer without numpy, which torch does not need; the tensor outlives it.
        memory = memoryview((ctypes.c_ubyte * target.nbytes).from_address(target.data_ptr())).cast("B")
        read = 0
        with self._archive.open(values) as stream:  # which compares the checksum at its end
            while piece := stream.read(_PIECE):
                memory[read : read + len(piece)] = piece
                read += len(piece)

    def loaded(self) -> Tensor:
        """As torch reads it, in host memory, without a look at checksums."""
        return self._load("cpu")  # type: ignore[no-any-return]

    def _load(self, device: str) -> Any:
        self._section.seek(0)
        return torch.load(self._section, map_location=device, weights_only=True, mmap=False)  # type: ignore[arg-type]

    def _in_our_order(self) -> bool:
        assert self._archive is not None, "there are records"
        orders = [record for record in self._all if record.filename.endswith("/byteorder")]
        return [self._archive.read(record).decode() for record in orders] == [sys.byteorder]

    def _check(self, record: zipfile.ZipInfo) -> None:
        assert self._archive is not None, "there are records"
        with self._archive.open(record) as stream:
            while stream.read(_PIECE):
                pass


def is_plain(tensor: Tensor) -> bool:
    """Whether its memory is its values in the order of its indices."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)


def _holds_values(record: zipfile.ZipInfo) -> bool:
    return "/data/" in record.filename
