"""A Triton kernel that copies the lower triangle of the squares on the diagonal of D onto their upper triangle.

For kernels that compute these squares whole, from the upper triangle of C too, or as a product whose two halves are
rounded apart. Legend: T rows and columns of a tile of a square. ``*_sb``, ``*_sm`` are strides along batch and row.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Triton reads these functions' annotations as specialisations, so the arguments have none.

import triton
import triton.language as tl

from dmuon_kernels.triton_kernel import lower_tile


@triton.jit
def mirror_kernel(
    d,  # [B, M, M], rows without gaps between their elements
    M,
    squares,  # per matrix
    d_sb,
    d_sm,
    SIDE: tl.constexpr,  # rows of a square
    TILE: tl.constexpr,
):
    ROWS: tl.constexpr = (SIDE + TILE - 1) // TILE
    TILES: tl.constexpr = ROWS * (ROWS + 1) // 2
    place = tl.program_id(0) // TILES
    i, j = lower_tile(tl.program_id(0) % TILES)
    start = place % squares * SIDE
    end = tl.minimum(start + SIDE, M)
    rows_T = start + i * TILE + tl.arange(0, TILE)
    cols_S = start + j * TILE + tl.arange(0, TILE)
    d += (place // squares).to(tl.int64) * d_sb
    below_TS = (rows_T[:, None] < end) & (rows_T[:, None] > cols_S[None, :])
    d_TS = tl.load(d + rows_T[:, None].to(tl.int64) * d_sm + cols_S[None, :], mask=below_TS, other=0.0)
    mirror_ST = d + cols_S[:, None].to(tl.int64) * d_sm + rows_T[None, :]
    tl.store(mirror_ST, tl.trans(d_TS), mask=tl.trans(below_TS))
