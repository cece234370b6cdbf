"""The Triton kernel for SM90: D = alpha * A @ B.mT + beta * C, operands and results moved by the tensor memory engine.

Legend: T rows of a tile (TILE_M), S its columns (TILE_N), U columns of a chunk of it (CHUNK), K columns of A and B per
step (TILE_K). ``*_sb``, ``*_sm`` are strides along batch and row. Tiles lie in squares of max(TILE_M, TILE_N) on and
below the diagonal. The store goes chunk by chunk, which takes a fraction of the registers and of the shared memory.

Every program works on its own units and waits for no other. A unit is a tile, or one of SPLIT parts of a tile's sum
over K: a part leaves its sum in ``partials``, and whoever leaves the last one adds all of them, in their order.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Triton reads these functions' annotations as specialisations, so the arguments have none.

import triton
import triton.language as tl

from dmuon_kernels.triton_kernel import grouped_tile, load_scalar


@triton.jit
def multiply(
    a_desc,
    b_desc,
    a_item,
    b_item,
    row,
    col,
    first,
    last,
    A_K_MAJOR: tl.constexpr,
    B_K_MAJOR: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    STAGES: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """A[row : row + T] @ B[col : col + S].mT in fp32, over the steps [first, last) of K. Beyond M and K are zeros."""
    acc_TS = tl.zeros((TILE_M, TILE_N), tl.float32)
    # Where B is A, in blocks of the same shape, one descriptor serves both.
    y_desc = a_desc if b_desc is None else b_desc
    for step in tl.range(first, last, num_stages=STAGES):
        k = step * TILE_K
        if A_K_MAJOR:
            x_TK = a_desc.load([a_item, row, k]).reshape(TILE_M, TILE_K)
        else:
            x_TK = tl.trans(a_desc.load([a_item, k, row]).reshape(TILE_K, TILE_M))
        if B_K_MAJOR:
            y_KS = tl.trans(y_desc.load([b_item, col, k]).reshape(TILE_N, TILE_K))
        else:
            y_KS = y_desc.load([b_item, k, col]).reshape(TILE_K, TILE_N)
        if EMULATE:
            # The interpreter multiplies the raw bits of bfloat16.
            x_TK = x_TK.to(tl.float32)
            y_KS = y_KS.to(tl.float32)
        acc_TS = tl.dot(x_TK, y_KS, acc_TS)
    return acc_TS


@triton.jit
def halve(x_TS, TILE_M: tl.constexpr, WIDTH: tl.constexpr):
    """The left and the right half of the columns."""
    return tl.split(tl.permute(tl.reshape(x_TS, (TILE_M, 2, WIDTH // 2)), (0, 2, 1)))


@triton.jit
def chunks_of(x_TS, TILE_M: tl.constexpr, TILE_N: tl.constexpr, CHUNK: tl.constexpr):
    """The tile's chunks, from left to right: one, two or four."""
    if CHUNK == TILE_N:
        return (x_TS,)
    else:  # noqa: RET505  (Triton types every return that is not in the branch of a constexpr)
        left, right = halve(x_TS, TILE_M, TILE_N)
        if CHUNK * 2 == TILE_N:
            return (left, right)
        else:  # noqa: RET505
            first, second = halve(left, TILE_M, TILE_N // 2)
            third, fourth = halve(right, TILE_M, TILE_N // 2)
            return (first, second, third, fourth)


@triton.jit
def finish(
    x_TU,
    item,
    row,
    col,
    c_desc,
    d_desc,
    mirror_desc,
    d,
    alpha,
    beta,
    M,
    c_step,
    d_sb,
    d_sm,
    HAS_C: tl.constexpr,
    BETA_ON_DEVICE: tl.constexpr,
    TILE_M: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Scale a chunk of the product, add C's, and store it with its mirror image; nothing above the diagonal.

    D may be C. What a chunk reads of C on or below the diagonal is written by that chunk alone, and after it was read.
    """
    if row + TILE_M > col:
        x_TU *= alpha
        if HAS_C:
            c_TU = c_desc.load([item * c_step, row, col]).reshape(TILE_M, CHUNK).to(tl.float32)
            if BETA_ON_DEVICE:
                # The host leaves C out where beta is the float 0.
                c_TU = tl.where(beta != 0.0, c_TU, 0.0)
            x_TU += beta * c_TU
        d_TU = x_TU.to(d.dtype.element_ty)
        if row >= col + CHUNK - 1:
            d_desc.store([item, row, col], d_TU.reshape(1, TILE_M, CHUNK))
            mirror_desc.store([item, col, row], tl.trans(d_TU).reshape(1, CHUNK, TILE_M))
        else:
            rows_T = (row + tl.arange(0, TILE_M)).to(tl.int64)
            cols_U = (col + tl.arange(0, CHUNK)).to(tl.int64)
            lower_TU = (rows_T[:, None] < M) & (rows_T[:, None] >= cols_U[None, :])
            d_item = d + item.to(tl.int64) * d_sb
            tl.store(d_item + rows_T[:, None] * d_sm + cols_U[None, :], d_TU, mask=lower_TU)
            tl.store(d_item + cols_U[:, None] * d_sm + rows_T[None, :], tl.trans(d_TU), mask=tl.trans(lower_TU))


@triton.jit
def partial_offsets(unit, TILE_M: tl.constexpr, TILE_N: tl.constexpr, CHUNK: tl.constexpr):
    """Where the first chunk of a unit's partial sum lies; the others follow."""
    in_chunk_TU = tl.arange(0, TILE_M)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    return unit.to(tl.int64) * (TILE_M * TILE_N) + in_chunk_TU


# Counts of tiles and strides of scalars: their divisibility would only multiply the variants.
@triton.jit(do_not_specialize=["whole", "units", "alpha_sb", "beta_sb"])
def syrk_tma_kernel(
    a_desc,  # [B, M, K] in blocks [1, T, K], or [B, K, M] in blocks [1, K, T] without A_K_MAJOR
    b_desc,  # likewise, with S; None for a_desc
    c_desc,  # [B, M, M] in blocks [1, T, U]; None without HAS_C
    d_desc,  # [B, M, M] in blocks [1, T, U]
    mirror_desc,  # D again, in blocks [1, U, T]
    d,  # [B, M, M], rows without gaps between their elements
    partials,  # fp32 [(tiles - whole) * SPLIT, T * S]; None at SPLIT = 1
    arrivals,  # int32 [tiles - whole], zeros before and after; None at SPLIT = 1
    alpha,  # a float, or fp32 [B] with ALPHA_ON_DEVICE
    beta,
    M,
    K,
    whole,  # tiles in front of the first one that is split
    units,
    a_step,  # 1, or 0 where one matrix serves the whole batch
    b_step,
    c_step,
    d_sb,
    d_sm,
    alpha_sb,
    beta_sb,
    HAS_C: tl.constexpr,
    ALPHA_ON_DEVICE: tl.constexpr,
    BETA_ON_DEVICE: tl.constexpr,
    A_K_MAJOR: tl.constexpr,
    B_K_MAJOR: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    SOME_WHOLE: tl.constexpr,
    UNIT_STEP: tl.constexpr,
    EMULATE: tl.constexpr,
):
    SQUARE: tl.constexpr = TILE_M if TILE_M > TILE_N else TILE_N
    PER_SQUARE: tl.constexpr = SQUARE * SQUARE // (TILE_M * TILE_N)
    CHUNKS: tl.constexpr = TILE_N // CHUNK
    n = tl.cdiv(M, SQUARE)
    tiles_per_item = n * (n + 1) // 2 * PER_SQUARE
    steps = tl.cdiv(K, TILE_K)
    for visit in tl.range(tl.program_id(0), units, tl.num_programs(0), num_stages=1):
        # UNIT_STEP, prime to ``units``, permutes the order. The result must not depend on it.
        unit = visit if UNIT_STEP == 1 else (visit * UNIT_STEP) % units
        if SPLIT == 1:
            tile, part, parts = unit, 0, 1
        else:
            is_part = unit >= whole
            tile = tl.where(is_part, whole + (unit - whole) // SPLIT, unit)
            part = tl.where(is_part, (unit - whole) % SPLIT, 0)
            parts = tl.where(is_part, SPLIT, 1)
        item = tile // tiles_per_item
        in_item = tile % tiles_per_item
        i, j = grouped_tile(in_item // PER_SQUARE, n, GROUP)
        row, col = (i * SQUARE).to(tl.int32), (j * SQUARE).to(tl.int32)
        if TILE_M < TILE_N:
            row += in_item % PER_SQUARE * TILE_M
        elif TILE_N < TILE_M:
            col += in_item % PER_SQUARE * TILE_N
        acc_TS = multiply(
            a_desc, b_desc, item * a_step, item * b_step, row, col, part * steps // parts, (part + 1) * steps // parts,
            A_K_MAJOR, B_K_MAJOR, TILE_M, TILE_N, TILE_K, STAGES, EMULATE,
        )  # fmt: skip
        alpha_item = load_scalar(alpha, item, alpha_sb, ALPHA_ON_DEVICE)
        beta_item = beta
        if HAS_C:
            beta_item = load_scalar(beta, item, beta_sb, BETA_ON_DEVICE)
        if SPLIT == 1:
            pieces = chunks_of(acc_TS, TILE_M, TILE_N, CHUNK)
            for q in tl.static_range(CHUNKS):
                finish(
                    pieces[q], item, row, col + q * CHUNK, c_desc, d_desc, mirror_desc, d, alpha_item, beta_item,
                    M, c_step, d_sb, d_sm, HAS_C, BETA_ON_DEVICE, TILE_M, CHUNK,
                )  # fmt: skip
        else:
            if SOME_WHOLE and unit < whole:
                pieces = chunks_of(acc_TS, TILE_M, TILE_N, CHUNK)
                for q in tl.static_range(CHUNKS):
                    finish(
                        pieces[q], item, row, col + q * CHUNK, c_desc, d_desc, mirror_desc, d, alpha_item, beta_item,
                        M, c_step, d_sb, d_sm, HAS_C, BETA_ON_DEVICE, TILE_M, CHUNK,
                    )  # fmt: skip
            else:
                mine_TU = partials + partial_offsets(unit - whole, TILE_M, TILE_N, CHUNK)
                pieces = chunks_of(acc_TS, TILE_M, TILE_N, CHUNK)
                for q in tl.static_range(CHUNKS):
                    tl.store(mine_TU + q * TILE_M * CHUNK, pieces[q], cache_modifier=".cg")
                # Every thread's part is in memory before the program counts as arrived.
                tl.debug_barrier()
                arrived = tl.atomic_add(arrivals + (tile - whole), 1, sem="acq_rel")
                if arrived == SPLIT - 1:
                    tl.store(arrivals + (tile - whole), 0)
                    first_TU = partials + partial_offsets((tile - whole) * SPLIT, TILE_M, TILE_N, CHUNK)
                    for q in tl.static_range(CHUNKS):
                        sum_TU = tl.zeros((TILE_M, CHUNK), tl.float32)
                        for s in tl.static_range(SPLIT):
                            offset = s * TILE_M * TILE_N + q * TILE_M * CHUNK
                            sum_TU += tl.load(first_TU + offset, cache_modifier=".cg")
                        finish(
                            sum_TU, item, row, col + q * CHUNK, c_desc, d_desc, mirror_desc, d, alpha_item, beta_item,
                            M, c_step, d_sb, d_sm, HAS_C, BETA_ON_DEVICE, TILE_M, CHUNK,
                        )  # fmt: skip
