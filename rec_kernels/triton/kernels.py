"""Triton kernels of embedding_bag: pool rows of ids, and update rows from a gradient.

Addresses are int64. Sums are FP32 in an order chosen by the compiler: docs/numerics.md holds within rounding, not bit
for bit. Floats are never added atomically; the two counters in ``status`` are integers. The kernels run on CPU tensors
under TRITON_INTERPRET=1, compile for NVIDIA and AMD targets, and have run on an H200.

All kernels take two arrays:

- ``features``: [F, 9] int64, the layout in elements: weight_offset, row_offset, num_embeddings,
  embedding_dim, column, mean, id_limit, padding_idx, table_id.
- ``status``: [2] int64. [0] is the smallest of: BAD_LAYOUT; BAD_LAYOUT + 1 + i for a bad offsets[i]; i for an id out of
  range at values[i]; NOTHING_BAD. [1] counts the ids skipped as out of range.
"""

# ruff: noqa: N803, N806 (kernel constants and D are upper-case)
from __future__ import annotations

import triton
import triton.language as tl

from rec_kernels.ops.table_layout import Column

NOTHING_BAD = tl.constexpr(2**63 - 1)
BAD_LAYOUT = tl.constexpr(-(2**63))
COLUMNS = tl.constexpr(9)  # of `features`

# Values that change from call to call: specializing on them would recompile the kernels again and again.
_VARYING = ["num_ids", "num_offsets", "batch", "output_dim", "left_out"]

# Columns of a layout's record.
_WEIGHT = tl.constexpr(int(Column.weight_offset))
_ROW = tl.constexpr(int(Column.row_offset))
_ROWS = tl.constexpr(int(Column.num_embeddings))
_DIM = tl.constexpr(int(Column.embedding_dim))
_COLUMN = tl.constexpr(int(Column.column))
_FEATURE = tl.constexpr(int(Column.feature))
_LIMIT = tl.constexpr(int(Column.id_limit))
_PADDING = tl.constexpr(int(Column.padding_idx))
_TABLE = tl.constexpr(int(Column.table_id))
_DIVISOR = tl.constexpr(int(Column.divisor))
_MODULUS = tl.constexpr(int(Column.modulus))
_FORMAT = tl.constexpr(int(Column.format))
_MEAN = tl.constexpr(int(Column.mean))
_BY_ROW = tl.constexpr(int(Column.by_row))
_RECORD = tl.constexpr(len(Column))


@triton.jit
def _is_whole_table(record, f, rows, limit, there):
    """True if record f belongs to feature f, and its table is a float table indexed directly by ids."""
    good = (tl.load(record + _FEATURE, mask=there, other=0) == f) & (limit >= 0) & (limit <= rows)
    good &= tl.load(record + _DIVISOR, mask=there, other=0) == 1
    good &= tl.load(record + _MODULUS, mask=there, other=0) >= limit
    return good & (tl.load(record + _FORMAT, mask=there, other=0) == 0)


@triton.jit
def _follows_in_rows(layout, f, num_features, there):
    """True if table f, in row order, equals the previous one or shares no row with it."""
    behind = there & (f > 0)
    here = tl.load(layout + f.to(tl.int64) * _RECORD + _BY_ROW, mask=there, other=0)
    before = tl.load(layout + (f.to(tl.int64) - 1) * _RECORD + _BY_ROW, mask=behind, other=0)
    named = (here >= 0) & (here < num_features) & (before >= 0) & (before < num_features)
    a, b, read = layout + before * _RECORD, layout + here * _RECORD, behind & named
    row, next_row = tl.load(a + _ROW, mask=read, other=0), tl.load(b + _ROW, mask=read, other=0)
    rows, next_rows = tl.load(a + _ROWS, mask=read, other=0), tl.load(b + _ROWS, mask=read, other=0)
    same = tl.load(a + _DIM, mask=read, other=0) == tl.load(b + _DIM, mask=read, other=0)
    same &= tl.load(a + _WEIGHT, mask=read, other=0) == tl.load(b + _WEIGHT, mask=read, other=0)
    empty = next_rows <= 0  # such tables come first
    shared = (row == next_row) & (before < here) & (empty | (same & (rows == next_rows)))
    apart = (row >= 0) & (row < next_row) & (empty | (rows <= next_row - row))
    return named & ((f == 0) | tl.where((rows <= 0) == empty, shared | apart, ~empty))


