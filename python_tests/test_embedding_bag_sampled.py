"""Every op of the family has the reference's bits, on samples of all options combined."""

from __future__ import annotations

import pytest
import torch
from backends import cpu_backends, every_backend
from embedding_bag_call_cases import ALL_OPTIMIZERS
from embedding_bag_checks import Backends, check_gradients, check_lookups, check_update
from embedding_bag_format_cases import ROUNDINGS
from embedding_bag_samples import Sample, samples
from hypothesis import find, settings
from tiers import drawn

from rec_kernels.nn.tables.config import BAG_FORMATS
from rec_kernels.testing import same_bits


def check(sample: Sample, backends: Backends) -> None:
    """Checks every op."""
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
    check(sample, every_backend)


#: Both poolings of each optimizer, one of them with weights, alternating: all pairs of options occur.
GRID = [(o, pooling, (pooling == "sum") != i % 2) for i, o in enumerate(ALL_OPTIMIZERS) for pooling in ("sum", "mean")]


@pytest.mark.parametrize(("optimizer", "pooling", "weighted"), GRID)
def test_grid(optimizer: str, pooling: str, weighted: bool) -> None:
    """Every format in widths at and around a block or vector; both roundings, and a scaled loss."""
    tables = [(3, columns, format) for format in BAG_FORMATS for columns in (1, 4, 5, 33)]
    features, lengths = [(t, pooling) for t in range(len(tables))], [[2, 1, 0]] * len(tables)
    for rounding, scale in zip(ROUNDINGS, (1.0, 3.7), strict=True):
        options = {"weighted": weighted, "optimizer": optimizer, "rounding": rounding, "grad_scale": scale, "gaps": 1}
        check(Sample(tables, features, lengths, **options), every_backend)


@pytest.mark.parametrize("optimizer", ALL_OPTIMIZERS)
@pytest.mark.parametrize("lengths", [[], [0, 0, 0]], ids=str)
def test_empty_bags_only(lengths: list[int], optimizer: str) -> None:
    """Without ids: zeros, empty gradients, and an update that counts the step and changes nothing else."""
    tables = [(4, 5, format) for format in BAG_FORMATS]
    sample = Sample(tables, [(t, "sum") for t in range(8)], [lengths] * 8, optimizer=optimizer)
    check(sample, every_backend)
    case = sample.encoded().case
    assert not case.row_gradients
    assert same_bits(case.expected_output(), torch.zeros(len(lengths), 40))


def test_samples_print_as_what_they_are() -> None:
    """A failure prints the sample without defaults, as a constructor call."""
    plain = Sample([(3, 4, "int8")], [(0, "sum")], [[2, 0]])
    assert repr(plain) == "Sample(tables=[(3, 4, 'int8')], features=[(0, 'sum')], lengths=[[2, 0]])"
    other = Sample([(3, 4, "int8")], [(0, "sum")], [[2, 0]], weighted=True, bad_ids=[-1], seed=3)
    assert repr(other) == repr(plain)[:-1] + ", weighted=True, bad_ids=[-1], seed=3)"
    assert eval(repr(other)) == other


@pytest.mark.full
def test_failures_shrink_to_few_numbers() -> None:
    """A bug in one format and width shrinks to that table, with one bag of one id."""

    def wrong(sample: Sample) -> bool:
        return any(table[1:] == (17, "mx6") for table in sample.tables) and any(map(any, sample.lengths))

    smallest = find(samples(), wrong, settings=settings(max_examples=2000, derandomize=True, database=None))
    assert smallest.tables == [(1, 17, "mx6")]
    assert sum(map(sum, smallest.lengths)) == 1
