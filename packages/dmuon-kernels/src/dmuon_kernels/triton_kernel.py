"""The Triton kernel: D = alpha * A @ B.mT + beta * C over the tiles on and below the diagonal, mirrored at the store.

Legend: T rows of a tile, S its columns (both TILE_M long), K columns of A and B per step. ``*_sb``, ``*_sm``, ``*_sk``,
``*_sn`` are strides along batch, row, K and column. Offsets are int64, so tensors may hold more than 2**31 elements.

Each program works on its own tiles and waits for no other. A pair of mirrored tiles belongs to one program.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Triton reads these functions' annotations as specialisations, so the arguments have none.

import triton
import triton.language as tl


@triton.jit
def lower_tile(t):
    """Row and column of entry t of the lower triangle, counted row by row."""
    i = tl.floor((tl.sqrt(8.0 * t.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int64)
    # The float root is off by one at most.
    i = tl.where(i * (i + 1) // 2 > t, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= t, i + 1, i)
    return i, t - i * (i + 1) // 2


@triton.jit
def grouped_tile(t, n, GROUP: tl.constexpr):
    """Row and column of entry t of a lower triangle of n rows, counted in bands of GROUP rows, a band column by column.

    Neighbours in this order share rows and columns of the operands, so these come from the L2 cache.
    """
    i, j = lower_tile(t)
    if GROUP > 1:
        band = i // GROUP * GROUP
        rows = tl.minimum(n - band, GROUP)
        # The bands in front of this one hold a triangle, and this band is a rectangle followed by a triangle.
        in_band = t - band * (band + 1) // 2
        in_triangle = in_band - rows * band
        below, right = lower_tile(tl.maximum(in_triangle, 0))
        i = band + tl.where(in_triangle < 0, in_band % rows, below)
        j = tl.where(in_triangle < 0, in_band // rows, band + right)
    return i, j


@triton.jit
def multiply(
    a,
    b,
    rows_T,
    cols_S,
    M,
    K,
    a_sm,
    a_sk,
    b_sm,
    b_sk,
    EVEN_K: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
    STAGES: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """A[rows] @ B[cols].mT in fp32."""
    k_K = tl.arange(0, TILE_K).to(tl.int64)
    a_TK = a + rows_T[:, None] * a_sm + k_K[None, :] * a_sk
    b_KS = b + cols_S[None, :] * b_sm + k_K[:, None] * b_sk
    step = tl.full((), TILE_K, tl.int64)
    acc_TS = tl.zeros((TILE_M, TILE_M), tl.float32)
    for k in tl.range(0, K, TILE_K, num_stages=STAGES):
        if EVEN_K:
            x_TK = tl.load(a_TK, mask=rows_T[:, None] < M, other=0.0)
            y_KS = tl.load(b_KS, mask=cols_S[None, :] < M, other=0.0)
        else:
            x_TK = tl.load(a_TK, mask=(rows_T[:, None] < M) & (k_K[None, :] < K - k), other=0.0)
            y_KS = tl.load(b_KS, mask=(cols_S[None, :] < M) & (k_K[:, None] < K - k), other=0.0)
        if EMULATE:
            # The interpreter multiplies the raw bits of bfloat16.
            x_TK = x_TK.to(tl.float32)
            y_KS = y_KS.to(tl.float32)
        acc_TS = tl.dot(x_TK, y_KS, acc_TS)
        a_TK += step * a_sk
        b_KS += step * b_sk
    return acc_TS


@triton.jit
def in_eights(number, ALIGNED: tl.constexpr):
    """The number itself, in a form that shows a multiple of 8: Triton itself looks for multiples of 16 only."""
    if ALIGNED and isinstance(number, tl.tensor):
        return number // 8 * 8
    else:  # noqa: RET505  (as in load_scalar)
        # A stride of 1 is a constant.
        return number


@triton.jit
def load_scalar(scalar, item, stride, ON_DEVICE: tl.constexpr):
    if ON_DEVICE:
        return tl.load(scalar + item * stride)
    else:  # noqa: RET505  (Triton types every return that is not in the branch of a constexpr)
        return scalar


@triton.jit
def load_lower(c, rows_T, cols_S, M, beta, c_sm, c_sn, BETA_ON_DEVICE: tl.constexpr):
    """The part of C's tile that may be read: on or below the diagonal, and nothing at beta = 0."""
    if BETA_ON_DEVICE:
        # The host leaves C out where beta is the float 0.
        M = tl.where(beta != 0.0, M, 0)
    lower_TS = (rows_T[:, None] < M) & (cols_S[None, :] < M) & (rows_T[:, None] >= cols_S[None, :])
    c_TS = tl.load(c + rows_T[:, None] * c_sm + cols_S[None, :] * c_sn, mask=lower_TS, other=0.0)
    # D may be C: every thread has read its part of the tile before any thread stores.
    tl.debug_barrier()
    return c_TS.to(tl.float32)


