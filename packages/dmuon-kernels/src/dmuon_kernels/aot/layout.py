"""How a kernel that Triton 3.6 compiled reads its parameters: one buffer, every value at its natural alignment.

A parameter that is a constant (``None``, a ``constexpr``, an integer folded to 1) takes no place. A tensor descriptor
takes a tensor map, then its shape as i32 and its strides as i64, which the kernels read nowhere but Triton passes. Two
pointers to scratch memory follow the parameters; kernels that need none ignore them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from dmuon_kernels.aot.driver import TENSOR_MAP_BYTES

_SCALARS = {"i32": "i", "i64": "q", "fp32": "f"}
_TENSOR_MAP_ALIGNMENT = 64
_SCRATCH = ("Q", "Q")
_SCRATCH_VALUES = (0, 0)


@dataclass(frozen=True)
class Layout:
    """Where the values of a parameter list lie.

    Attributes:
        packer: packs the values of :meth:`pack` in order.
        offsets: of every value, in bytes.
        sizes: of every value, in bytes.
    """

    packer: struct.Struct
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, types: Sequence[str]) -> Layout:
        """The layout of parameters of these Triton types: ``*…``, ``i32``, ``i64``, ``fp32``, ``tensordesc<…[…]>``."""
        text, end = "<", 0
        offsets, sizes = [], []
        for code in (*(code for kind in types for code in _codes(kind)), *_SCRATCH):
            size = struct.calcsize(f"<{code}")
            alignment = min(size, _TENSOR_MAP_ALIGNMENT)
            gap = -end % alignment
            text += f"{gap}x{code}" if gap else code
            offsets.append(end + gap)
            sizes.append(size)
            end += gap + size
        return cls(struct.Struct(text), tuple(offsets), tuple(sizes))

    def pack(self, values: Sequence[float | bytes]) -> bytes:
        """The buffer: a tensor map as bytes, a pointer as an integer.

        Raises:
            struct.error: a value does not fit its type.
        """
        return self.packer.pack(*values, *_SCRATCH_VALUES)


def _codes(kind: str) -> tuple[str, ...]:
    """The struct codes of one parameter."""
    if kind.startswith("*"):
        return ("Q",)
    if kind.startswith("tensordesc<"):
        rank = kind.count(",") + 1
        return (f"{TENSOR_MAP_BYTES}s", *"i" * rank, *"q" * rank)
    return (_SCALARS[kind],)
