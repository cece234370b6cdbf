"""The Triton kernels that divide matrices by their Frobenius norms, in two passes over them.

The first pass leaves the sum of squares of every part of a matrix, the second adds them and scales. Sums are taken of
x · 2^-e, e the exponent of the largest entry that they see, so that squares of any fp32 number stay in range. Parts and
order depend on a matrix's shape alone: the same bits in any batch, and no atomics.

Legend: R rows and C columns of a tile, P the parts of a matrix. Columns are the direction in which ``out`` is
contiguous. ``*_sb``, ``*_sr``, ``*_sc`` are strides along batch, row and column.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Triton reads these functions' annotations as specialisations, so the arguments have none.

import triton
import triton.language as tl

LARGEST = tl.constexpr(126)
"""Exponents are kept within ±126: 2^e and 2^-e are normal numbers, and what they scale is in range all the same."""


@triton.jit
def power_of_two(exponent):
    """2^exponent in fp32, for exponents in [-126, 127]."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exponent_of(x):
    """The exponent of x ≥ 0, within ±126; of inf and nan 126."""
    exponent = (x.to(tl.int32, bitcast=True) >> 23 & 0xFF) - 127
    return tl.minimum(tl.maximum(exponent, -LARGEST), LARGEST)


@triton.jit
def shrunk(sums, exponents, exponent):
    """Sums of squares at ``exponents``, brought to an ``exponent`` no smaller. What vanishes is below 2^-126."""
    return sums * power_of_two(2 * tl.maximum(exponents - exponent, -63))


@triton.jit
def with_squares(total, largest, x_RC):
    """A sum of squares and its exponent, with those of ``x_RC`` added."""
    exponent = exponent_of(tl.max(tl.abs(x_RC)))
    x_RC *= power_of_two(-exponent)
    common = tl.maximum(largest, exponent)
    return shrunk(total, largest, common) + shrunk(tl.sum(x_RC * x_RC), exponent, common), common


@triton.jit
def place_of(tile, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Row and column numbers of a tile; tiles are counted row by row."""
    across = tl.cdiv(columns, COLUMNS)
    r_R = tile // across * ROWS + tl.arange(0, ROWS)
    c_C = tile % across * COLUMNS + tl.arange(0, COLUMNS)
    return r_R[:, None].to(tl.int64), c_C[None, :].to(tl.int64)


@triton.jit
def scale_of(sums, exponents, parts, PARTS: tl.constexpr):
    """Two factors, a power of two and a number near 1, that divide a matrix by the norm that its parts add up to.

    All of a matrix with a nan or an inf becomes nan; zeros stay zeros.
    """
    p_P = tl.arange(0, PARTS)
    exponent_P = tl.load(exponents + p_P, mask=p_P < parts, other=-LARGEST)
    sum_P = tl.load(sums + p_P, mask=p_P < parts, other=0.0)
    exponent = tl.max(exponent_P)
    total = tl.sum(shrunk(sum_P, exponent_P, exponent))
    inverse = tl.where(total < float("inf"), 1.0 / tl.sqrt_rn(tl.where(total == 0.0, 1.0, total)), float("nan"))
    return power_of_two(-exponent), inverse


@triton.jit(do_not_specialize=["parts"])
def squares_kernel(
    x,  # [B, rows, columns]
    sums,  # fp32 [B, P]
    exponents,  # int32 [B, P]
    rows,
    columns,
    parts,
    x_sb,
    x_sr,
    x_sc,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program p of a matrix: the sum of squares over tiles p, p + P, p + 2 P, ..."""
    item, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    x += item.to(tl.int64) * x_sb
    tiles = tl.cdiv(rows, ROWS) * tl.cdiv(columns, COLUMNS)
    total = 0.0
    largest = -LARGEST
    for tile in range(part, tiles, parts):
        r_R1, c_1C = place_of(tile, columns, ROWS, COLUMNS)
        inside_RC = (r_R1 < rows) & (c_1C < columns)
        x_RC = tl.load(x + r_R1 * x_sr + c_1C * x_sc, mask=inside_RC, other=0.0).to(tl.float32)
        total, largest = with_squares(total, largest, x_RC)
    tl.store(sums + tl.program_id(0), total)
    tl.store(exponents + tl.program_id(0), largest)


@triton.jit(do_not_specialize=["parts", "programs"])
def scale_kernel(
    x,  # [B, rows, columns]
    out,  # [B, out_rows, out_columns], no smaller; zeros beyond x
    sums,  # fp32 [B, P]
    exponents,  # int32 [B, P]
    rows,
    columns,
    out_rows,
    out_columns,
    parts,
    programs,  # per matrix
    x_sb,
    x_sr,
    x_sc,
    out_sb,
    out_sr,
    PARTS: tl.constexpr,  # no smaller than parts, a power of two
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    # From the end: what the first pass read last may still be in the L2 cache.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    item, first = (program // programs).to(tl.int64), programs - 1 - program % programs
    scale, inverse = scale_of(sums + item * parts, exponents + item * parts, parts, PARTS)
    x += item * x_sb
    out += item * out_sb
    tiles = tl.cdiv(out_rows, ROWS) * tl.cdiv(out_columns, COLUMNS)
    for visit in range(first, tiles, programs):
        r_R1, c_1C = place_of(tiles - 1 - visit, out_columns, ROWS, COLUMNS)
        inside_RC = (r_R1 < rows) & (c_1C < columns)
        x_RC = tl.load(x + r_R1 * x_sr + c_1C * x_sc, mask=inside_RC, other=0.0).to(tl.float32)
        y_RC = tl.where(inside_RC, x_RC * scale * inverse, 0.0)
        room_RC = (r_R1 < out_rows) & (c_1C < out_columns)
        tl.store(out + r_R1 * out_sr + c_1C, y_RC.to(out.dtype.element_ty), mask=room_RC)
