"""Hypothesis samples of every kind of embedding_bag call: a few numbers, which print as a constructor call."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from embedding_bag_call_cases import ALL_OPTIMIZERS
from embedding_bag_cases import make_case
from embedding_bag_format_cases import ROUNDINGS, EncodedCase
from hypothesis import strategies as st

from rec_kernels.nn.tables.config import BAG_FORMATS
from rec_kernels.reference.embedding_bag import Parts

COLUMNS = [1, 2, 3, 4, 7, 8, 16, 17, 31, 32, 33, 64, 100, 129, 260]
ROWS = st.integers(1, 4) | st.integers(1, 200)
# Powers of two, and a number with an inexact reciprocal.
SCALES = [1.0, 2.0**16, 0.25, 3.7]


@dataclass(frozen=True)
class Sample:
    """One call; rows, ids and gradient are drawn from ``seed``.

    ``repr`` is the complete case, without defaults: ``Sample(tables=[(3, 4, 'int8')], features=[(0, 'sum')],
    lengths=[[2, 0]])``.
    """

    tables: list[tuple[int, int, str]]  # (E, D, format)
    features: list[tuple[int | Parts, str]]  # (table or parts, pooling)
    lengths: list[list[int]]  # of the bags of each feature
    weighted: bool = False
    padding_idx: int | list[int] = -1
    bounds_check: str = "error"
    bad_ids: list[int] = field(default_factory=list)  # the last ids of the call; for "ignore"
    unused: tuple[int, int] = (0, 0)  # ids before and after all bags; not with bad_ids
    ids: int = 64
    offsets: int = 64
    gaps: int = 0  # unused bytes before each table
    optimizer: str = "sgd"
    rounding: str = "nearest"
    grad_scale: float = 1.0
    seed: int = 0

    def __repr__(self) -> str:
        given = ((name, getattr(self, name)) for name in self.__dataclass_fields__)
        shown = [f"{name}={value!r}" for name, value in given if value != DEFAULTS.get(name)]
        return f"Sample({', '.join(shown)})"

    def encoded(self) -> EncodedCase:
        widths = {32: torch.int32, 64: torch.int64}
        case = make_case(
            [table[:2] for table in self.tables],
            [table for table, _ in self.features],
            [n for bags in self.lengths for n in bags],
            mean=[pooling == "mean" for _, pooling in self.features],
            weighted=self.weighted,
            ids_dtype=widths[self.ids],
            offsets_dtype=widths[self.offsets],
            padding_idx=self.padding_idx,
            unused=self.unused,
            seed=self.seed,
        )
        bad = torch.tensor(self.bad_ids, dtype=case.values.dtype)[: len(case.values)]
        case.values[len(case.values) - len(bad) :] = bad
        return EncodedCase(case, [table[2] for table in self.tables], gaps=[self.gaps] * len(self.tables))


DEFAULTS = {name: f.default for name, f in Sample.__dataclass_fields__.items()} | {"bad_ids": []}


@st.composite
def samples(draw) -> Sample:
    """One to five tables, and up to six features over them; small ones first, for shrinking."""
    table = st.tuples(ROWS, st.sampled_from(COLUMNS), st.sampled_from(BAG_FORMATS))
    tables = draw(st.lists(table, min_size=1, max_size=5))
    feature = st.tuples(st.integers(0, len(tables) - 1), st.sampled_from(["sum", "mean"]))
    features = draw(st.lists(feature, min_size=1, max_size=6))
    batch = draw(st.integers(0, 4))
    long = draw(st.integers(0, 5)) == 5
    bags = st.lists(st.sampled_from([0, 1, 2, 3, 7]), min_size=batch, max_size=batch)
    lengths = draw(st.lists(bags, min_size=len(features), max_size=len(features)))
    if batch and long:
        lengths[0][0] = 67  # more than a chunk, if the table has one row
    bounds_check = draw(st.sampled_from(["error", "ignore", "none"]))
    padding = st.sampled_from([-1, 0, 1, 57])
    bad = st.sampled_from([-1, 57, 200, -(2**31), 2**31 - 1])  # out of range for many tables or all, in 32 bits
    bad_ids = draw(st.lists(bad, max_size=3)) if bounds_check == "ignore" else []
    return Sample(
        tables,
        features,
        lengths,
        weighted=draw(st.booleans()),
        padding_idx=draw(padding | st.lists(padding, min_size=len(features), max_size=len(features))),
        bounds_check=bounds_check,
        bad_ids=bad_ids,
        unused=(0, 0) if bad_ids else draw(st.sampled_from([(0, 0), (0, 0), (2, 0), (0, 3)])),
        ids=draw(st.sampled_from([64, 32])),
        offsets=draw(st.sampled_from([64, 32])),
        gaps=draw(st.sampled_from([0, 1, 16])),
        optimizer=draw(st.sampled_from(ALL_OPTIMIZERS)),
        rounding=draw(st.sampled_from(ROUNDINGS)),
        grad_scale=draw(st.sampled_from(SCALES)),
        seed=draw(st.integers(0, 2**16)),
    )
