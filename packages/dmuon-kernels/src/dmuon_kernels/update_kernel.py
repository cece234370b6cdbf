"""The Triton kernels of an update's passes over memory: momentum, norm and cast, and after Newton-Schulz the step.

Every kernel works on many matrices of one shape and layout, each wherever it lies: a table holds their addresses.
Sums of squares are taken as in ``normalize_kernel``, whose order depends on a matrix's shape alone.

Legend: R rows and C columns of a tile, P the parts of a matrix. ``*_sr``, ``*_sc`` are strides along row and column.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Triton reads these functions' annotations as specialisations, so the arguments have none.

import triton
import triton.language as tl

from dmuon_core.syrk.contract import TABLE
from dmuon_kernels.normalize_kernel import LARGEST, place_of, scale_of, with_squares

COLUMNS_OF_TABLE = tl.constexpr(len(TABLE))
GRADIENT = tl.constexpr(TABLE.index("grad"))
MOMENTUM = tl.constexpr(TABLE.index("buffer"))
WEIGHTS = tl.constexpr(TABLE.index("weight"))
COPIES = tl.constexpr(TABLE.index("copy"))
PRESENT = tl.constexpr(TABLE.index("presence"))
SLOT = tl.constexpr(TABLE.index("slot"))


@triton.jit
def address(table, item, COLUMN: tl.constexpr, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """What the table says of ``item``, where that is a multiple of 16 bytes if ``ALIGNED``."""
    found = tl.load(table + item * COLUMNS_OF_TABLE + COLUMN).to(tl.pointer_type(dtype))
    if ALIGNED:
        found = tl.multiple_of(found, 16)
    return found


@triton.jit
def slot_of(table, item):
    """Which matrix of Newton-Schulz's stack ``item`` is."""
    return tl.load(table + item * COLUMNS_OF_TABLE + SLOT)


@triton.jit
def lerp(start, end, weight):
    """start + weight · (end − start), from the nearer end, as torch computes it."""
    return tl.where(weight < 0.5, start + weight * (end - start), end - (end - start) * (1.0 - weight))


@triton.jit
def direction_of(grad, buffer, momentum, NESTEROV: tl.constexpr):
    """What is orthogonalized, of the gradient and the new momentum."""
    return lerp(grad, buffer, momentum) if NESTEROV else buffer


