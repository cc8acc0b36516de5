"""Inputs of the ops on jagged rows: sessions, empty batches, batches of equal and of distinct bags."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from backends import Backend
from hypothesis import strategies as st
from torch import Tensor

import rec_kernels as rk
from rec_kernels.testing import jagged_batch, same_bits

INTEGERS = [torch.int32, torch.int64]
INT64_MAX, BAD_LAYOUT = 2**63 - 1, -(2**63)
NOTHING_BAD = [INT64_MAX, 0]


@dataclass
class Batch:
    """A key-major batch: features with batch sizes ``strides``."""

    values: Tensor
    offsets: Tensor
    weights: Tensor
    strides: list[int]

    @property
    def bags(self) -> int:
        return len(self.offsets) - 1


def offsets_of(lengths: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
    """[len(lengths) + 1]."""
    return torch.tensor(list(itertools.accumulate(lengths, initial=0))).to(dtype)


def make_batch(
    features: int,
    batch: int,
    *,
    rows: int = 50,
    mean_length: float = 3.0,
    session: int = 1,
    empty: float = 0.2,
    ids: torch.dtype = torch.int64,
    offsets: torch.dtype = torch.int64,
    seed: int = 0,
) -> Batch:
    """Every feature has ``batch`` bags; within a session, bags and weights repeat."""
    options = {"mean_length": mean_length, "session": session, "empty": empty, "seed": seed}
    values, bounds = jagged_batch([rows] * features, batch, **options, ids_dtype=ids, offsets_dtype=offsets)
    weights = torch.rand(rows, generator=torch.Generator().manual_seed(seed))[values.long()]
    return Batch(values, bounds, weights, [batch] * features)


def batch_of(bags: list[list[list[int]]], ids: torch.dtype = torch.int64, offsets: torch.dtype = torch.int64) -> Batch:
    """bags[f][b]: the ids of a bag."""
    flat = [bag for feature in bags for bag in feature]
    values = torch.tensor(list(itertools.chain.from_iterable(flat)), dtype=ids)
    weights = torch.linspace(-1, 2, len(values))
    return Batch(values, offsets_of([len(bag) for bag in flat], offsets), weights, [len(f) for f in bags])


def unchecked(keys: list[str], values: Tensor, offsets: list[int]) -> rk.KeyedJaggedTensor:
    """A batch with unchecked offsets, as made from tensors on a GPU."""
    return rk.KeyedJaggedTensor._from_parts(keys, values, torch.tensor(offsets))


def equal(features: int, batch: int) -> Batch:
    """A batch of equal samples."""
    sample = batch_of([[[7, 3, 7]] * batch] * features)
    sample.weights = sample.values / 8
    return sample


def distinct(features: int, batch: int) -> Batch:
    """A batch without equal bags in a feature."""
    return batch_of([[[f, b, 0] for b in range(batch)] for f in range(features)])


#: Edge cases by name.
ODD: dict[str, Callable[[], Batch]] = {
    "no features": lambda: batch_of([]),
    "no samples": lambda: batch_of([[], []]),
    "no ids": lambda: batch_of([[[], [], []], [[], [], []]]),
    "one sample": lambda: batch_of([[[5, 6]], [[]], [[7]]]),
    "all equal": lambda: equal(3, 40),
    "all distinct": lambda: distinct(2, 70),
    "a long bag": lambda: make_batch(2, 3, mean_length=150, empty=0.4, seed=3),
    "sessions": lambda: make_batch(4, 60, session=7, mean_length=5, seed=4),
    "narrow": lambda: make_batch(3, 33, rows=3, mean_length=1, ids=torch.int32, offsets=torch.int32, seed=5),
    "mixed widths": lambda: make_batch(3, 20, session=3, offsets=torch.int32, seed=6),
}


@st.composite
def batches(draw: st.DrawFn, strides: bool = False) -> Batch:
    """Any small batch; with ``strides``, features have different batch sizes."""
    features, size = draw(st.integers(0, 4)), draw(st.integers(0, 9))
    found = make_batch(
        features,
        size,
        rows=draw(st.sampled_from([1, 3, 100])),
        mean_length=draw(st.sampled_from([0.5, 2, 9])),
        session=draw(st.sampled_from([1, 3])),
        empty=draw(st.sampled_from([0.0, 0.3, 1.0])),
        ids=draw(st.sampled_from(INTEGERS)),
        offsets=draw(st.sampled_from(INTEGERS)),
        seed=draw(st.integers(0, 2**20)),
    )
    if strides and features:
        cuts = sorted(draw(st.lists(st.integers(0, found.bags), min_size=features - 1, max_size=features - 1)))
        found.strides = [b - a for a, b in itertools.pairwise([0, *cuts, found.bags])]
    return found


def check_tensors(backend: Backend, found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Asserts the expected bits, followed by a status without an error."""
    for i, (a, b) in enumerate(zip(found[:-1], expected, strict=True)):
        assert same_bits(a, b), (backend.name, i, a, b)
    assert found[-1].tolist() == NOTHING_BAD, backend.name


def check_compiled(step: Callable, features: int) -> None:
    """Compares ``step(values, offsets, weights, size)`` and its weight gradient with torch.compile's, in one graph.

    Runs batches of two sizes.
    """
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for size in (4, 9):
        batch, results = make_batch(features, size), []
        for function in (step, compiled):
            weights = batch.weights.clone().requires_grad_()
            loss, *rest = function(batch.values, batch.offsets, weights, size)
            loss.backward()
            results.append((weights.grad, *rest))
        assert all(map(same_bits, *results))


#: Offsets of six bags over seven ids, and the index of the first wrong one.
BAD_OFFSETS = [
    ([0, 1, 3, 2, 4, 6, 7], 3),
    ([0, 1, 3, 3, 4, 6, 8], 6),
    ([0, 99, 3, 3, 4, 6, 7], 1),
    ([-1, 1, 3, 3, 4, 6, 7], 0),
    ([8, 8, 8, 8, 8, 8, 8], 0),
    ([0, 1, -3, 3, 4, 6, 7], 2),
    ([0, 7, 0, 7, 0, 7, 7], 2),
]


def good_rows(offsets: list[int], ids: int) -> list[tuple[int, int]]:
    """[start, stop) of every row; empty where the row's own offsets are bad."""
    pairs = itertools.pairwise(offsets)
    return [(a, b) if 0 <= a <= b <= ids else (0, 0) for a, b in pairs]