@triton.jit
def store_mirrored(d, d_TS, rows_T, cols_S, M, on_diagonal, d_sm, d_sn):
    """The tile and its mirror image; a tile on the diagonal once, its upper half taken from the lower."""
    inside_TS = (rows_T[:, None] < M) & (cols_S[None, :] < M)
    if on_diagonal:
        d_TS = tl.where(rows_T[:, None] >= cols_S[None, :], d_TS, tl.trans(d_TS))
    else:
        mirror_ST = d + cols_S[:, None] * d_sm + rows_T[None, :] * d_sn
        tl.store(mirror_ST, tl.trans(d_TS), mask=(cols_S[:, None] < M) & (rows_T[None, :] < M))
    tl.store(d + rows_T[:, None] * d_sm + cols_S[None, :] * d_sn, d_TS, mask=inside_TS)


@triton.jit
def syrk_kernel(
    a,  # [B, M, K]
    b,  # [B, M, K]
    c,  # [B, M, M], or anything without HAS_C
    d,  # [B, M, M]
    alpha,  # a float, or fp32 [B] with ALPHA_ON_DEVICE
    beta,
    M,
    K,
    tiles,
    a_sb,
    a_sm,
    a_sk,
    b_sb,
    b_sm,
    b_sk,
    c_sb,
    c_sm,
    c_sn,
    d_sb,
    d_sm,
    d_sn,
    alpha_sb,
    beta_sb,
    HAS_C: tl.constexpr,
    ALPHA_ON_DEVICE: tl.constexpr,
    BETA_ON_DEVICE: tl.constexpr,
    ALIGNED: tl.constexpr,
    EVEN_K: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
    STAGES: tl.constexpr,
    TILE_STEP: tl.constexpr,
    EMULATE: tl.constexpr,
):
    M, K = in_eights(M, ALIGNED), in_eights(K, ALIGNED)
    a_sb, a_sm, a_sk = in_eights(a_sb, ALIGNED), in_eights(a_sm, ALIGNED), in_eights(a_sk, ALIGNED)
    b_sb, b_sm, b_sk = in_eights(b_sb, ALIGNED), in_eights(b_sm, ALIGNED), in_eights(b_sk, ALIGNED)
    c_sb, c_sm, c_sn = in_eights(c_sb, ALIGNED), in_eights(c_sm, ALIGNED), in_eights(c_sn, ALIGNED)
    d_sb, d_sm, d_sn = in_eights(d_sb, ALIGNED), in_eights(d_sm, ALIGNED), in_eights(d_sn, ALIGNED)
    n = tl.cdiv(M, TILE_M)
    tiles_per_item = n * (n + 1) // 2
    for visit in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        # TILE_STEP, prime to ``tiles``, permutes the order. The result must not depend on it.
        tile = visit if TILE_STEP == 1 else (visit * TILE_STEP) % tiles
        item = (tile // tiles_per_item).to(tl.int64)
        i, j = lower_tile(tile % tiles_per_item)
        rows_T = i * TILE_M + tl.arange(0, TILE_M)
        cols_S = j * TILE_M + tl.arange(0, TILE_M)
        acc_TS = multiply(
            a + item * a_sb, b + item * b_sb, rows_T, cols_S, M, K, a_sm, a_sk, b_sm, b_sk,
            EVEN_K, TILE_M, TILE_K, STAGES, EMULATE,
        )  # fmt: skip
        acc_TS *= load_scalar(alpha, item, alpha_sb, ALPHA_ON_DEVICE)
        if HAS_C:
            scale = load_scalar(beta, item, beta_sb, BETA_ON_DEVICE)
            acc_TS += scale * load_lower(c + item * c_sb, rows_T, cols_S, M, scale, c_sm, c_sn, BETA_ON_DEVICE)
        store_mirrored(d + item * d_sb, acc_TS.to(d.dtype.element_ty), rows_T, cols_S, M, i == j, d_sm, d_sn)
