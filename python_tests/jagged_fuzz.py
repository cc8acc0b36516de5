"""Calls of the jagged ops and expand with bad offsets, numbers, ids and totals, and the results expected of a device.

test_sanitize_cuda.py and `sanitize_cuda.py --fuzz` run them on the emulated kernels with sanitizers: no access is
outside of a tensor, the status has the first error, and other results are the reference's for the valid rest.
"""

from __future__ import annotations

import itertools
import random

import torch
from backends import Backend
from jagged_cases import BAD_LAYOUT, INT64_MAX, Batch, good_rows, make_batch, offsets_of
from torch import Tensor

from rec_kernels.reference.jagged_bucketize import jagged_bucketize
from rec_kernels.reference.jagged_dedup import jagged_dedup
from rec_kernels.reference.jagged_index_select import jagged_index_select
from rec_kernels.reference.jagged_windows import jagged_windows
from rec_kernels.testing import same_bits

INTEGERS = [torch.int32, torch.int64]


def _number(r: random.Random, dtype: torch.dtype, near: list[int]) -> int:
    """A number near a limit, at an end of the type, or any."""
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    ends = [low, low + 1, high, high - 1, -(2**31), 2**31 - 1]
    return r.choice([r.choice(near), r.choice(near), r.choice(ends), r.randint(low, high)])


def _spoil(r: random.Random, t: Tensor, near: list[int], most: int = 2) -> Tensor:
    """A copy with up to ``most`` elements replaced."""
    t = t.clone()
    for _ in range(r.choice([0, 1, 1, most]) if len(t) else 0):
        t[r.randrange(len(t))] = _number(r, t.dtype, near)
    return t


class BadRows:
    """A batch whose offsets may be bad, and the batch of the same bags as a device reads them."""

    def __init__(self, r: random.Random) -> None:
        features = r.randint(1, 3)
        types = {"ids": r.choice(INTEGERS), "offsets": r.choice(INTEGERS)}
        options = {"rows": r.choice([3, 40]), "mean_length": r.choice([0.5, 3, 40]), "session": r.choice([1, 3])}
        good = make_batch(features, r.randint(0, 12), **types, **options, seed=r.randrange(2**20))
        ids = len(good.values)
        bounds = _spoil(r, good.offsets, [-1, 0, ids, ids + 1])
        rows = good_rows(bounds.tolist(), ids)
        self.batch = Batch(good.values, bounds, good.weights, good.strides)
        named = torch.tensor([i for a, b in rows for i in range(a, b)], dtype=torch.int64)
        offsets = offsets_of([b - a for a, b in rows], bounds.dtype)
        self.read = Batch(good.values[named], offsets, good.weights[named], good.strides)
        numbers = bounds.tolist()
        bad = [i for i, n in enumerate(numbers) if n > ids or n < (numbers[i - 1] if i else 0)]
        self.first = BAD_LAYOUT + 1 + bad[0] if bad else INT64_MAX


def _check_status(status: Tensor, first: int, count: int) -> None:
    assert status.tolist() == [first, count], (status.tolist(), first, count)


def _fitted(t: Tensor, total: int) -> Tensor:
    """Truncates or pads with zeros to ``total``."""
    return torch.cat([t[:total], t.new_zeros(max(total - len(t), 0), *t.shape[1:])])


def _check_dedup(r: random.Random, rows: BadRows, ops) -> None:
    groups = [r.choice([0, -1]) for _ in rows.batch.strides]
    weights, bits = r.random() < 0.5, r.choice([0, 3, 64])
    args = (rows.batch.values, rows.batch.offsets, groups, rows.batch.weights if weights else None, bits)
    *found, status = ops.jagged_dedup(*args)
    read = (rows.read.values, rows.read.offsets, groups, rows.read.weights if weights else None)
    assert all(map(same_bits, found, jagged_dedup(*read)))
    _check_status(status, rows.first, 0)


def _check_select(r: random.Random, rows: BadRows, ops) -> None:
    bags, ids = rows.batch.bags, len(rows.batch.values)
    index = torch.tensor([r.randrange(bags) for _ in range(r.randint(0, 20))] if bags else [], dtype=r.choice(INTEGERS))
    index = _spoil(r, index, [-1, bags, bags + 1])
    columns = r.choice([0, 1, 3, 4])
    values = torch.randn(ids, columns).to(r.choice([torch.float32, torch.float16]))
    # A row number out of range selects an appended empty row.
    outside = [i for i, n in enumerate(index.tolist()) if not 0 <= n < bags]
    repaired = index.long().index_fill(0, torch.tensor(outside, dtype=torch.int64), bags)
    places = good_rows(rows.batch.offsets.tolist(), ids)
    named = torch.tensor([i for a, b in places for i in range(a, b)], dtype=torch.int64)
    bounds = torch.cat([rows.read.offsets, rows.read.offsets[-1:]])
    expected, offsets = jagged_index_select(values[named], bounds, repaired)
    total = r.choice([None, len(expected), len(expected), r.randint(0, 2 * len(expected) + 5)])
    out, found, status = ops.jagged_index_select(values, rows.batch.offsets, index, total)
    wrong = total not in (None, len(expected))
    assert same_bits(out, _fitted(expected, len(expected) if total is None else total))
    assert same_bits(found, offsets.clamp(max=len(out)))
    first = min([rows.first, *outside, *([len(index)] if wrong else [])])
    _check_status(status, first, len(outside))


