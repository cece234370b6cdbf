"""What one call launches, as a value: kernel, programs, arguments and constants. Imports no triton.

Triton's compiler runs it (``triton_jit``), or a kernel that ships compiled (``aot``): both get the same value.

Legend: B matrices, M rows, K columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dmuon_core.syrk.contract import Scalar
from dmuon_kernels.arrivals import arrival_counters
from dmuon_kernels.probes import interpreter_is_on, tma_complaint
from dmuon_kernels.triton_config import (
    AnyConfig,
    TmaConfig,
    TritonConfig,
    choose_config,
    choose_tma_config,
    count_tiles,
)

POINTERS, DESCRIPTORS = "syrk_kernel", "syrk_tma_kernel"
"""The kernels' names: operands through pointers, and through tensor descriptors."""

INTERPRETED = interpreter_is_on()
_LARGEST_GRID = 2**31 - 1


@dataclass(frozen=True)
class Block:
    """A tensor as the tensor memory engine sees it, moved in boxes.

    Attributes:
        tensor: [B, M, N], row-major.
        shape: of what is described; one matrix where it serves the whole batch.
        strides: likewise, in entries; the last is 1.
        box: entries per dimension that one copy moves.
    """

    tensor: Tensor
    shape: tuple[int, int, int]
    strides: tuple[int, int, int]
    box: tuple[int, int, int]


Argument = Tensor | Block | int | float | None


@dataclass(frozen=True)
class Launch:
    """One launch of a Triton kernel.

    Attributes:
        kernel: :data:`POINTERS` or :data:`DESCRIPTORS`.
        programs: how many run, in one dimension.
        arguments: by the kernel's names and in its order, all that are not constants.
        constants: the ``constexpr`` ones.
        warps: per program.
    """

    kernel: str
    programs: int
    arguments: dict[str, Argument]
    constants: dict[str, int]
    warps: int


@dataclass(frozen=True)
class Scalars:
    """alpha and beta as the kernels take them: a float, or an fp32 tensor with a stride per batch item."""

    alpha: Scalar
    alpha_stride: int
    beta: Scalar
    beta_stride: int

    @classmethod
    def of(cls, alpha: Scalar, beta: Scalar) -> Scalars:
        return cls(*_kernel_scalar(alpha), *_kernel_scalar(beta))


def _kernel_scalar(scalar: Scalar) -> tuple[Scalar, int]:
    if not isinstance(scalar, Tensor):
        return float(scalar), 0
    if scalar.ndim == 0:
        return scalar, 0
    flat_B = scalar.reshape(-1)
    return flat_B, flat_B.stride(0)


@dataclass(frozen=True)
class Operands:
    """What one launch reads and writes. b: None for a. c: None where it is not read."""

    a: Tensor  # [B, M, K]
    b: Tensor | None  # [B, M, K]
    c: Tensor | None  # [B, M, M]
    d: Tensor  # [B, M, M]
    scalars: Scalars


def choose(x: Operands, *, descriptors: bool) -> AnyConfig:
    """The configuration for these operands; with tensor descriptors where the device has them and they serve."""
    batch, m, k = x.a.shape
    if descriptors and tma_complaint(x.a, x.b, x.c, x.d) is None:
        config = choose_tma_config(m, k, batch)
        if config is not None:
            return config
    return choose_config(x.a.dtype, m, k, batch, aligned=all_aligned(x))


def plan(x: Operands, config: AnyConfig, multiprocessors: int, *, sms: int | None = None, tile_step: int = 1) -> Launch:
    """The launch in a configuration of either kernel (:func:`plan_pointers`, :func:`plan_descriptors`)."""
    if isinstance(config, TritonConfig):
        return plan_pointers(x, config, sms=sms, tile_step=tile_step)
    return plan_descriptors(x, config, multiprocessors, sms=sms, tile_step=tile_step)


def plan_pointers(x: Operands, config: TritonConfig, *, sms: int | None = None, tile_step: int = 1) -> Launch:
    """The launch of the kernel with pointers.

    Args:
        x: operands of any alignment, A and B with stride 1 along rows or columns.
        config: tiles and pipeline.
        sms: at most so many programs run, which then loop over the tiles.
        tile_step: permutes the order of the tiles; prime to their number.
    """
    batch, m, k = x.a.shape
    b = x.a if x.b is None else x.b
    # Without C the kernel gets a pointer and strides that it does not use.
    c = x.d if x.c is None else x.c
    tiles = count_tiles(config, m, batch)
    strides = {
        f"{name}_{suffix}": stride
        for name, y, suffixes in (
            ("a", x.a, ("sb", "sm", "sk")),
            ("b", b, ("sb", "sm", "sk")),
            ("c", c, ("sb", "sm", "sn")),
            ("d", x.d, ("sb", "sm", "sn")),
        )
        for suffix, stride in zip(suffixes, y.stride(), strict=True)
    }
    return Launch(
        POINTERS,
        programs=min(tiles, sms or _LARGEST_GRID),
        arguments={
            "a": x.a,
            "b": b,
            "c": c,
            "d": x.d,
            "alpha": x.scalars.alpha,
            "beta": x.scalars.beta,
            "M": m,
            "K": k,
            "tiles": tiles,
            **strides,
            "alpha_sb": x.scalars.alpha_stride,
            "beta_sb": x.scalars.beta_stride,
        },
        constants={
            **_scalar_constants(x),
            # In the interpreter a stride of 1 is not a constant, so it could not be told from a multiple of 8.
            "ALIGNED": not INTERPRETED and all_aligned(x),
            "EVEN_K": k % config.tile_k == 0,
            "TILE_M": config.tile_m,
            "TILE_K": config.tile_k,
            "STAGES": config.stages,
            "TILE_STEP": tile_step,
            "EMULATE": INTERPRETED,
        },
        warps=config.warps,
    )


