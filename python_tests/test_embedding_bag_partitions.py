"""Partitioned features: hashed ids, and rows composed from several tables."""

from __future__ import annotations

import pytest
import torch
from backends import cpu_backends, every_backend
from embedding_bag_cases import DIMS, OPTIMIZERS, Case, make_case, wide_floats
from embedding_bag_checks import check_gradients, check_lookups, check_update
from embedding_bag_format_cases import ROUNDINGS, EncodedCase
from embedding_bag_moment_cases import ELEMENTWISE
from hypothesis import strategies as st
from layout_calls import OPS
from tiers import drawn

from rec_kernels.nn.tables.config import BAG_FORMATS
from rec_kernels.reference.embedding_bag import Parts
from rec_kernels.testing import same_bits

ops = OPS
NUMBERS = st.integers(1, 9) | st.sampled_from([2**31 - 1, 2**31, 2**33, 2**62])


@st.composite
def partitioned(draw, formats: list[str] | None = None) -> tuple[Case, list[str]]:
    """Features of one to four parts, and plain ones; tables in the order of the parts, some shared."""
    tables, kinds, features = [], [], []
    for _ in range(draw(st.integers(1, 3))):
        combine = draw(st.sampled_from(["concat", "add", "mult"]))
        num_ids = draw(st.integers(1, 40) | st.sampled_from([2**24 + 2, 2**31 + 2, 2**40]))
        dim, format, parts, partitions = draw(st.sampled_from(DIMS)), draw(st.sampled_from(formats or ["fp32"])), [], []
        for _ in range(draw(st.integers(1, 4))):
            # A divisor or a modulus that keeps the table small.
            divisor, modulus = draw(NUMBERS), draw(st.integers(1, 9))
            partitions.append((divisor, modulus))
            if combine == "concat":
                dim, format = draw(st.sampled_from(DIMS[:12])), draw(st.sampled_from(formats or ["fp32"]))
            parts.append(len(tables))
            tables.append((min(modulus, -(-num_ids // divisor)) + draw(st.integers(0, 2)), dim))
            kinds.append(format)
        features.append(Parts(parts, partitions, num_ids, combine))
        if draw(st.booleans()):
            hashed = draw(st.sampled_from(parts))
            features.append(Parts([hashed], [(1, draw(st.integers(1, tables[hashed][0])))], None, "concat"))
        if draw(st.booleans()):
            features.append(draw(st.sampled_from(parts)))
    if draw(st.booleans()):
        features.append(features[0])
    bags = len(features) * draw(st.integers(0, 3))
    lengths = draw(st.lists(st.sampled_from([0, 1, 1, 2, 5]), min_size=bags, max_size=bags))
    case = make_case(
        tables,
        features,
        lengths,
        mean=draw(st.lists(st.booleans(), min_size=len(features), max_size=len(features))),
        weighted=draw(st.booleans()),
        offsets_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        padding_idx=draw(st.sampled_from([-1, 0, 3])),
        gaps=[1] * len(tables),
        seed=draw(st.integers(0, 1000)),
    )
    return case, kinds


@drawn(60, partitioned())
def test_float_tables(of: tuple[Case, list[str]]) -> None:
    """Output, gradients and updates of any features over float32 tables."""
    case, formats = of
    encoded = EncodedCase(case, formats, gaps=[0] * len(formats))
    check_lookups(encoded, every_backend)
    check_gradients(case, every_backend)
    for optimizer in OPTIMIZERS:
        check_update(encoded, optimizer, "nearest", every_backend)


@drawn(40, partitioned(list(BAG_FORMATS)), st.sampled_from([*OPTIMIZERS, *ELEMENTWISE]), st.sampled_from(ROUNDINGS))
def test_formats(of: tuple[Case, list[str]], optimizer: str, rounding: str) -> None:
    """Tables of every format work with every optimizer."""
    encoded = EncodedCase(*of)
    check_lookups(encoded, every_backend)
    check_update(encoded, optimizer, rounding, every_backend)


def _quotient_remainder(num_ids: int, collisions: int, dim: int, combine: str = "mult") -> tuple:
    """Tables and the feature of the quotient-remainder trick: two ids never share both rows."""
    buckets = -(-num_ids // collisions)
    return [(buckets, dim), (collisions, dim)], Parts([0, 1], [(1, buckets), (buckets, collisions)], num_ids, combine)


@pytest.mark.parametrize("combine", ["add", "mult", "concat"])
@pytest.mark.parametrize("dim", [1, 16, 100, 300])
def test_same_as_the_whole_table(combine: str, dim: int) -> None:
    """The output has the bits of a plain table with the composed rows, also for long bags."""
    tables, feature = _quotient_remainder(50, 7, dim, combine)
    case = make_case(tables, [feature], [3, 0, 900, 1, 5000], weighted=dim == 16, seed=dim)
    views = case.split(case.weights)
    whole = torch.stack([feature.row(views, i) for i in range(50)])
    for backend in every_backend():
        found, _ = backend.ops.embedding_bag(case.weights, *case.jagged, **case.layout)
        expected, _ = backend.ops.embedding_bag(whole, *case.jagged)
        assert same_bits(found, expected), backend.name


@pytest.mark.parametrize("occurrences", [1, 64, 65, 4200])
@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "adam"])
def test_hot_remainder(occurrences: int, optimizer: str) -> None:
    """Each id uses one of two rows of a small table, and of many of a large one: one and two levels of chunks."""
    tables, feature = _quotient_remainder(30, 2, 20)
    lengths = [occurrences - occurrences // 3, occurrences // 3, 0, 2]
    case = make_case([*tables, (3, 4)], [feature, 2], lengths, seed=occurrences)
    encoded = EncodedCase(case, ["fp32", "fp32", "int8"])
    check_update(encoded, optimizer, "stochastic", every_backend)
    check_update(encoded, optimizer, "stochastic", every_backend, grad_scale=3.7)


@pytest.mark.parametrize("pairs", [[(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 1), (1, 2)], [(0, 3), (1, 2)]], ids=str)
def test_many_gradients(pairs: list[tuple[int, int]]) -> None:
    """Tables so wide that they are processed in turn, except multiplied ones, wherever these are in memory."""
    tables = [(7, 600), (5, 600), (9, 600), (4, 600)]
    features = [Parts(list(p), [(1, tables[p[0]][0]), (1, tables[p[1]][0])], 20, "mult") for p in pairs]
    case = make_case(tables, features, [90, 200, 60, 190], seed=1)
    check_gradients(case, cpu_backends)
    check_update(EncodedCase(case, ["fp32"] * 4), "sgd", "nearest", cpu_backends)


@pytest.mark.parametrize("combine", ["mult", "add", "concat"])
@pytest.mark.parametrize("dim", [3, 16, 128, 144])
def test_one_id_each(combine: str, dim: int) -> None:
    """Bags of one id, some out of range; with padding, another kernel reports these."""
    tables, feature = _quotient_remainder(50, 7, dim, combine)
    case = make_case(tables, [feature], [1] * 70, seed=dim, **({"padding_idx": 3} if dim > 16 else {}))
    case.values[[5, 6, 40]] = torch.tensor([3, 50, -1])
    case.weights[: dim * 2] = -0.0  # a sum starts from 0, and is 0 again
    for backend in every_backend():
        output, status = backend.ops.embedding_bag(case.weights, *case.jagged, **case.layout, bounds_check="ignore")
        assert same_bits(output, case.expected_output()), backend.name
        assert status.tolist() == [6, 2], backend.name


BAD_LAYOUTS = {
    "divisors": (torch.tensor([1, 0]), r"divisors\[1\] = 0 must be at least 1"),
    "moduli": (torch.tensor([0, 7]), r"moduli\[0\] = 0 must be at least 1"),
    "id_limits": (torch.tensor([-1]), r"id_limits\[0\] = -1 must not be negative"),
    "combine": (torch.tensor([3]), r"combine\[0\] = 3 must be concat \(0\), add \(1\) or mult \(2\)"),
    "partition_starts": (torch.tensor([0, 1]), r"partitions.starts\[1\] = 1 must be 2"),
    "embedding_dims": (torch.tensor([5, 4]), r"\[1\] = 4 .*, of part 1 of feature 0, must be those of its part 0, 5"),
    "row_offsets": (
        torch.tensor([0, 0]),
        r"\[1\] = 0, of part 1 of feature 0, is also that of the feature's part 0: .* different",
    ),
}


@pytest.mark.parametrize("name", BAD_LAYOUTS)
def test_bad_layout(name: str) -> None:
    """A bad layout raises with the argument and what is allowed."""
    tables, feature = _quotient_remainder(50, 7, 5)
    case = make_case(tables, [feature], [1, 2], seed=1)
    value, message = BAD_LAYOUTS[name]
    with pytest.raises(ValueError, match=message):
        ops.embedding_bag(case.weights, *case.jagged, **(case.layout | {name: value}))


def test_bad_partitions() -> None:
    """Tables smaller than their modulus, more than four parts, and tables beyond the weights are rejected."""
    tables, feature = _quotient_remainder(50, 7, 5)
    case = make_case(tables, [feature], [1, 2], seed=1)
    with pytest.raises(ValueError, match=r"num_embeddings\[0\] = 8 must be at least 9, the rows that .* map"):
        ops.embedding_bag(case.weights, *case.jagged, **(case.layout | {"moduli": torch.tensor([9, 7])}))
    with pytest.raises(ValueError, match=r"layout\[1\]: a table of 7 x 5 \(fp32\) at byte 164 does not fit"):
        ops.embedding_bag(case.weights, *case.jagged, **(case.layout | {"weight_offsets": torch.tensor([0, 41])}))
    many = make_case([(2, 3)] * 5, [Parts([0, 1, 2, 3, 4], [(1, 2)] * 5, 2, "add")], [1])
    with pytest.raises(ValueError, match=r"partitions.starts\[1\] = 5 must be 1 to 4 greater than"):
        ops.embedding_bag(many.weights, *many.jagged, **many.layout)


@pytest.mark.parametrize("combine", ["mult", "add"])
def test_autograd(combine: str) -> None:
    """Gradients through autograd equal those of the composed rows in double precision, up to rounding."""
    tables, feature = _quotient_remainder(20, 4, 6, combine)
    case = make_case(tables, [feature], [3, 2, 4], weighted=True, seed=2)
    weights, factors = wide_floats(54, seed=1).requires_grad_(), case.per_sample_weights.clone().requires_grad_()
    values, offsets, _ = case.jagged
    output, _ = ops.embedding_bag(weights, values, offsets, factors, **case.layout)
    output.backward(case.grad)
    w, f = (t.detach().double().requires_grad_() for t in (weights, factors))
    first, second = (
        t.view(-1, 6)[[feature.rows(i)[p] for i in values.tolist()]] for p, t in enumerate(w.split([30, 24]))
    )
    rows = (first * second if combine == "mult" else first + second) * f[:, None]
    bags = torch.repeat_interleave(torch.arange(3), offsets.diff())
    torch.zeros(3, 6, dtype=torch.double).index_add(0, bags, rows).backward(case.grad.double())
    torch.testing.assert_close(weights.grad.double(), w.grad, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(factors.grad.double(), f.grad, rtol=1e-5, atol=1e-3)
