"""Launches by kernels that ship compiled: found by what a launch needs, loaded at their first use, then kept."""

from __future__ import annotations

import functools
import importlib.util
import threading
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from dmuon_core.notices import warn_once
from dmuon_kernels.aot import driver
from dmuon_kernels.aot.layout import Layout
from dmuon_kernels.aot.manifest import (
    ARCHITECTURE_OF,
    THREADS_PER_WARP,
    Artefact,
    TensorMap,
    read_cubin,
    read_manifest,
    source_hashes,
)
from dmuon_kernels.aot.variant import Variant, canonical, variant_of
from dmuon_kernels.compat import current_stream_handle
from dmuon_kernels.triton_launch import INTERPRETED, Argument, Block, Launch


class ShippedKernel:
    """One artefact in the driver's hands, and how a launch's arguments become its parameters."""

    def __init__(self, artefact: Artefact, image: bytes) -> None:
        self.layout = Layout.of(list(artefact.parameters.values()))
        self._readers = [_reader(name, kind, artefact.tensor_maps) for name, kind in artefact.parameters.items()]
        self._kernel = driver.Kernel(
            image,
            artefact.variant.kernel,
            parameter_bytes=self.layout.packer.size,
            offsets=self.layout.offsets,
            threads=artefact.variant.warps * THREADS_PER_WARP,
            shared=artefact.shared,
        )

    def prepare(self, device: int) -> None:
        """Load for the device with this index.

        Raises:
            driver.DriverError: it does not run there.
        """
        self._kernel.prepare(device)

    def launch(self, launch: Launch, device: int) -> None:
        """Enqueue on the current stream of the current device, whose index is ``device``."""
        values: list[float | bytes] = []
        for name, read in self._readers:
            read(values, launch.arguments[name])
        self._kernel.launch(self.layout.pack(values), launch.programs, device, current_stream_handle(device))


_Reader = Callable[[list[float | bytes], Argument], None]


def _reader(name: str, kind: str, maps: dict[str, TensorMap]) -> tuple[str, _Reader]:
    """What appends an argument's values, in the order of ``layout``."""
    if name in maps:
        return name, functools.partial(_read_block, maps[name])
    return name, _read_tensor if kind.startswith("*") else _read_number


def _read_block(tensor_map: TensorMap, values: list[float | bytes], block: Argument) -> None:
    assert isinstance(block, Block), "a descriptor's argument is a block"
    encoded = driver.encode_tensor_map(
        block.tensor.data_ptr(),
        block.shape,
        block.strides,
        tensor_map.box,
        element_type=tensor_map.element_type,
        element_bytes=tensor_map.element_bytes,
        swizzle=tensor_map.swizzle,
    )
    values += (encoded, *block.shape, *block.strides)


def _read_tensor(values: list[float | bytes], tensor: Argument) -> None:
    assert isinstance(tensor, Tensor), "a pointer's argument is a tensor"
    values.append(tensor.data_ptr())


def _read_number(values: list[float | bytes], number: Argument) -> None:
    assert isinstance(number, (int, float)), "a number's argument is a number"
    values.append(number)


_loading = threading.Lock()
_loaded: dict[tuple[int, Variant], ShippedKernel] = {}
_broken: dict[int, str] = {}
"""Architecture to the reason why the first of its kernels did not load."""


def complaint(device: torch.device) -> str | None:
    """Why no shipped kernel runs on a CUDA device, or None."""
    if INTERPRETED:
        return "Triton's interpreter is on"
    capability = torch.cuda.get_device_capability(device)
    architecture = ARCHITECTURE_OF.get(capability)
    if architecture is None:
        return f"none ship for compute capability {capability[0]}.{capability[1]}"
    return _broken.get(architecture) or _installation_complaint(architecture)


def _installation_complaint(architecture: int) -> str | None:
    if importlib.util.find_spec("_lzma") is None:
        return "this Python was built without lzma, which unpacks them"
    try:
        manifest, sources = read_manifest(), source_hashes()
        driver.functions()
    except (OSError, ValueError) as error:
        return str(error)
    if manifest is None or architecture not in manifest.artefacts:
        return f"this installation carries none for sm_{architecture}"
    if manifest.sources != sources:
        return "they were built from other sources than the installed ones; run tools/build_cubins.py"
    return None


def find(launch: Launch, device: torch.device) -> tuple[ShippedKernel, Launch] | None:
    """The shipped kernel for a launch on ``device`` and the launch in its form; None where none ships.

    Raises:
        driver.DriverError, ValueError: a kernel does not load though others did.
    """
    architecture = _usable_architecture(device)
    if architecture is None or architecture in _broken:
        return None
    launch = canonical(launch)
    kernel = _kernel_for(architecture, launch, device)
    return None if kernel is None else (kernel, launch)


@functools.cache
def _usable_architecture(device: torch.device) -> int | None:
    if device.type != "cuda" or complaint(device) is not None:
        return None
    return ARCHITECTURE_OF[torch.cuda.get_device_capability(device)]


def _kernel_for(architecture: int, launch: Launch, device: torch.device) -> ShippedKernel | None:
    variant = variant_of(launch)
    if variant is None:
        return None
    kernel = _loaded.get((architecture, variant))
    return _look_up(architecture, variant, device) if kernel is None else kernel


def _look_up(architecture: int, variant: Variant, device: torch.device) -> ShippedKernel | None:
    manifest = read_manifest()
    assert manifest is not None, "an architecture is usable only with a manifest"
    for candidate in (variant, _masking_k(variant)):
        artefact = manifest.artefacts[architecture].get(candidate)
        if artefact is not None:
            return _load(architecture, variant, artefact, device)
    return None


def _masking_k(variant: Variant) -> Variant:
    """The variant that takes every K, where this one takes multiples of its tile alone."""
    constants = {name: value for name, value in variant.constants if name != "EVEN_K"}
    if len(constants) < len(variant.constants):
        constants["EVEN_K"] = False
    return replace(variant, constants=frozenset(constants.items()))


def _load(architecture: int, variant: Variant, artefact: Artefact, device: torch.device) -> ShippedKernel | None:
    """The artefact's kernel, kept under the name of the variant that it stands for."""
    key = (architecture, variant)
    with _loading:
        if key not in _loaded:
            try:
                kernel = ShippedKernel(artefact, read_cubin(architecture, artefact))
                kernel.prepare(torch.cuda.current_device() if device.index is None else device.index)
                _loaded[key] = kernel
            except Exception as error:
                if any(loaded == architecture for loaded, _ in _loaded):
                    raise
                _broken[architecture] = f"the first one did not load: {error}"
                warn_once(f"dmuon: the kernels that ship for sm_{architecture} are left out: {error}")
                return None
        return _loaded[key]