@triton.jit(
    do_not_specialize=["num_features", "num_weights", "output_dim", "num_rows", "max_dim", "padding_idx", "tables"]
)
def start_kernel(
    layout,  # [F, columns of a record], or None: one table of num_rows x max_dim
    features,  # [F, COLUMNS], written
    status,  # [2], written
    num_features,
    num_weights,
    output_dim,
    num_rows,
    max_dim,
    padding_idx,  # of one table, as MEAN
    tables,  # numbers of tables are below it
    MEAN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Checks the layout, in one program. The other kernels rely on the result, and access nothing if it failed."""
    bad = tl.zeros([BLOCK], tl.int32)
    for first in range(0, num_features, BLOCK):
        f = first + tl.arange(0, BLOCK)
        there = f < num_features
        weight = tl.zeros([BLOCK], tl.int64)
        row, output = weight, weight
        rows, dim = weight + num_rows, weight + max_dim
        limit, mean, padding, table = rows, weight + MEAN, weight + padding_idx, weight
        if layout is not None:
            record = layout + f.to(tl.int64) * _RECORD
            at = tl.load(record + _WEIGHT, mask=there, other=0)  # in bytes of float32
            weight = at // 4
            row = tl.load(record + _ROW, mask=there, other=0)
            rows = tl.load(record + _ROWS, mask=there, other=0)
            dim = tl.load(record + _DIM, mask=there, other=1)
            output = tl.load(record + _COLUMN, mask=there, other=0)
            limit = tl.load(record + _LIMIT, mask=there, other=0)
            mean = tl.load(record + _MEAN, mask=there, other=0)
            padding = tl.load(record + _PADDING, mask=there, other=-1)
            table = tl.load(record + _TABLE, mask=there, other=0)
            behind = there & (f > 0)
            column = tl.load(record - _RECORD + _COLUMN, mask=behind, other=0)
            column += tl.load(record - _RECORD + _DIM, mask=behind, other=0)
            good = (dim >= 1) & (dim <= max_dim) & (rows >= 0) & (rows <= num_rows)
            good &= (row >= 0) & (row <= num_rows - rows) & (at >= 0) & (at % 4 == 0) & (weight <= num_weights)
            good &= (rows <= (num_weights - weight) // tl.maximum(dim, 1)) & (output == column)
            good &= (f < num_features - 1) | (output + dim == output_dim)
            good &= (table >= 0) & (table < tables)
            good &= _is_whole_table(record, f, rows, limit, there)
            good &= _follows_in_rows(layout, f, num_features, there)
            bad |= (there & ~good).to(tl.int32)
        to = features + f.to(tl.int64) * COLUMNS
        tl.store(to, weight, mask=there)
        tl.store(to + 1, row, mask=there)
        tl.store(to + 2, rows, mask=there)
        tl.store(to + 3, dim, mask=there)
        tl.store(to + 4, output, mask=there)
        tl.store(to + 5, mean, mask=there)
        tl.store(to + 6, limit, mask=there)
        tl.store(to + 7, padding, mask=there)
        tl.store(to + 8, table, mask=there)
    tl.store(status, tl.where(tl.max(bad, axis=0) != 0, BAD_LAYOUT, NOTHING_BAD))
    tl.store(status + 1, 0)


@triton.jit
def _ids_of_bag(offsets, status, bag, num_ids, num_offsets):
    """Positions [start, stop) of a bag; empty if its offsets are bad, which is recorded in status."""
    start = tl.load(offsets + bag).to(tl.int64)
    # The offset after the last stored one is the number of ids, as in torch.
    is_stored = bag + 1 < num_offsets
    stop = tl.where(is_stored, tl.load(offsets + bag + 1, mask=is_stored, other=0).to(tl.int64), num_ids)
    starts_badly = (start < 0) | (start > num_ids)
    stops_badly = (stop < start) | (stop > num_ids)
    first = (bag == 0) & starts_badly
    if first | stops_badly:
        tl.atomic_min(status, tl.where(first, BAD_LAYOUT + 1, BAD_LAYOUT + 2 + bag))
    # A start that only the previous bag has recorded as bad also makes this bag empty.
    empty = starts_badly | stops_badly
    return tl.where(empty, 0, start), tl.where(empty, 0, stop)


@triton.jit
def _read_ids(values, position, stop, limit, padding, CHECK: tl.constexpr):
    """Ids at positions below ``stop``, whether each is valid, and whether it is out of range."""
    inside = position < stop
    ids = tl.load(values + position, mask=inside, other=0).to(tl.int64)
    bad = inside & (position < 0)
    if CHECK:
        bad = inside & ((ids < 0) | (ids >= limit))
    return ids, inside & ~bad & (ids != padding), bad


@triton.jit
def _count_ids(
    values,
    status,
    start,
    stop,
    limit,
    padding,
    CHECK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Counts the valid ids of a bag; records those out of range."""
    n = tl.zeros([], tl.int64)
    for first in range(start, stop, BLOCK):
        position = (first + tl.arange(0, BLOCK)).to(tl.int64)
        _, counts, bad = _read_ids(values, position, stop, limit, padding, CHECK)
        n += tl.sum(counts.to(tl.int64), axis=0)
        if CHECK:
            left_out = tl.sum(bad.to(tl.int64), axis=0)
            if left_out > 0:
                tl.atomic_min(status, tl.min(tl.where(bad, position, NOTHING_BAD), axis=0))
                tl.atomic_add(status + 1, left_out)
    return n


@triton.jit(do_not_specialize=_VARYING)
def pool_kernel(
    weights,  # every table, FP32, FP16 or BF16
    values,  # [num_ids]
    offsets,  # [num_offsets]
    factors,  # per_sample_weights, [num_ids] or None
    features,
    output,  # [batch, output_dim], written
    status,
    num_ids,
    num_offsets,
    batch,
    output_dim,
    CHECK: tl.constexpr,
    BLOCK_IDS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Each program pools a bag, BLOCK_ROWS rows of BLOCK_COLUMNS columns at a time."""
    if tl.load(status) == BAD_LAYOUT:
        return
    bag = tl.program_id(0).to(tl.int64)
    start, stop = _ids_of_bag(offsets, status, bag, num_ids, num_offsets)
    feature = features + bag // batch * COLUMNS
    table, D = weights + tl.load(feature), tl.load(feature + 3)
    limit, padding = tl.load(feature + 6), tl.load(feature + 7)
    n = _count_ids(values, status, start, stop, limit, padding, CHECK, BLOCK_IDS)
    divisor = tl.where(tl.load(feature + 5) != 0, tl.maximum(n, 1), 1).to(tl.float32)
    to = output + bag % batch * output_dim + tl.load(feature + 4)
    for column in range(0, D, BLOCK_COLUMNS):
        c = column + tl.arange(0, BLOCK_COLUMNS)
        total = tl.zeros([BLOCK_COLUMNS], tl.float32)
        for first in range(start, stop, BLOCK_ROWS):
            position = first + tl.arange(0, BLOCK_ROWS)
            ids, counts, _ = _read_ids(values, position, stop, limit, padding, CHECK)
            mask = counts[:, None] & (c < D)[None, :]
            x = tl.load(table + ids[:, None] * D + c[None, :], mask=mask, other=0.0).to(tl.float32)
            if factors is not None:
                # The factor of a skipped id may be NaN.
                x = x * tl.load(factors + position, mask=counts, other=0.0)[:, None]
            total += tl.sum(x, axis=0)
        tl.store(to + c, tl.math.div_rn(total, divisor), mask=c < D)


@triton.jit(do_not_specialize=_VARYING)
def factor_gradient_kernel(
    grad,  # [batch, output_dim]
    weights,
    values,
    offsets,
    features,
    out,  # [num_ids], zeros; written for valid ids
    status,
    num_ids,
    num_offsets,
    batch,
    output_dim,
    CHECK: tl.constexpr,
    BLOCK_IDS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Each program takes a bag: dot products of its gradient with each row, times 1 / n for mean pooling."""
    if tl.load(status) == BAD_LAYOUT:
        return
    bag = tl.program_id(0).to(tl.int64)
    start, stop = _ids_of_bag(offsets, status, bag, num_ids, num_offsets)
    feature = features + bag // batch * COLUMNS
    table, D = weights + tl.load(feature), tl.load(feature + 3)
    limit, padding = tl.load(feature + 6), tl.load(feature + 7)
    n = _count_ids(values, status, start, stop, limit, padding, CHECK, BLOCK_IDS)
    each = tl.math.div_rn(1.0, tl.where(tl.load(feature + 5) != 0, tl.maximum(n, 1), 1).to(tl.float32))
    g_of_bag = grad + bag % batch * output_dim + tl.load(feature + 4)
    for first in range(start, stop, BLOCK_ROWS):
        position = first + tl.arange(0, BLOCK_ROWS)
        ids, counts, _ = _read_ids(values, position, stop, limit, padding, CHECK)
        dot = tl.zeros([BLOCK_ROWS], tl.float32)
        for column in range(0, D, BLOCK_COLUMNS):
            c = column + tl.arange(0, BLOCK_COLUMNS)
            g = tl.load(g_of_bag + c, mask=c < D, other=0.0)
            mask = counts[:, None] & (c < D)[None, :]
            x = tl.load(table + ids[:, None] * D + c[None, :], mask=mask, other=0.0).to(tl.float32)
            dot += tl.sum(x * g[None, :], axis=1)
        tl.store(out + position, dot * each, mask=counts)


@triton.jit(do_not_specialize=_VARYING)
def occurrences_kernel(
    values,
    offsets,
    factors,
    features,
    status,
    keys,  # [num_ids], filled with a value above every row; rows of valid ids are written
    bag_of,  # [num_ids] int32, written where keys is
    coefficients,  # [num_ids], written where keys is
    num_ids,
    num_offsets,
    batch,
    CHECK: tl.constexpr,
    BLOCK_IDS: tl.constexpr,
):
    """Each program takes a bag: for each id, its linear row and the coefficient of the bag's gradient."""
    if tl.load(status) == BAD_LAYOUT:
        return
    bag = tl.program_id(0).to(tl.int64)
    start, stop = _ids_of_bag(offsets, status, bag, num_ids, num_offsets)
    feature = features + bag // batch * COLUMNS
    first_row, limit, padding = tl.load(feature + 1), tl.load(feature + 6), tl.load(feature + 7)
    n = _count_ids(values, status, start, stop, limit, padding, CHECK, BLOCK_IDS)
    each = tl.math.div_rn(1.0, tl.where(tl.load(feature + 5) != 0, tl.maximum(n, 1), 1).to(tl.float32))
    for first in range(start, stop, BLOCK_IDS):
        position = first + tl.arange(0, BLOCK_IDS)
        ids, counts, _ = _read_ids(values, position, stop, limit, padding, CHECK)
        c = tl.zeros([BLOCK_IDS], tl.float32) + each
        if factors is not None:
            c = c * tl.load(factors + position, mask=counts, other=0.0)
        tl.store(keys + position, first_row + ids, mask=counts)
        tl.store(bag_of + position, tl.zeros([BLOCK_IDS], tl.int64) + bag, mask=counts)
        tl.store(coefficients + position, c, mask=counts)


@triton.jit
def _row_gradient(
    sources,  # arguments of finish_rows_kernel
    start,
    stop,
    D,
    column,
    scale,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Columns [column, column + BLOCK_COLUMNS) of the sum over the sorted occurrences [start, stop), times scale."""
    grad, order, bag_of, coefficients, features, batch, output_dim = sources
    c = column + tl.arange(0, BLOCK_COLUMNS)
    total = tl.zeros([BLOCK_COLUMNS], tl.float32)
    for first in range(start, stop, BLOCK_ROWS):
        i = first + tl.arange(0, BLOCK_ROWS)
        inside = i < stop
        position = tl.load(order + i, mask=inside, other=0)
        bag = tl.load(bag_of + position, mask=inside, other=0).to(tl.int64)
        output_offset = tl.load(features + bag // batch * COLUMNS + 4, mask=inside, other=0)
        g = grad + bag % batch * output_dim + output_offset
        g = tl.load(g[:, None] + c[None, :], mask=inside[:, None] & (c < D)[None, :], other=0.0)
        total += tl.sum(g * tl.load(coefficients + position, mask=inside, other=0.0)[:, None], axis=0)
    return total * scale


@triton.jit
def _must_skip(own_status, forward_status, found_inf, RAISE: tl.constexpr):
    """True if no row may be written: after bad offsets, or after bad ids if they are errors."""
    own = tl.load(own_status)
    skip = (own < 0) | ((own != NOTHING_BAD) & RAISE)
    if forward_status is not None:
        seen = tl.load(forward_status)
        skip |= (seen < 0) | ((seen != NOTHING_BAD) & RAISE)
    if found_inf is not None:
        skip |= tl.load(found_inf) != 0.0
    return skip


@triton.jit
def advance_step_kernel(step, own_status, forward_status, found_inf, RAISE: tl.constexpr):
    """Increments the step unless the update was skipped, in one program."""
    if not _must_skip(own_status, forward_status, found_inf, RAISE):
        tl.store(step, tl.load(step) + 1)


@triton.jit
def _put(
    to,
    c,
    D,
    g,
    factor,
    UPDATE: tl.constexpr,
):
    """Writes columns of a row: its gradient, or the row minus factor * gradient, rounded to nearest."""
    if UPDATE:
        g = tl.load(to + c, mask=c < D, other=0.0).to(tl.float32) - factor * g
    tl.store(to + c, g.to(to.dtype.element_ty), mask=c < D)


@triton.jit
def _inverse_of(grad_scale):
    """Reciprocal of the gradients' scale; 1 for None."""
    inverse = 1.0
    if grad_scale is not None:
        inverse = tl.math.div_rn(1.0, tl.load(grad_scale))
    return inverse


@triton.jit(do_not_specialize=_VARYING)
def finish_rows_kernel(
    target,  # the tables to update, or the gradient to write
    state,  # row-wise Adagrad's sum, or None
    lr,  # of table t at lr_stride * t, or None: write gradients
    lr_stride,
    eps,
    grad,
    keys,  # [num_ids], sorted
    stops,  # [num_ids]: end of the occurrences of the key
    order,  # [num_ids]: position in `values`
    bag_of,
    coefficients,
    features,
    places,  # [num_ids]: offset in target of the run's gradient, or None: the row's offset
    own_status,
    forward_status,
    grad_scale,
    found_inf,
    batch,
    output_dim,
    left_out,  # the key of skipped ids
    RAISE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Each program takes a sorted occurrence; the first one of a row sums the row's gradient and writes it once."""
    start = tl.program_id(0).to(tl.int64)
    row = tl.load(keys + start).to(tl.int64)
    before = tl.load(keys + start - 1, mask=start > 0, other=left_out).to(tl.int64)
    # Bags with bad offsets may overlap others; then a key and its bag may not match.
    if (row == left_out) | (row == before) | _must_skip(own_status, forward_status, found_inf, RAISE):
        return
    stop = tl.load(stops + start)
    feature = features + tl.load(bag_of + tl.load(order + start)).to(tl.int64) // batch * COLUMNS
    D = tl.load(feature + 3)
    place = tl.load(feature) + (row - tl.load(feature + 1)) * D
    if places is not None:
        place = tl.load(places + start)
    scale = _inverse_of(grad_scale)
    # Columns beyond the first block are summed again if the whole row is needed first.
    sources = (grad, order, bag_of, coefficients, features, batch, output_dim)
    c = tl.arange(0, BLOCK_COLUMNS)
    g = _row_gradient(sources, start, stop, D, 0, scale, BLOCK_ROWS, BLOCK_COLUMNS)
    factor = 0.0
    if lr is not None:
        factor = tl.load(lr + tl.load(feature + 8) * lr_stride)
    if state is not None:
        squares = tl.sum(g * g, axis=0)
        for column in range(BLOCK_COLUMNS, D, BLOCK_COLUMNS):
            more = _row_gradient(sources, start, stop, D, column, scale, BLOCK_ROWS, BLOCK_COLUMNS)
            squares += tl.sum(more * more, axis=0)
        v = tl.load(state + row) + tl.math.div_rn(squares, D.to(tl.float32))
        tl.debug_barrier()  # all warps read the sum, then one thread writes it
        tl.store(state + row, v)
        factor = tl.math.div_rn(factor, tl.math.sqrt_rn(v) + eps)
    _put(target + place, c, D, g, factor, lr is not None)
    for column in range(BLOCK_COLUMNS, D, BLOCK_COLUMNS):
        g = _row_gradient(sources, start, stop, D, column, scale, BLOCK_ROWS, BLOCK_COLUMNS)
        _put(target + place, column + c, D, g, factor, lr is not None)
