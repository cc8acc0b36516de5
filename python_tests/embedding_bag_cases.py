"""Cases of embedding_bag: random calls over many tables, and the reference's results."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from layout_calls import OPS
from torch import Tensor

from rec_kernels.reference import embedding_bag as reference
from rec_kernels.reference.embedding_bag import Parts
from rec_kernels.reference.gradient_step import GradientStep

LR, EPS = 0.05, 1e-8
OPTIMIZERS = ["sgd", "rowwise_adagrad"]
DIMS = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 64, 100, 112, 127, 128, 129, 144, 256, 300]


def wide_floats(*shape: int, seed: int) -> Tensor:
    """Floats of very different magnitudes, so that another order of summation gives another result."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g) * torch.exp2(torch.randint(-12, 12, shape, generator=g))


COMBINE = ["concat", "add", "mult"]  # by their codes in layouts


def _num_ids(tables: list[tuple[int, int]], feature: int | Parts) -> int | None:
    return feature.num_ids if isinstance(feature, Parts) else tables[feature][0]


@dataclass
class Case:
    """One call over several tables, in flat weights with NaN gaps between the tables."""

    tables: list[tuple[int, int]]
    features: list[int | Parts]  # table of each feature, or its tables
    mean: list[bool]
    values: Tensor
    offsets: Tensor
    per_sample_weights: Tensor | None
    padding_idx: int | list[int | None]  # of all features, or of each
    gaps: list[int]  # floats before each table
    seed: int

    @property
    def batch(self) -> int:
        return (len(self.offsets) - 1) // len(self.features)

    @functools.cached_property
    def starts(self) -> list[int]:
        """Start of each table in the flat weights."""
        starts, at = [], 0
        for gap, (rows, columns) in zip(self.gaps, self.tables, strict=True):
            starts.append(at + gap)
            at += gap + rows * columns
        return starts

    @functools.cached_property
    def weights(self) -> Tensor:
        (rows, columns), last = self.tables[-1], self.starts[-1]
        flat = torch.full((last + rows * columns,), torch.nan)
        for t, view in enumerate(self.split(flat)):
            view.copy_(wide_floats(*view.shape, seed=self.seed + t))
        return flat

    @functools.cached_property
    def grad(self) -> Tensor:
        """Gradient of the output."""
        return wide_floats(self.batch, self.layout["output_dim"], seed=self.seed + 1000)

    @functools.cached_property
    def first_rows(self) -> list[int]:
        """Linear row index of each table's row 0; one row stays unused between tables."""
        rows = [0]
        for e, _ in self.tables[:-1]:
            rows.append(rows[-1] + e + 1)
        return rows

    @property
    def num_ids(self) -> list[int | None]:
        """Number of ids of each feature; None: every integer is an id."""
        return [_num_ids(self.tables, f) for f in self.features]

    @property
    def parts(self) -> list[int]:
        """The tables of all parts of all features."""
        return [t for f in self.features for t in (f.tables if isinstance(f, Parts) else [f])]

    @functools.cached_property
    def layout(self) -> dict:
        """The layout arguments of the ops."""
        numbers = {
            "weight_offsets": [self.starts[t] for t in self.parts],
            "row_offsets": [self.first_rows[t] for t in self.parts],
            "num_embeddings": [self.tables[t][0] for t in self.parts],
            "embedding_dims": [self.tables[t][1] for t in self.parts],
        }
        numbers["output_offsets"], columns = self._columns()
        if any(isinstance(f, Parts) for f in self.features):
            numbers |= self.partitions()
        limits = {"id_limits": numbers.pop("id_limits")} if "id_limits" in numbers else {}  # a tensor cannot hold None
        layout = limits | {name: torch.tensor(n, dtype=torch.int64) for name, n in numbers.items()}
        return layout | {"mean": torch.tensor(self.mean), "output_dim": columns, "padding_idx": self.padding_idx}

    @property
    def columns(self) -> list[tuple[list[int], int]]:
        """First column of each part relative to its feature, and number of columns."""
        found = []
        for f in self.features:
            dims = [self.tables[t][1] for t in (f.tables if isinstance(f, Parts) else [f])]
            together = isinstance(f, Parts) and f.combine != "concat"
            firsts = [0 if together else sum(dims[:p]) for p in range(len(dims))]
            found.append((firsts, dims[0] if together else sum(dims)))
        return found

    def _columns(self) -> tuple[list[int], int]:
        """First column of each part in the output, and number of columns."""
        firsts, column = [], 0
        for mine, width in self.columns:
            firsts += [column + first for first in mine]
            column += width
        return firsts, column

    def partitions(self) -> dict[str, list[int]]:
        """Layout arguments of partitioned features: how ids select rows of several tables."""
        whole = [
            Parts([f], [(1, 2**62)], self.tables[f][0], "concat") if isinstance(f, int) else f for f in self.features
        ]
        starts = [0]
        for f in whole:
            starts.append(starts[-1] + len(f.tables))
        return {
            "partition_starts": starts,
            "divisors": [divisor for f in whole for divisor, _ in f.partitions],
            "moduli": [modulus for f in whole for _, modulus in f.partitions],
            "id_limits": [f.num_ids for f in whole],
            "combine": [COMBINE.index(f.combine) for f in whole],
        }

    @property
    def jagged(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Ids, offsets and weights of the bags."""
        return self.values, self.offsets, self.per_sample_weights

    @functools.cached_property
    def sum(self) -> Tensor:
        """Row-wise Adagrad state before the update."""
        return wide_floats(self.first_rows[-1] + self.tables[-1][0], seed=self.seed + 2000).abs()

    def split(self, flat: Tensor) -> list[Tensor]:
        """Views [E, D] of the tables in flat weights."""
        return [flat[s : s + e * d].view(e, d) for s, (e, d) in zip(self.starts, self.tables, strict=True)]

    def _reference_arguments(self) -> tuple:
        bags = reference.Bags(self.values, self.offsets, self.per_sample_weights, self.padding_idx)
        return self.split(self.weights), self.features, self.mean, bags

    def expected_output(self) -> Tensor:
        return reference.embedding_bag(*self._reference_arguments())

    @functools.cached_property
    def row_gradients(self) -> dict[tuple[int, int], Tensor]:
        return reference.row_gradients(self.grad, *self._reference_arguments())

    def expected_factor_gradient(self) -> Tensor:
        return reference.per_sample_weights_gradient(self.grad, *self._reference_arguments())

    def expected_dense_gradient(self) -> Tensor:
        flat = torch.zeros_like(self.weights)
        views = self.split(flat)
        for (table, row), g in self.row_gradients.items():
            views[table][row] = g
        return flat

    def expected_update(
        self, optimizer: str, scale: float = 1.0, step: GradientStep | None = None
    ) -> tuple[Tensor, Tensor]:
        """Weights and state after one step, from gradients multiplied by ``scale``, then transformed by ``step``."""
        step = step or GradientStep()
        weights, state = self.weights.clone(), self.sum.clone()
        for table, view in enumerate(self.split(weights)):
            mine = {row: g * scale for (t, row), g in self.row_gradients.items() if t == table}
            mine = step.apply(view, mine)
            step.decay_(view, list(mine), LR)
            if optimizer == "sgd":
                reference.sgd_(view, mine, LR)
            else:
                rows = state[self.first_rows[table] :][: len(view)]
                reference.rowwise_adagrad_(view, rows, mine, LR, EPS)
        return weights, state

    def update(self, optimizer: str, ops=OPS, **options) -> tuple[Tensor, Tensor, Tensor]:
        """Weights, state and step after embedding_bag_backward_fused_ of ``ops``."""
        weights, state, step = self.weights.clone(), self.sum.clone(), torch.tensor(6)
        ops.embedding_bag_backward_fused_(
            weights,
            None if optimizer == "sgd" else state,
            step,
            options.pop("lr", torch.tensor(LR)),
            options.pop("grad", self.grad),
            *self.jagged,
            **self.layout,
            optimizer=optimizer,
            eps=EPS,
            **options,
        )
        return weights, state, step


def make_case(
    tables: list[tuple[int, int]],
    features: list[int],
    lengths: list[int],
    *,
    mean: list[bool] | None = None,
    weighted: bool = False,
    ids_dtype: torch.dtype = torch.int64,
    offsets_dtype: torch.dtype = torch.int64,
    padding_idx: int | list[int | None] = -1,
    gaps: list[int] | None = None,
    unused: tuple[int, int] = (0, 0),
    seed: int = 0,
) -> Case:
    """A case with random ids; ``lengths`` of the bags, feature by feature; ``unused`` ids before and after all bags."""
    g = torch.Generator().manual_seed(seed)
    batch = len(lengths) // len(features)
    limits = [_num_ids(tables, f) for f in features]
    rows = torch.tensor([0 if n is None else n for n in limits]).repeat_interleave(batch)
    of_ids = rows.repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    ids = torch.randint(2**62, (len(of_ids),), generator=g) % of_ids.clamp(min=1)
    if None in limits:
        every = torch.randint(-(2**63), 2**63 - 1, ids.shape, generator=g) | 2**31  # negative as int32, too
        ids = torch.where(of_ids == 0, torch.where(every % 5 == 0, every % 7 - 3, every), ids)
    ids = torch.cat([torch.full((unused[0],), -7), ids, torch.full((unused[1],), 2**31 - 1)])
    offsets = torch.tensor([0, *lengths]).cumsum(0) + unused[0]
    factors = wide_floats(len(ids), seed=seed + 3000) if weighted else None
    return Case(
        tables=tables,
        features=features,
        mean=mean or [False] * len(features),
        values=ids.to(ids_dtype),
        offsets=offsets.to(offsets_dtype),
        per_sample_weights=factors,
        padding_idx=padding_idx,
        gaps=gaps or [0] * len(tables),
        seed=seed,
    )


@st.composite
def cases(draw) -> Case:
    """Up to four features over up to three tables, small enough for the reference."""
    tables = [(draw(st.integers(1, 7)), draw(st.sampled_from(DIMS))) for _ in range(draw(st.integers(1, 3)))]
    features = draw(st.lists(st.integers(0, len(tables) - 1), min_size=1, max_size=4))
    batch = draw(st.integers(0, 4))
    bags, padding = len(features) * batch, st.sampled_from([-1, -1, 0, 1])
    return make_case(
        tables,
        features,
        draw(st.lists(st.integers(0, 5), min_size=bags, max_size=bags)),
        mean=draw(st.lists(st.booleans(), min_size=len(features), max_size=len(features))),
        weighted=draw(st.booleans()),
        ids_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        offsets_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        padding_idx=draw(padding | st.lists(padding, min_size=len(features), max_size=len(features))),
        gaps=draw(st.lists(st.sampled_from([0, 1, 16]), min_size=len(tables), max_size=len(tables))),
        unused=draw(st.sampled_from([(0, 0), (0, 0), (2, 0), (0, 3)])),
        seed=draw(st.integers(0, 2**20)),
    )