def _check_windows(r: random.Random, rows: BadRows, ops) -> None:
    """Checks ``jagged_windows`` of all values, also with bad offsets."""
    size, dtypes = len(rows.batch.values), (r.choice(INTEGERS), r.choice(INTEGERS))
    bounds = [sorted(r.randint(0, size) for _ in range(2)) for _ in range(r.randint(0, 20))]
    near = [-1, 0, size, size + 1]
    starts = _spoil(r, torch.tensor([a for a, _ in bounds], dtype=dtypes[0]), near)
    lengths = _spoil(r, torch.tensor([b - a for a, b in bounds], dtype=dtypes[1]), near)
    pairs = zip(starts.tolist(), lengths.tolist(), strict=True)
    outside = [i for i, (start, count) in enumerate(pairs) if not (0 <= start <= start + count <= size)]
    values = torch.randn(size, r.choice([0, 1, 3, 4])).to(r.choice([torch.float32, torch.float16]))
    good = lengths.index_fill(0, torch.tensor(outside, dtype=torch.int64), 0)
    expected, offsets = jagged_windows(values, starts.clamp(0, size), good)
    total = r.choice([None, len(expected), len(expected), r.randint(0, 2 * len(expected) + 5)])
    out, found, status = ops.jagged_windows(values, starts, lengths, total)
    wrong = total not in (None, len(expected))
    assert same_bits(out, _fitted(expected, len(expected) if total is None else total))
    assert same_bits(found, offsets.clamp(max=len(out)))
    first = min([INT64_MAX, *outside, *([len(starts)] if wrong else [])])
    _check_status(status, first, len(outside))


def _check_permute(r: random.Random, rows: BadRows, ops) -> None:
    features = len(rows.batch.strides)
    permute = r.choice([list(range(features))[::-1], [r.randrange(features) for _ in range(r.randint(0, 4))]])
    starts = list(itertools.accumulate(rows.batch.strides, initial=0))
    bags = torch.tensor([b for f in permute for b in range(starts[f], starts[f + 1])], dtype=torch.int64)
    expected, offsets = jagged_index_select(rows.read.values, rows.read.offsets, bags)
    weights = jagged_index_select(rows.read.weights, rows.read.offsets, bags)[0]
    total = r.choice([None, len(expected), r.randint(0, len(expected) + 5)])
    known = len(rows.batch.values) if sorted(permute) == list(range(features)) else len(expected)
    size = known if total is None else total
    batch = rows.batch
    found = ops.jagged_permute(batch.values, batch.offsets, permute, batch.strides, batch.weights, total)
    fitted = (_fitted(expected, size), offsets.clamp(max=size), _fitted(weights, size))
    assert all(map(same_bits, found[:3], fitted))
    first = min(rows.first, INT64_MAX if size == len(expected) else len(bags))
    _check_status(found[3], first, 0)


def _check_bucketize(r: random.Random, rows: BadRows, ops) -> None:
    batch, buckets = rows.batch, r.choice([1, 2, 7, 40])
    blocks = [r.randint(1, 50) for _ in batch.strides]
    values = _spoil(r, batch.values, [-1, *(b * buckets for b in blocks)])
    out, offsets, weights, positions, status = ops.jagged_bucketize(
        values, batch.offsets, torch.tensor(blocks), buckets, batch.strides, batch.weights
    )
    if rows.first < 0:
        assert not out.any()
        assert not offsets.any()
        assert not weights.any()
        assert (positions == -1).all()
        _check_status(status, rows.first, 0)
        return
    # An id out of range is replaced by one of its target bucket; the offset is added to the result again.
    moved, shift, outside = values.clone().long(), torch.zeros(len(values), dtype=torch.int64), []
    feature_of = [f for f, stride in enumerate(batch.strides) for _ in range(stride)]
    bounds = batch.offsets.tolist()
    for bag, f in enumerate(feature_of):
        for i in range(bounds[bag], bounds[bag + 1]):
            inside = min(max(int(values[i]), 0), blocks[f] * buckets - 1)
            if inside != int(values[i]):
                outside.append(i)
                shift[i], moved[i] = int(values[i]) - inside, inside
    first, last = bounds[0], bounds[-1]
    named = slice(first, last)
    expected = jagged_bucketize(
        moved[named], batch.offsets - first, torch.tensor(blocks), buckets, batch.strides, batch.weights[named]
    )
    locals_ = expected[0].index_add(0, expected[3], shift[named])
    assert same_bits(out, _fitted(locals_.to(values.dtype), len(values)))
    assert same_bits(offsets, expected[1])
    assert same_bits(weights, _fitted(expected[2], len(values)))
    assert same_bits(positions[named], expected[3])
    assert (positions[:first] == -1).all()
    assert (positions[last:] == -1).all()
    _check_status(status, min([INT64_MAX, *outside]), len(outside))


