"""The part of the NVIDIA driver that a shipped kernel needs, through ctypes: load, launch, encode a tensor map.

No compiler and no package beside the driver's own library takes part. Functions and constants as in CUDA's driver API
reference (cuda.h); all of them are in the drivers of CUDA 12.0 and later.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

TENSOR_MAP_BYTES = 128
_TENSOR_MAP_ALIGNMENT = 64

_OUT_OF_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_MAX_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_INTERLEAVE_NONE, _L2_PROMOTION_128B, _OUT_OF_BOUNDS_IS_ZERO = 0, 2, 0

_int, _uint, _size, _pointer = ctypes.c_int, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p
_SIGNATURES: dict[str, list[Any]] = {
    "cuGetErrorName": [_int, ctypes.POINTER(ctypes.c_char_p)],
    "cuGetErrorString": [_int, ctypes.POINTER(ctypes.c_char_p)],
    "cuDeviceGet": [ctypes.POINTER(_int), _int],
    "cuDevicePrimaryCtxRetain": [ctypes.POINTER(_pointer), _int],
    "cuCtxSetCurrent": [_pointer],
    "cuLibraryLoadData": [ctypes.POINTER(_pointer), ctypes.c_char_p, *[_pointer] * 2, _uint, *[_pointer] * 2, _uint],
    "cuLibraryGetKernel": [ctypes.POINTER(_pointer), _pointer, ctypes.c_char_p],
    "cuKernelSetAttribute": [_int, _int, _pointer, _int],
    "cuLaunchKernel": [_pointer, *[_uint] * 6, _uint, _pointer, _pointer, _pointer],
    "cuTensorMapEncodeTiled": [_pointer, _int, _uint, _pointer, *[_pointer] * 4, *[_int] * 4],
}


class DriverError(RuntimeError):
    """A call of the driver failed: which one, and what the driver calls the failure."""

    def __init__(self, function: str, code: int) -> None:
        super().__init__(f"{function} failed: {_name_of(code)}")
        self.code = code


def _name_of(code: int) -> str:
    texts = []
    for function in ("cuGetErrorName", "cuGetErrorString"):
        text = ctypes.c_char_p()
        functions()[function](code, ctypes.byref(text))
        texts.append((text.value or b"").decode())
    return f"{code} {texts[0]} ({texts[1]})"


@functools.cache
def functions() -> dict[str, Callable[..., int]]:
    """The driver's functions by name, typed.

    Raises:
        OSError: there is no driver, or it is older than CUDA 12.0.
    """
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    loaded = ctypes.CDLL(name)
    typed: dict[str, Callable[..., int]] = {}
    for function, arguments in _SIGNATURES.items():
        try:
            # One object a name: indexing makes a new one, without types, each time.
            found = loaded[function]
        except AttributeError as error:
            raise OSError(f"{name} has no {function}: it is older than CUDA 12.0; install a newer driver") from error
        found.argtypes, found.restype = arguments, ctypes.c_int
        typed[function] = found
    return typed


def _call(function: str, *arguments: object) -> None:
    code = functions()[function](*arguments)
    if code:
        raise DriverError(function, code)


class Kernel:
    """A function of a cubin, loaded for every device whose architecture it fits.

    Args:
        image: the cubin, or PTX.
        entry: the function's name in it.
        parameter_bytes: size of the buffer that holds its parameters at a launch.
        offsets: of each parameter in that buffer.
        threads: per program (block).
        shared: bytes of dynamic shared memory per program.

    Raises:
        DriverError: the driver does not take the image, or it has no such function.
    """

    def __init__(
        self, image: bytes, entry: str, *, parameter_bytes: int, offsets: Sequence[int], threads: int, shared: int
    ) -> None:
        self.entry, self.threads, self.shared = entry, threads, shared
        self._parameter_bytes, self._offsets = parameter_bytes, offsets
        self.handle = _pointer()
        loaded = _pointer()
        _call("cuLibraryLoadData", ctypes.byref(loaded), image, None, None, 0, None, None, 0)
        _call("cuLibraryGetKernel", ctypes.byref(self.handle), loaded, entry.encode())
        self._ready: set[int] = set()
        self._frames = threading.local()

    def launch(self, parameters: bytes, programs: int, device: int, stream: int) -> None:
        """Enqueue ``programs`` programs on a stream (its handle) of the current device, whose index is ``device``."""
        if device not in self._ready:
            self.prepare(device)
        frame = self._frame()
        ctypes.memmove(frame.parameters, parameters, self._parameter_bytes)
        code = self._enqueue(frame, programs, stream)
        if code == _OUT_OF_CONTEXT:
            # A thread that has not called CUDA yet has no current context; torch's is the device's primary one.
            _enter_primary_context(device)
            code = self._enqueue(frame, programs, stream)
        if code:
            raise DriverError(f"cuLaunchKernel of {self.entry}", code)

    def prepare(self, device: int) -> None:
        """What a device's first launch needs; a driver that loads late says here that it cannot.

        Raises:
            DriverError: the function does not run there.
        """
        ordinal = _int()
        _call("cuDeviceGet", ctypes.byref(ordinal), device)
        _call("cuKernelSetAttribute", _MAX_DYNAMIC_SHARED_BYTES, self.shared, self.handle, ordinal)
        self._ready.add(device)

    def _enqueue(self, frame: _Frame, programs: int, stream: int) -> int:
        return functions()["cuLaunchKernel"](
            self.handle, programs, 1, 1, self.threads, 1, 1, self.shared, stream, frame.pointers, None
        )

    def _frame(self) -> _Frame:
        # ctypes lets go of the interpreter's lock during a call, so threads do not share what a call reads.
        try:
            frame: _Frame = self._frames.value
        except AttributeError:
            frame = self._frames.value = _Frame(self._parameter_bytes, self._offsets)
        return frame


class _Frame:
    """Memory for one launch's parameters, and a pointer to each, which is how the driver takes them.

    It knows where the compiled function wants them: on SM90 a tensor map moves everything behind it.
    """

    def __init__(self, size: int, offsets: Sequence[int]) -> None:
        self.parameters = ctypes.create_string_buffer(size)
        start = ctypes.addressof(self.parameters)
        self.pointers = (_pointer * len(offsets))(*(start + offset for offset in offsets))


def _enter_primary_context(device: int) -> None:
    ordinal, context = _int(), _pointer()
    _call("cuDeviceGet", ctypes.byref(ordinal), device)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
    _call("cuCtxSetCurrent", context)


@functools.lru_cache(maxsize=4096)
def encode_tensor_map(
    address: int,
    shape: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    *,
    element_type: int,
    element_bytes: int,
    swizzle: int,
) -> bytes:
    """A CUtensorMap: 128 bytes that tell the tensor memory engine how a tensor lies in memory.

    Args:
        address: of the first element; a multiple of 16.
        shape: entries per dimension, outermost first.
        strides: entries from one element to the next, likewise; the last is 1.
        box: entries per dimension that one copy moves.
        element_type: CUtensorMapDataType.
        element_bytes: bytes per entry.
        swizzle: CUtensorMapSwizzle.

    Raises:
        DriverError: the driver does not take this combination.
    """
    rank = len(shape)
    memory = ctypes.create_string_buffer(TENSOR_MAP_BYTES + _TENSOR_MAP_ALIGNMENT)
    start = -(-ctypes.addressof(memory) // _TENSOR_MAP_ALIGNMENT) * _TENSOR_MAP_ALIGNMENT
    dimensions = (ctypes.c_uint64 * rank)(*reversed(shape))
    in_bytes = (ctypes.c_uint64 * rank)(*(stride * element_bytes for stride in reversed(strides[:-1])))
    _call(
        "cuTensorMapEncodeTiled", start, element_type, rank, address, dimensions, in_bytes,
        (ctypes.c_uint32 * rank)(*reversed(box)), (ctypes.c_uint32 * rank)(*[1] * rank),
        _INTERLEAVE_NONE, swizzle, _L2_PROMOTION_128B, _OUT_OF_BOUNDS_IS_ZERO,
    )  # fmt: skip
    return ctypes.string_at(start, TENSOR_MAP_BYTES)