@triton.jit(do_not_specialize=["parts"])
def momentum_kernel(
    table,  # int64 [items, COLUMNS_OF_TABLE]
    sums,  # fp32 [items, P]
    exponents,  # int32 [items, P]
    rows,
    columns,
    parts,
    g_sr,
    g_sc,
    b_sr,
    b_sc,
    momentum,
    rest,  # 1 − momentum
    GRAD: tl.constexpr,  # dtypes
    BUFFER: tl.constexpr,
    PRESENCE: tl.constexpr,  # None: every item has a gradient
    NESTEROV: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Momentum in place, and the sum of squares of the direction over tiles p, p + P, p + 2 P, ..."""
    item, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    grad = address(table, item, GRADIENT, GRAD, ALIGNED)
    buffer = address(table, item, MOMENTUM, BUFFER, ALIGNED)
    present = True
    if PRESENCE is not None:
        present = tl.load(address(table, item, PRESENT, PRESENCE, False)) != 0
    tiles = tl.cdiv(rows, ROWS) * tl.cdiv(columns, COLUMNS)
    total = 0.0
    largest = -LARGEST
    for tile in range(part, tiles, parts):
        r_R1, c_1C = place_of(tile, columns, ROWS, COLUMNS)
        inside_RC = (r_R1 < rows) & (c_1C < columns)
        g_RC = tl.load(grad + r_R1 * g_sr + c_1C * g_sc, mask=inside_RC, other=0.0).to(tl.float32)
        place_RC = buffer + r_R1 * b_sr + c_1C * b_sc
        b_RC = tl.load(place_RC, mask=inside_RC, other=0.0)
        # What the second pass will read: rounded.
        b_RC = tl.where(present, lerp(b_RC.to(tl.float32), g_RC, rest).to(BUFFER), b_RC)
        tl.store(place_RC, b_RC, mask=inside_RC)
        x_RC = direction_of(g_RC, b_RC.to(tl.float32), momentum, NESTEROV)
        total, largest = with_squares(total, largest, x_RC)
    tl.store(sums + tl.program_id(0), total)
    tl.store(exponents + tl.program_id(0), largest)


@triton.jit(do_not_specialize=["parts", "programs"])
def direction_kernel(
    table,
    sums,
    exponents,
    out,  # [slots, R', C']
    rows,
    columns,
    out_rows,
    out_columns,
    parts,
    programs,  # per matrix
    g_sr,
    g_sc,
    b_sr,
    b_sc,
    out_sb,
    out_sr,
    momentum,
    GRAD: tl.constexpr,
    BUFFER: tl.constexpr,
    NESTEROV: tl.constexpr,
    ALIGNED: tl.constexpr,
    PARTS: tl.constexpr,  # no smaller than parts, a power of two
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The direction divided by its norm, and zeros beyond it, in ``out``, whose columns lie one after the other."""
    # From the end: what the first pass read last may still be in the L2 cache.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    item, first = program // programs, programs - 1 - program % programs
    scale, inverse = scale_of(sums + item * parts, exponents + item * parts, parts, PARTS)
    grad = address(table, item, GRADIENT, GRAD, ALIGNED)
    buffer = address(table, item, MOMENTUM, BUFFER, ALIGNED)
    out += slot_of(table, item) * out_sb
    tiles = tl.cdiv(out_rows, ROWS) * tl.cdiv(out_columns, COLUMNS)
    for visit in range(first, tiles, programs):
        r_R1, c_1C = place_of(tiles - 1 - visit, out_columns, ROWS, COLUMNS)
        inside_RC = (r_R1 < rows) & (c_1C < columns)
        g_RC = tl.load(grad + r_R1 * g_sr + c_1C * g_sc, mask=inside_RC, other=0.0).to(tl.float32)
        b_RC = tl.load(buffer + r_R1 * b_sr + c_1C * b_sc, mask=inside_RC, other=0.0).to(tl.float32)
        x_RC = direction_of(g_RC, b_RC, momentum, NESTEROV)
        y_RC = tl.where(inside_RC, x_RC * scale * inverse, 0.0)
        room_RC = (r_R1 < out_rows) & (c_1C < out_columns)
        tl.store(out + r_R1 * out_sr + c_1C, y_RC.to(out.dtype.element_ty), mask=room_RC)


@triton.jit(do_not_specialize=["programs"])
def apply_kernel(
    table,
    lr,  # fp32 [1], or what is not read
    factor,  # [slots, R, C]
    rows,
    columns,
    programs,  # per matrix
    w_sr,
    w_sc,
    f_sb,
    f_sr,
    f_sc,
    c_sr,
    c_sc,
    rate,  # where lr is not read
    weight_decay,
    scale,
    WEIGHT: tl.constexpr,  # dtypes
    COPY: tl.constexpr,  # None: there is none
    PRESENCE: tl.constexpr,  # None: every item is stepped
    READS_LR: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """W ← W·(1 − lr·weight_decay) − lr·scale·factor, and W once more in the dtype of the copy."""
    item, first = tl.program_id(0) // programs, tl.program_id(0) % programs
    weight = address(table, item, WEIGHTS, WEIGHT, ALIGNED)
    factor += slot_of(table, item) * f_sb
    if COPY is not None:
        copy = address(table, item, COPIES, COPY, ALIGNED)
    present = True
    if PRESENCE is not None:
        present = tl.load(address(table, item, PRESENT, PRESENCE, False)) != 0
    if READS_LR:
        rate = tl.load(lr)
    decay = 1.0 - rate * weight_decay
    step = rate * scale
    tiles = tl.cdiv(rows, ROWS) * tl.cdiv(columns, COLUMNS)
    for tile in range(first, tiles, programs):
        r_R1, c_1C = place_of(tile, columns, ROWS, COLUMNS)
        inside_RC = (r_R1 < rows) & (c_1C < columns)
        place_RC = weight + r_R1 * w_sr + c_1C * w_sc
        old_RC = tl.load(place_RC, mask=inside_RC, other=0.0)
        f_RC = tl.load(factor + r_R1 * f_sr + c_1C * f_sc, mask=inside_RC, other=0.0).to(tl.float32)
        new_RC = (old_RC.to(tl.float32) * decay - f_RC * step).to(WEIGHT)
        new_RC = tl.where(present, new_RC, old_RC)
        tl.store(place_RC, new_RC, mask=inside_RC)
        if COPY is not None:
            tl.store(copy + r_R1 * c_sr + c_1C * c_sc, new_RC.to(COPY), mask=inside_RC)