def _scalar_constants(x: Operands) -> dict[str, int]:
    return {
        "HAS_C": x.c is not None,
        "ALPHA_ON_DEVICE": isinstance(x.scalars.alpha, Tensor),
        "BETA_ON_DEVICE": isinstance(x.scalars.beta, Tensor),
    }


def all_aligned(x: Operands) -> bool:
    return all(is_aligned(y) for y in (x.a, x.b, x.c, x.d) if y is not None)


def is_aligned(x: Tensor) -> bool:
    """Whether x can be loaded and stored in vectors of eight entries."""
    sizes_and_strides = (*x.shape[-2:], *(stride for stride in x.stride() if stride != 1))
    return x.data_ptr() % 16 == 0 and all(number % 8 == 0 for number in sizes_and_strides)


def plan_descriptors(
    x: Operands, config: TmaConfig, multiprocessors: int, *, sms: int | None = None, tile_step: int = 1
) -> Launch:
    """The launch of the kernel with tensor descriptors.

    Args:
        x: operands that ``tma_complaint`` has nothing against.
        config: tiles and pipeline.
        multiprocessors: of the device.
        sms: at most so many multiprocessors are used, by programs that loop over the tiles.
        tile_step: permutes the order of the units; prime to their number.

    Raises:
        ValueError: descriptors do not describe these operands.
    """
    complaint = tma_complaint(x.a, x.b, x.c, x.d)
    if complaint is not None:
        raise ValueError(f"syrk: {config.label} {complaint}")
    batch, m, k = x.a.shape
    tiles = count_tiles(config, m, batch)
    whole = config.whole_tiles(tiles, multiprocessors)
    units = whole + (tiles - whole) * config.split
    partials, arrivals = _workspace(x.d.device, config, tiles - whole)
    b = x.a if x.b is None else x.b
    one_descriptor = x.b is None and config.tile_m == config.tile_n
    return Launch(
        DESCRIPTORS,
        programs=_programs(config, units, multiprocessors, sms),
        arguments={
            "a_desc": _describe_factor(x.a, config.tile_m, config.tile_k),
            "b_desc": None if one_descriptor else _describe_factor(b, config.tile_n, config.tile_k),
            "c_desc": None if x.c is None else _describe(x.c, config.tile_m, config.chunk),
            "d_desc": _describe(x.d, config.tile_m, config.chunk),
            "mirror_desc": _describe(x.d, config.chunk, config.tile_m),
            "d": x.d,
            "partials": partials,
            "arrivals": arrivals,
            "alpha": x.scalars.alpha,
            "beta": x.scalars.beta,
            "M": m,
            "K": k,
            "whole": whole,
            "units": units,
            "a_step": int(not _is_shared(x.a)),
            "b_step": int(not _is_shared(b)),
            "c_step": int(x.c is not None and not _is_shared(x.c)),
            "d_sb": x.d.stride(0),
            "d_sm": x.d.stride(1),
            "alpha_sb": x.scalars.alpha_stride,
            "beta_sb": x.scalars.beta_stride,
        },
        constants=_descriptor_constants(x, config, whole, tiles) | {"UNIT_STEP": tile_step},
        warps=config.warps,
    )


def _descriptor_constants(x: Operands, config: TmaConfig, whole: int, tiles: int) -> dict[str, int]:
    b = x.a if x.b is None else x.b
    return {
        **_scalar_constants(x),
        "A_K_MAJOR": x.a.stride(-1) == 1,
        "B_K_MAJOR": b.stride(-1) == 1,
        "TILE_M": config.tile_m,
        "TILE_N": config.tile_n,
        "TILE_K": config.tile_k,
        "CHUNK": config.chunk,
        "GROUP": config.group,
        "STAGES": config.stages,
        "SPLIT": config.split if whole < tiles else 1,
        "SOME_WHOLE": whole > 0,
        "EMULATE": INTERPRETED,
    }


def _programs(config: TmaConfig, units: int, multiprocessors: int, sms: int | None) -> int:
    if config.persistent:
        sms = min(sms or multiprocessors, multiprocessors)
    return units if sms is None else min(units, sms * config.programs_per_sm)


def _workspace(device: torch.device, config: TmaConfig, split_tiles: int) -> tuple[Tensor | None, Tensor | None]:
    """The partial sums' memory and counters for the tiles that several programs share."""
    if config.split == 1 or split_tiles == 0:
        return None, None
    partials = torch.empty(split_tiles * config.split * config.tile_m * config.tile_n, device=device)
    return partials, arrival_counters(device, split_tiles)


def _is_shared(x: Tensor) -> bool:
    """Whether one matrix serves the whole batch."""
    return x.stride(0) == 0 and x.shape[0] > 1


def _describe_factor(x_BMK: Tensor, tile: int, tile_k: int) -> Block:
    if x_BMK.stride(-1) == 1:
        return _describe(x_BMK, tile, tile_k)
    return _describe(x_BMK.mT, tile_k, tile)


def _describe(x: Tensor, rows: int, columns: int) -> Block:
    """A row-major [B, M, N] in boxes of ``rows`` by ``columns``; a matrix that serves the whole batch alone."""
    batch, m, n = x.shape
    # The strides of dimensions of size 1 say nothing, and a descriptor takes multiples of 16 bytes only.
    row_stride = x.stride(1) if m > 1 else -(-n // 8) * 8
    if batch == 1 or x.stride(0) == 0:
        batch, batch_stride = 1, m * row_stride
    else:
        batch_stride = x.stride(0)
    return Block(x, (batch, m, n), (batch_stride, row_stride, 1), (1, rows, columns))