def _check_expand(r: random.Random, ops) -> None:
    rows, columns, count = r.randint(0, 5), r.choice([0, 1, 3, 4, 40]), r.choice([0, 1, 9, 200])
    inverse = torch.tensor([r.randrange(max(rows, 1)) for _ in range(count)], dtype=r.choice(INTEGERS))
    inverse = _spoil(r, inverse, [-1, rows, rows + 1], 5)
    x, grad = torch.randn(rows, columns), torch.randn(count, columns)
    numbers = inverse.long()
    good = (numbers >= 0) & (numbers < rows)
    expected = torch.zeros(count, columns)
    expected[good] = x[numbers[good]]
    out, status = ops.expand(x, inverse)
    assert same_bits(out, expected)
    bad = (~good).nonzero()[:, 0].tolist()
    _check_status(status, min([INT64_MAX, *bad]), len(bad))
    summed = ops.expand_backward(grad, inverse, rows)
    assert same_bits(summed, ops.expand_backward(grad[good], inverse[good], rows))


def _shared_call(r: random.Random, batch: int) -> tuple[dict, list[int], list[int]]:
    """Layout and bags of features in two groups or none, of tables with 5 rows; widths, and bags per feature."""
    groups = [r.choice([-1, 0, 1]) for _ in range(r.randint(1, 4))]
    widths = [r.choice([1, 4, 7, 40]) for _ in groups]
    of_group = [r.randint(1, batch) if batch else 0 for _ in range(2)]
    sizes = [batch if g < 0 else of_group[g] for g in groups]
    lengths = [r.choice([0, 1, 1, 3]) for _ in range(sum(sizes))]
    starts = [0, *itertools.accumulate(widths)]
    layout = {
        "values": torch.tensor([r.randrange(5) for _ in range(sum(lengths))], dtype=r.choice(INTEGERS)),
        "offsets": offsets_of(lengths, r.choice(INTEGERS)),
        "weight_offsets": torch.tensor(starts[:-1]) * 5,
        "row_offsets": torch.arange(len(widths)) * 5,
        "num_embeddings": torch.full((len(widths),), 5),
        "embedding_dims": torch.tensor(widths),
        "output_offsets": torch.tensor(starts[:-1]),
        "output_dim": starts[-1],
        "bag_starts": torch.tensor([0, *itertools.accumulate(sizes)]),
        "groups": groups,
    }
    return layout, widths, sizes


def _check_shared(r: random.Random, ops) -> None:
    batch = r.choice([0, 1, 5, 200])
    layout, widths, sizes = _shared_call(r, batch)
    starts, groups = layout["bag_starts"].tolist(), layout["groups"]
    limits = [next((n for n, of in zip(sizes, groups, strict=True) if of == g), 1) for g in range(2)]
    inverse = torch.tensor([[r.randrange(max(n, 1)) for _ in range(batch)] for n in limits], dtype=torch.int64)
    inverse = _spoil(r, inverse.view(-1), [-1, *limits, batch], 5).view(2, batch)
    weights, grad = torch.randn(5 * layout["output_dim"]), torch.randn(batch, layout["output_dim"])
    own = {k: v for k, v in layout.items() if k != "groups"}
    own |= {"output_offsets": torch.zeros(len(widths), dtype=torch.int64), "output_dim": max(widths)}
    pooled, _ = ops.embedding_bag(weights, **own)
    expected, sums, bad = [], [], []
    for f, (g, block) in enumerate(zip(groups, grad.split(widths, dim=1), strict=True)):
        numbers = torch.arange(batch) if g < 0 else inverse[g]
        rows = pooled[starts[f] : starts[f + 1], : widths[f]]
        out, status = ops.expand(rows, numbers)
        expected.append(out)
        sums.append(
            torch.nn.functional.pad(ops.expand_backward(block, numbers, sizes[f]), (0, max(widths) - widths[f]))
        )
        if status[0] != INT64_MAX:
            bad.append(BAD_LAYOUT + 1 + len(layout["offsets"]) + g * batch + int(status[0]))
    output, status = ops.embedding_bag(weights, **layout, inverse=inverse)
    assert same_bits(output, torch.cat(expected, dim=1))
    assert status[0] == min(bad, default=INT64_MAX)
    dense = ops.embedding_bag_backward_dense(torch.cat(sums), list(weights.shape), **own)
    found = ops.embedding_bag_backward_dense(grad, list(weights.shape), **layout, inverse=inverse)
    assert not found.any() if bad else same_bits(found, dense)  # bad offsets give empty bags


def check(seed: int, backend: Backend) -> int:
    """Calls each op once; returns how many of their batches had bad offsets. A failure prints the seed."""
    r = random.Random(seed)
    torch.manual_seed(seed)
    try:
        rows = BadRows(r)
        for each in (_check_dedup, _check_select, _check_windows, _check_permute, _check_bucketize):
            each(r, rows, backend.ops)
        _check_expand(r, backend.ops)
        _check_shared(r, backend.ops)
    except Exception as error:
        raise AssertionError(f"{backend.name}: seed {seed} of jagged_fuzz: {error!r}") from error
    return int(rows.first < 0)
