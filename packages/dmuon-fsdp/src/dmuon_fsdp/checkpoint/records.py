"""The records of what ``torch.save`` wrote, read into memory that is there and held against their checksums.

They are those of a zip archive without compression: a few small ones that say what a tensor looks like, and one with
its values. torch writes a CRC-32 for each and its reader looks at none; it makes a new tensor of what it reads, too.
"""

from __future__ import annotations

import ctypes
import io
import struct
import sys
import zipfile
import zlib
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Buffer

_PIECE = 2**20
_LOCAL_HEADER = struct.Struct("<26xHH")  # before a record's name and its padding: how long they are


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

    Every check raises ValueError or zipfile.BadZipFile where a checksum is wrong.
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
        self._section.seek(0)
        saved = torch.load(self._section, map_location="meta", weights_only=True)  # type: ignore[arg-type]
        whole = saved.is_contiguous() and saved.untyped_storage().nbytes() == saved.nbytes
        return saved if whole else None  # type: ignore[no-any-return]

    def read_into_(self, target: Tensor) -> None:
        """The values into ``target``, contiguous in host memory and else as :meth:`described`; no copy in between."""
        assert target.is_contiguous(), "its bytes lie as those of the file"
        assert target.device.type == "cpu", "they are memory of this process"
        values = next(record for record in self._all if _holds_values(record))
        memory = (ctypes.c_ubyte * target.nbytes).from_address(target.data_ptr())
        self._section.seek(values.header_offset)
        name, padding = _LOCAL_HEADER.unpack(self._section.read(_LOCAL_HEADER.size))
        self._section.seek(name + padding, io.SEEK_CUR)
        if self._section.readinto(memory) != target.nbytes or zlib.crc32(memory) != values.CRC:
            raise ValueError(f"the checksum of {values.filename} is wrong")

    def _in_our_order(self) -> bool:
        assert self._archive is not None, "there are records"
        orders = [record for record in self._all if record.filename.endswith("/byteorder")]
        return [self._archive.read(record).decode() for record in orders] == [sys.byteorder]

    def _check(self, record: zipfile.ZipInfo) -> None:
        assert self._archive is not None, "there are records"
        with self._archive.open(record) as stream:  # which compares at its end
            while stream.read(_PIECE):
                pass


def _holds_values(record: zipfile.ZipInfo) -> bool:
    return "/data/" in record.filename
