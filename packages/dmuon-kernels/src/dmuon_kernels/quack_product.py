"""The adapter to quack's general product. Importing this module imports quack and CUTLASS's DSL.

Legend: B matrices, M rows, N columns, K columns of A and rows of B.
"""

from __future__ import annotations

import contextlib

import torch
from quack.gemm import gemm
from torch import Tensor

from dmuon_kernels.quack_config import parse_product_config


def quack_product(a: Tensor, b: Tensor, *, out: Tensor, config: str) -> Tensor:
    """A B for fp16 and bf16, every entry computed, accumulated in fp32 and rounded once.

    Args:
        a: [B, M, K], row-major; all rows (or columns) start at multiples of 16 bytes.
        b: [B, K, N], row- or column-major.
        out: [B, M, N], row-major, or column-major as ``b``.
        config: the label of one of ``quack_config.PRODUCT_CANDIDATES``.

    Raises:
        ValueError: ``config`` is no label.
    """
    tiles = parse_product_config(config)
    # quack takes the second factor as [B, N, K]. Column-major, the transposed product has both factors K-major.
    factors = (a, b.mT, out) if out.stride(-1) == 1 else (b.mT, a, out.mT)
    with torch.cuda.device(out.device) if out.is_cuda else contextlib.nullcontext():
        gemm(
            *factors,
            None,
            None,
            tiles.tile_m,
            tiles.tile_n,
            tiles.cluster_m,
            tiles.cluster_n,
            pingpong=tiles.pingpong,
        )
    return out
