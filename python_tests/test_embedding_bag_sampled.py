"""Every op of the family against the plain reference, bit for bit, on samples of all that is offered together."""

from __future__ import annotations

import pytest
from backends import cpu_backends, every_backend
from embedding_bag_call_cases import ALL_OPTIMIZERS
from embedding_bag_checks import Backends, check_gradients, check_lookups, check_update
from embedding_bag_format_cases import ROUNDINGS
from embedding_bag_samples import Sample, samples
from hypothesis import find, settings
from tiers import drawn

from rec_kernels.nn.tables.config import BAG_FORMATS


def check(sample: Sample, backends: Backends) -> None:
    """All of it."""
    encoded, mode = sample.encoded(), {"bounds_check": sample.bounds_check}
    check_lookups(encoded, backends, **mode)
    check_gradients(encoded.case, backends, **mode)
    check_update(encoded, sample.optimizer, sample.rounding, backends, sample.grad_scale, **mode)


@pytest.mark.full
@drawn(250, samples())
def test_cpu(sample: Sample) -> None:
    """Every instruction set, with several numbers of threads."""
    check(sample, cpu_backends)


@drawn(130, samples())
def test_every_backend(sample: Sample) -> None:
    """The CUDA kernels as well."""
    check(sample, every_backend)


#: Both poolings of each optimizer, one of them with weights, in turn: every two of the options have all of their pairs.
GRID = [(o, pooling, (pooling == "sum") != i % 2) for i, o in enumerate(ALL_OPTIMIZERS) for pooling in ("sum", "mean")]


@pytest.mark.parametrize(("optimizer", "pooling", "weighted"), GRID)
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


@pytest.mark.full
def test_failures_shrink_to_few_numbers() -> None:
    """A kernel that is wrong for one format and one width: that table alone, in one bag of one id."""

    def wrong(sample: Sample) -> bool:
        return any(table[1:] == (17, "mx6") for table in sample.tables) and any(map(any, sample.lengths))

    smallest = find(samples(), wrong, settings=settings(max_examples=2000, derandomize=True, database=None))
    assert smallest.tables == [(1, 17, "mx6")]
    assert sum(map(sum, smallest.lengths)) == 1
