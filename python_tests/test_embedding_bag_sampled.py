"""Every op of the family against the plain reference, bit for bit, on samples of all that is offered together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from backends import Backend, cpu_backends, every_backend
from embedding_bag_call_cases import ALL_OPTIMIZERS
from embedding_bag_cases import Case
from embedding_bag_format_cases import INT64_MAX, ROUNDINGS, STEP, EncodedCase
from embedding_bag_moment_cases import ELEMENTWISE, MomentCase
from embedding_bag_samples import Sample, samples
from hypothesis import find, given, settings
from torch import Tensor

from rec_kernels.nn.tables import BAG_FORMATS
from rec_kernels.testing import same_bits

Backends = Callable[[], Iterator[Backend]]


def expected_status(case: Case) -> list[int]:
    """The first id outside of its table, and how many there are."""
    sizes = torch.tensor([case.tables[t][0] for t in case.features]).repeat_interleave(case.batch)
    limits = sizes.repeat_interleave(case.offsets.diff())
    ids = case.values.long()
    bad = ((ids < 0) | (ids >= limits)).nonzero().flatten().tolist()
    return [bad[0] if bad else INT64_MAX, len(bad)]


def check_lookups(encoded: EncodedCase, backends: Backends, **options) -> None:
    """Output, status and the gradient of per_sample_weights."""
    case, layout = encoded.case, encoded.layout | options
    output, factors, status = case.expected_output(), case.expected_factor_gradient(), expected_status(case)
    values, offsets, _ = case.jagged
    for backend in backends():
        found, noted = backend.ops.embedding_bag(encoded.flat, *case.jagged, **layout)
        assert same_bits(found, output), ("output", backend.name)
        assert noted.tolist() == status, ("status", backend.name)
        found = backend.ops.embedding_bag_backward_per_sample_weights(
            case.grad, encoded.flat, values, offsets, **layout
        )
        assert same_bits(found, factors), ("gradient of per_sample_weights", backend.name)


def check_gradients(case: Case, backends: Backends, **options) -> None:
    """Dense and sparse gradients of the tables, which are float32 to them."""
    dense, touched = case.expected_dense_gradient(), sorted(case.row_gradients)
    row_grads = torch.cat([torch.zeros(0), *(case.row_gradients[key] for key in touched)])
    given = (case.grad, list(case.weights.shape), *case.jagged)
    for backend in backends():
        found = backend.ops.embedding_bag_backward_dense(*given, **case.layout, **options)
        assert same_bits(found, dense), ("dense gradient", backend.name)
        rows, found, counts = backend.ops.embedding_bag_backward_sparse(*given, **case.layout, **options)
        assert rows.tolist() == [row for _, row in touched], ("rows of the sparse gradient", backend.name)
        assert counts.tolist() == [sum(t == table for t, _ in touched) for table in case.features], backend.name
        assert same_bits(found, row_grads), ("sparse gradient", backend.name)


def check_update(
    encoded: EncodedCase, optimizer: str, rounding: str, backends: Backends, grad_scale: float = 1.0, **options
) -> None:
    """Bytes, state and step after a fused update; what no id names, and what lies between tables, stays."""
    scale = (1 / torch.tensor(grad_scale)).item()
    if grad_scale != 1:
        options["grad_scale"] = torch.tensor(grad_scale)
    if optimizer in ELEMENTWISE:
        moments = MomentCase(encoded, optimizer)
        update, (flat, state) = functools.partial(moments.update, rounding), moments.expected(rounding, scale)
    else:
        flat, state = encoded.expected_update(optimizer, rounding, scale)
        update = functools.partial(encoded.update, optimizer, rounding)
    for backend in backends():
        found, found_state, step = update(backend.ops, **options)
        assert encoded.same_tables(found, flat), ("rows", changed_tables(encoded, found, flat), backend.name)
        assert not differing(found_state, state), ("state", differing(found_state, state), backend.name)
        assert step.item() == STEP + 1, backend.name


def changed_tables(encoded: EncodedCase, found: Tensor, expected: Tensor) -> list[tuple]:
    """Those with other bytes; none: it is the bytes between them."""
    kinds = zip(encoded.case.tables, encoded.formats, encoded.split(found), encoded.split(expected), strict=True)
    return [(*shape, format) for shape, format, a, b in kinds if not torch.equal(a, b)]


def differing(found: Tensor | dict[str, Tensor], expected: Tensor | dict[str, Tensor]) -> list[str]:
    """Names of the state that has other bits."""
    if isinstance(found, Tensor):
        found, expected = {"sum": found}, {"sum": expected}
    return [name for name, t in expected.items() if not same_bits(found[name], t)]


def check(sample: Sample, backends: Backends) -> None:
    """All of it."""
    encoded, mode = sample.encoded(), {"bounds_check": sample.bounds_check}
    check_lookups(encoded, backends, **mode)
    check_gradients(encoded.case, backends, **mode)
    check_update(encoded, sample.optimizer, sample.rounding, backends, sample.grad_scale, **mode)


@settings(max_examples=250)
@given(samples())
def test_cpu(sample: Sample) -> None:
    """Every instruction set, with several numbers of threads."""
    check(sample, cpu_backends)


@settings(max_examples=100)
@given(samples())
def test_every_backend(sample: Sample) -> None:
    """The CUDA kernels as well."""
    check(sample, every_backend)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("optimizer", ALL_OPTIMIZERS)
def test_grid(optimizer: str, pooling: str, weighted: bool) -> None:
    """Every format in every width: a block or a vector, less, and a little more; both roundings."""
    tables = [(3, columns, format) for format in BAG_FORMATS for columns in (1, 4, 5, 33)]
    features, lengths = [(t, pooling) for t in range(len(tables))], [[2, 1, 0]] * len(tables)
    for rounding in ROUNDINGS:
        options = {"weighted": weighted, "optimizer": optimizer, "rounding": rounding, "gaps": 1}
        check(Sample(tables, features, lengths, **options), every_backend)


def test_samples_print_as_what_they_are() -> None:
    """A failure names what is not as it would be by default, as a call that makes the sample again."""
    plain = Sample([(3, 4, "int8")], [(0, "sum")], [[2, 0]])
    assert repr(plain) == "Sample(tables=[(3, 4, 'int8')], features=[(0, 'sum')], lengths=[[2, 0]])"
    other = Sample([(3, 4, "int8")], [(0, "sum")], [[2, 0]], weighted=True, bad_ids=[-1], seed=3)
    assert repr(other) == repr(plain)[:-1] + ", weighted=True, bad_ids=[-1], seed=3)"
    assert eval(repr(other)) == other


def test_failures_shrink_to_few_numbers() -> None:
    """A kernel that is wrong for one format and one width: that table alone, in one bag of one id."""

    def wrong(sample: Sample) -> bool:
        return any(table[1:] == (17, "mx6") for table in sample.tables) and any(map(any, sample.lengths))

    smallest = find(samples(), wrong, settings=settings(max_examples=2000, derandomize=True, database=None))
    assert repr(smallest) == "Sample(tables=[(1, 17, 'mx6')], features=[(0, 'sum')], lengths=[[1]])"
