"""Results of every op of the embedding_bag family for a case, keyed by feature and table independent of their order."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from embedding_bag_cases import OPTIMIZERS
from embedding_bag_format_cases import EncodedCase
from embedding_bag_moment_cases import ELEMENTWISE, MomentCase
from layout_calls import OPS
from torch import Tensor

from rec_kernels.testing import same_bits

ALL_OPTIMIZERS = (*OPTIMIZERS, *ELEMENTWISE)
Results = dict[tuple[str, int], Tensor]  # (name of the result, feature or table) -> its part


class Call:
    """An ``EncodedCase`` with the state of every optimizer.

    Args:
        encoded: the case.
        features, tables: numbers of its features and tables in ``Results``; None: their positions.
    """

    def __init__(
        self, encoded: EncodedCase, features: Sequence[int] | None = None, tables: Sequence[int] | None = None
    ) -> None:
        self.encoded, self.case = encoded, encoded.case
        self.features = list(range(len(self.case.features)) if features is None else features)
        self.tables = list(range(len(self.case.tables)) if tables is None else tables)
        self.moments = {name: MomentCase(encoded, name) for name in ELEMENTWISE}

    def ids_of(self, feature: int) -> slice:
        """Positions of a feature's ids."""
        batch = self.case.batch
        return slice(int(self.case.offsets[feature * batch]), int(self.case.offsets[(feature + 1) * batch]))

    def columns_of(self, feature: int) -> slice:
        """Columns of a feature in the output."""
        first = int(self.case.layout["output_offsets"][feature])
        return slice(first, first + self.case.tables[self.case.features[feature]][1])

    def by_table(self, name: str, tables: Sequence[Tensor]) -> Results:
        """The parts of the tables, under their numbers."""
        return {(name, number): table for number, table in zip(self.tables, tables, strict=True)}

    def lookups(self, ops=OPS, **options) -> Results:
        """Output and the gradient of per_sample_weights, by feature."""
        (values, offsets, _), layout = self.case.jagged, self.encoded.layout | options
        output, _ = ops.embedding_bag(self.encoded.flat, *self.case.jagged, **layout)
        factors = ops.embedding_bag_backward_per_sample_weights(
            self.case.grad, self.encoded.flat, values, offsets, **layout
        )
        found = {}
        for f, number in enumerate(self.features):
            found["output", number] = output[:, self.columns_of(f)]
            found["gradient of factors", number] = factors[self.ids_of(f)]
        return found

    def gradients(self, ops=OPS, **options) -> Results:
        """Dense and sparse gradients, by table, as if all tables were float32."""
        shape, layout = list(self.case.weights.shape), self.case.layout | options
        dense = ops.embedding_bag_backward_dense(self.case.grad, shape, *self.case.jagged, **layout)
        rows, row_grads, counts = ops.embedding_bag_backward_sparse(self.case.grad, shape, *self.case.jagged, **layout)
        found, row, at = self.by_table("dense", self.case.split(dense)), 0, 0
        for table, number in enumerate(self.tables):  # tables in the order of their rows
            if table not in self.case.features:
                continue
            count = int(counts[self.case.features.index(table)])
            size = count * self.case.tables[table][1]
            found["rows", number], found["row gradients", number] = rows[row : row + count], row_grads[at : at + size]
            row, at = row + count, at + size
        assert (row, at) == (len(rows), len(row_grads))
        return found

    def update(self, optimizer: str, ops=OPS, rounding: str = "stochastic", **options) -> Results:
        """Bytes and state after a fused update, by table."""
        if optimizer in ELEMENTWISE:
            flat, state, step = self.moments[optimizer].update(rounding, ops, **options)
        else:
            flat, rows, step = self.encoded.update(optimizer, rounding, ops, **options)
            state = {"sum": rows}
        found = self.by_table(f"{optimizer}: bytes", self.encoded.split(flat)) | {(f"{optimizer}: step", 0): step}
        split = self.moments["lamb"].split  # the same split as for rowwise state
        for name, t in state.items():
            if name == "beta_powers":
                found[f"{optimizer}: {name}", 0] = t
            else:
                found |= self.by_table(f"{optimizer}: {name}", split(t))
        return found

    def everything(self, ops=OPS, optimizers: Sequence[str] = ALL_OPTIMIZERS, **options) -> Results:
        """Results of every op for the call."""
        found = self.lookups(ops, **options) | self.gradients(ops, **options)
        for optimizer in optimizers:
            found |= self.update(optimizer, ops, **options)
        return found


def select(call: Call, features: Sequence[int], tables: Sequence[int]) -> Call:
    """The call restricted to these features and tables in this order, with their ids, rows, state and noise."""
    case, batch = call.case, call.case.batch
    lengths = case.offsets.diff().view(len(case.features), batch)[list(features)].flatten()
    positions = torch.cat([torch.arange(len(case.values))[call.ids_of(f)] for f in features])
    chosen = dataclasses.replace(
        case,
        tables=[case.tables[t] for t in tables],
        features=[tables.index(case.features[f]) for f in features],
        mean=[case.mean[f] for f in features],
        values=case.values[positions],
        offsets=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(case.offsets.dtype),
        per_sample_weights=None if case.per_sample_weights is None else case.per_sample_weights[positions],
        gaps=[case.gaps[t] for t in tables],
    )
    chosen.grad = torch.cat([case.grad[:, call.columns_of(f)] for f in features], dim=1)
    rows, encoded = call.encoded.split(call.encoded.flat), call.encoded
    mine = EncodedCase(chosen, [encoded.formats[t] for t in tables], rows=[rows[t] for t in tables])
    mine.table_id = lambda table: encoded.table_id(tables[table])
    found = Call(mine, [call.features[f] for f in features], [call.tables[t] for t in tables])
    _carry_state(call, found, tables)
    return found


def _carry_state(call: Call, to: Call, tables: Sequence[int]) -> None:
    """Copies the tables' state in ``call`` to their new positions in ``to``."""

    def carried(before: MomentCase, after: MomentCase, state: Tensor) -> Tensor:
        rowwise = len(state) == len(before.case.sum)
        new = torch.full((len(after.case.sum) if rowwise else after.size,), torch.nan)
        for t, view in zip(tables, after.split(new), strict=True):
            view.copy_(before.split(state)[t])
        return new

    to.case.sum = torch.zeros(to.case.first_rows[-1] + to.case.tables[-1][0])
    to.case.sum = carried(call.moments["lamb"], to.moments["lamb"], call.case.sum)
    for name, after in to.moments.items():
        before = call.moments[name]
        after.state = {
            kind: t.clone() if kind == "beta_powers" else carried(before, after, t) for kind, t in before.state.items()
        }


def differences(found: Results, expected: Results) -> list[tuple[str, int]]:
    """Names of the results whose bits differ; ``expected`` must have all of ``found``."""
    assert found.keys() <= expected.keys()
    return [key for key, t in found.items() if not same_bits(t, expected[key])]
