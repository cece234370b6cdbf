"""What ships: a launch of every variant that the tables in ``triton_config`` choose, for every architecture."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from dmuon_kernels.aot.variant import Variant, canonical, variant_of
from dmuon_kernels.triton_config import CONFIGS, TmaConfig, choose_tma_config, tma_candidates
from dmuon_kernels.triton_launch import Launch, Operands, Scalars, plan_descriptors, plan_pointers

ARCHITECTURES = (80, 86, 90)
"""Compute capabilities that kernels ship for. 8.0's run on 8.0 only here, 8.6's on 8.6 and 8.9."""

_DTYPES = (torch.float16, torch.bfloat16)
_MULTIPROCESSORS = 132
_SIDES = (33, 64, 256, 512, 513, 768, 1024, 1025, 1536, 2048, 2049, 3072, 4096, 6144, 8191, 8192, 16384)
_COLUMNS = (64, 512, 1024, 2048, 4095, 4096, 8191, 8192, 16384, 65536)
_BATCHES = (1, 2, 3, 4, 8, 16, 64)
"""Shapes on both sides of every border that the tables have, and between."""


def tabled_launches(architecture: int) -> dict[Variant, Launch]:
    """A launch in canonical form for every variant, in a fixed order; its tensors have no memory."""
    launches = itertools.chain(
        _with_pointers(architecture), _with_descriptors() if architecture == 90 else iter(()),
    )  # fmt: skip
    found: dict[Variant, Launch] = {}
    for launch in map(canonical, launches):
        variant = variant_of(launch)
        assert variant is not None, "the operands below have strides that ship"
        found.setdefault(variant, launch)
    return found


def tabled_configs() -> list[TmaConfig]:
    """Every configuration with descriptors that is chosen, or worth timing, for some shape."""
    found: dict[TmaConfig, None] = {}
    for m, k, batch in itertools.product(_SIDES, _COLUMNS, _BATCHES):
        chosen = choose_tma_config(m, k, batch)
        found.update(dict.fromkeys((*(() if chosen is None else (chosen,)), *tma_candidates(m, batch))))
    return list(found)


def _with_pointers(architecture: int) -> Iterator[Launch]:
    for name, config in CONFIGS.items():
        # Entries of K beyond a multiple of the tile are masked, which costs time. Where descriptors run there is no
        # hurry: pointers take what descriptors cannot.
        columns = (config.tile_k + 8, config.tile_k) if architecture < 90 and name != "tiny" else (config.tile_k + 8,)
        for k, aligned in itertools.product(columns, (True, False)):
            if (name == "unaligned" and aligned) or (name in ("small", "large") and not aligned):
                continue
            for x in _operands(64, k if aligned else k + 1, aligned=aligned):
                yield plan_pointers(x, config)


def _with_descriptors() -> Iterator[Launch]:
    for config in tabled_configs():
        for m, batch in ((256, 1), (512, 64)) if config.split > 1 else ((256, 1),):
            for x in _operands(m, 1024, aligned=True, batch=batch):
                yield plan_descriptors(x, config, _MULTIPROCESSORS)
                if config.tail:
                    # As many tiles as multiprocessors: none is left to split.
                    yield plan_descriptors(x, config, 1)


def _operands(m: int, k: int, *, aligned: bool, batch: int = 2) -> Iterator[Operands]:
    """Both dtypes; A row-major with and without C, column-major without; scalars from the host and the device."""
    pad = 0 if aligned else 1
    # Nobody adds C to a product of column-major factors, and on 8.6 the largest tiles would spill.
    forms = ((True, False), (True, True), (False, False))
    for dtype, (k_major, with_c), on_device in itertools.product(_DTYPES, forms, (False, True)):
        scalar = torch.empty(batch, device="meta") if on_device else 1.0
        yield Operands(
            a=_empty(batch, m, k, dtype, pad) if k_major else _empty(batch, k, m, dtype, pad).mT,
            b=None,
            c=_empty(batch, m, m, dtype, pad) if with_c else None,
            d=_empty(batch, m, m, dtype, pad),
            scalars=Scalars.of(scalar, scalar if with_c else 0.0),
        )


def _empty(batch: int, rows: int, columns: int, dtype: torch.dtype, pad: int) -> Tensor:
    return torch.empty(batch, rows, columns + pad, dtype=dtype, device="meta")[..., :columns]
