"""Tables of parts whose rows are shared out: each part is a table by itself, whose rows meet where the samples are.

A feature of such a table has a *lookup* in each part: its ids become rows of the part before they are sent. Lookups are
what ``Routes`` calls features; without such tables they are the collection's features.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rec_kernels.distributed.plan import Shard
from rec_kernels.nn.jagged.select_features import SelectedKeys, ids_per_feature
from rec_kernels.nn.tables.config import EmbeddingConfig

_ops = torch.ops.rec_kernels


@dataclasses.dataclass(frozen=True)
class TableLookup:
    """A feature's lookup in a table, or in a part of one.

    Args:
        feature: number of the feature. table: of ``PartMap.tables``. name: of the feature. dim: columns.
        rows: (divisor, modulus) by which ids become rows of a part; None: ids are rows.
    """

    feature: int
    table: int
    name: str
    dim: int
    rows: tuple[int, int] | None


@dataclasses.dataclass(frozen=True)
class JoinedFeature:
    """A feature, and how it is made of its lookups.

    Args:
        lookups: their numbers, in the order of the parts. combine: the compression's, "concat" of one lookup.
        by_id: whether the rows of each id are combined, and then bags pooled; else sums of bags are combined.
        distinct: whether a rank asks for each row once, and sends the sum of its gradients. mean: whether bags, which
            are pooled where the samples are, are averaged.
        num_ids, padding: ids that count are in [0, num_ids), None: all are, and are not ``padding``.
    """

    lookups: list[int]
    combine: str
    by_id: bool
    distinct: bool
    mean: bool
    num_ids: int | None
    padding: int | None

    def count(self, ids: Tensor) -> Tensor:
        """A flag for each id: whether it counts."""
        good = torch.ones_like(ids, dtype=torch.bool)
        if self.num_ids is not None:
            good = (ids >= 0) & (ids < self.num_ids)
        return good if self.padding is None else good & (ids != self.padding)

    def counts(self, bags: SelectedKeys) -> Tensor:
        """[bags] float32: what a mean over each of the feature's bags is divided by, at least 1."""
        before = torch.nn.functional.pad(self.count(bags.values).cumsum(0), (1, 0))
        return before[bags.offsets].diff().clamp(min=1).float()


class LookupBags(NamedTuple):
    """A batch, by lookups.

    Args:
        bags: of lookups. Rows that a rank asks for once are in one bag. inverse: of these lookups, the row of each id
            among those; behind the last where the id does not count.
    """

    bags: SelectedKeys
    inverse: dict[int, Tensor]


class PartMap:
    """The lookups that stand for a collection's features, and the tables that they are in.

    Args:
        tables: of the collection. shards: of all tables, whose rows are counted in ids, as a plan has them.
        pooled: whether a feature has a row of each bag, and not of each id. row_wise: the sharder's, of pooled lookups.

    Attributes:
        tables: those whose parts are together, and in the place of each other its parts. owners: for each of them, its
            table in the collection. shards: of these tables, each table's by columns and rows.
        mapped: the numbers of tables that are parts. composed: of parts whose rows are combined id by id.
        features: F; lookups: in the order of ``tables``.
    """

    def __init__(
        self, tables: Sequence[EmbeddingConfig], shards: Sequence[Shard], *, pooled: bool, row_wise: str
    ) -> None:
        split = {s.table for s in shards if tables[s.table].compression and not s.is_whole(tables[s.table])}
        self.tables: list[EmbeddingConfig] = []
        self.owners: list[int] = []
        self.shards: list[Shard] = []
        self.mapped: set[int] = set()
        self.composed: set[int] = set()
        self.features: list[JoinedFeature] = []
        self.lookups: list[TableLookup] = []
        for number, table in enumerate(tables):
            exact = not pooled or row_wise == "exact"
            by_id = number in split and is_by_id(table, one_process=exact)
            distinct = by_id and not exact
            made = _parts_of(table, pools=not distinct) if number in split else [table]
            own = range(len(self.tables), len(self.tables) + len(made))
            self.mapped.update(own if number in split else [])
            self.composed.update(own if by_id else [])
            for i, part in zip(own, made, strict=True):
                blocks = (_scaled(s, i, table, part) for s in shards if s.table == number)
                self.shards += [block for block in blocks if block.rows]
            self.tables += made
            self.owners += [number] * len(made)
            self._add_features(table, own, by_id=by_id, distinct=distinct)

    def _add_features(self, table: EmbeddingConfig, own: range, *, by_id: bool, distinct: bool) -> None:
        """Adds the features of a table, which is those of ``tables`` whose numbers are ``own``."""
        names, combine, first = table.feature_names, "concat", len(self.lookups)
        if len(own) > 1 and table.compression is not None:
            combine = table.compression.combine
        for k in range(len(names)):
            lookups = [first + p * len(names) + k for p in range(len(own))]
            mean = by_id and getattr(table, "pooling", "sum") == "mean"
            ids = table.num_embeddings, table.padding_idx
            self.features.append(JoinedFeature(lookups, combine, by_id, distinct, mean, *ids))
        for p, i in enumerate(own):
            rows, dim = None, self.tables[i].embedding_dim
            if i in self.mapped:
                part = table.stored[p].part
                rows = (part.divisor, part.modulus) if part else (1, table.planned_rows)
            for k, name in enumerate(names, len(self.features) - len(names)):
                self.lookups.append(TableLookup(k, i, name, dim, rows))

    @property
    def joins(self) -> bool:
        """True if some feature has several lookups."""
        return len(self.lookups) > len(self.features)

    @property
    def dims(self) -> list[int]:
        """Columns of each lookup."""
        return [lookup.dim for lookup in self.lookups]

    def lookups_of(self, given: SelectedKeys) -> LookupBags:
        """The bags of all lookups, made of those of all features: an id that does not count has row -1 of a part."""
        if not self.mapped:
            return LookupBags(given, {})
        starts = given.bag_starts(len(self.features))
        bounds, lengths = given.offsets[starts].tolist(), given.offsets.diff()
        sizes = [stop - start for start, stop in itertools.pairwise(starts)]
        values, counts, weights, strides, inverse = [], [], [], [], {}
        for number, lookup in enumerate(self.lookups):
            f = lookup.feature
            ids = slice(bounds[f], bounds[f + 1])
            rows, bags = self._rows(lookup, given.values[ids]), lengths[starts[f] : starts[f + 1]]
            if self.features[f].distinct:
                rows, inverse[number] = _distinct(rows)
                bags = bags.new_full((1,), len(rows))
            values.append(rows)
            counts.append(bags)
            strides.append(1 if self.features[f].distinct else sizes[f])
            if given.weights is not None:
                own = given.weights[ids].detach()
                weights.append(own.new_ones(len(rows)) if self.features[f].distinct else own)
        factors = None
        if given.weights is not None:
            factors = torch.cat(weights).requires_grad_(given.weights.requires_grad)
        offsets = torch.nn.functional.pad(torch.cat(counts).cumsum(0), (1, 0))
        same = given.strides is None and not inverse
        return LookupBags(SelectedKeys(torch.cat(values), offsets, factors, None if same else strides), inverse)

    def of_features(self, numbers: Tensor, given: SelectedKeys, features: SelectedKeys) -> Tensor:
        """[N]: sums of numbers of each id over the lookups that answer, in the order of parts.

        Args:
            numbers: of the ids of all lookups, whose bags are ``given``. features: the bags of all features.
        """
        if not self.mapped:
            return numbers
        out = numbers.new_zeros(features.values.shape)
        sums = out.split(ids_per_feature(features, len(self.features)))
        for lookup, block in zip(self.lookups, numbers.split(ids_per_feature(given, len(self.lookups))), strict=True):
            if not self.features[lookup.feature].by_id:
                sums[lookup.feature].add_(block)
        return out

    def _rows(self, lookup: TableLookup, ids: Tensor) -> Tensor:
        if lookup.rows is None:
            return ids
        divisor, modulus = lookup.rows
        return torch.where(
            self.features[lookup.feature].count(ids), ids.div(divisor, rounding_mode="floor") % modulus, -1
        )


def _distinct(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows, each once, and the place of each row among them; -1 is behind them."""
    found, inverse = torch.unique(rows, return_inverse=True)
    if len(found) and found[0] < 0:  # a GPU is waited for
        return found[1:], torch.where(inverse == 0, len(found) - 1, inverse - 1)
    return found, inverse


def _parts_of(table: EmbeddingConfig, *, pools: bool) -> list[EmbeddingConfig]:
    """The parts of a table as tables of their own; ``pools``: whether bags in them are those of the table."""
    alone: dict[str, Any] = {"compression": None, "padding_idx": None, "init": None}
    alone |= {} if pools else {"pooling": "sum"}
    return [
        dataclasses.replace(
            table, num_embeddings=part.num_embeddings, embedding_dim=part.embedding_dim, name=part.name, **alone
        )
        for part in table.stored
    ]


def part_block(first: int, rows: int, ids: int, part: int) -> tuple[int, int]:
    """The first row, and the number of rows, of a part of ``part`` rows in a block of a table.

    Plans count a table's rows by its ids. A part is cut in the same proportions: before row i ceil(i * part / ids).

    Args:
        first, rows: of the block. ids: of the table.
    """
    begin, end = (-(-row * part // ids) for row in (first, first + rows))
    return begin, end - begin


def _scaled(shard: Shard, number: int, table: EmbeddingConfig, part: EmbeddingConfig) -> Shard:
    """The block that a shard of a table has of a part, which is table ``number``."""
    first, rows = part_block(shard.first_row, shard.rows, table.planned_rows, part.planned_rows)
    columns = part.embedding_dim if shard.columns == table.embedding_dim else shard.columns
    return dataclasses.replace(shard, table=number, first_row=first, rows=rows, columns=columns)


def is_by_id(table: EmbeddingConfig, *, one_process: bool = False) -> bool:
    """True if rows of a table's parts are combined id by id where they are apart, and not bag by bag.

    A product is no sum of products of others. Sums may be added up in any order, but for ``one_process``'s bits.
    """
    compression = table.compression
    if compression is None or len(table.stored) == 1 or compression.compose == "pooled":
        return False
    return compression.combine == "mult" or (compression.combine == "add" and one_process)


class Joined:
    """Rows of lookups that become those of features, for one batch, and gradients on their way back.

    Args:
        parts: the lookups.

    Attributes:
        keeps: whether a backward may come, which needs rows that were multiplied.
        answers: whether it gives gradients of per-sample weights, which need rows that were combined by id.
    """

    def __init__(self, parts: PartMap) -> None:
        self._parts, self.keeps, self.answers = parts, False, False
        self._kept: dict[int, list[Tensor]] = {}
        self._composed: dict[int, Tensor] = {}

    def compose(self, feature: int, blocks: Sequence[Tensor]) -> Tensor:
        """[N, D]: rows, or sums of bags, of a feature; ``blocks``: those of all lookups."""
        joined = self._parts.features[feature]
        own = [blocks[u] for u in joined.lookups]
        if joined.combine == "concat":
            return own[0] if len(own) == 1 else torch.cat(own, dim=1)
        if joined.combine == "mult" and self.keeps:
            self._kept[feature] = own
        out = own[0]
        for other in own[1:]:
            out = out * other if joined.combine == "mult" else out + other
        if joined.by_id and self.answers:
            self._composed[feature] = out
        return out

    def divide(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of the lookups, of those of the features; of rows that are combined by id their bags'."""
        found: dict[int, Tensor] = {}
        for f, (joined, grad) in enumerate(zip(self._parts.features, grads, strict=True)):
            own = [grad] * len(joined.lookups)
            if joined.combine == "concat":
                own = list(grad.split([self._parts.lookups[u].dim for u in joined.lookups], dim=1))
            elif joined.combine == "mult" and not joined.by_id:
                own = _of_product(self._kept[f], grad)
            found |= zip(joined.lookups, own, strict=True)
        return [found[u] for u in range(len(found))]

    def multiply(self, lookup: int, grad: Tensor) -> Tensor:
        """[N, D]: gradients of the rows of a lookup, of those of rows that were combined id by id."""
        feature = self._parts.lookups[lookup].feature
        joined = self._parts.features[feature]
        if joined.by_id and joined.combine == "mult":
            for u, rows in zip(joined.lookups, self._kept[feature], strict=True):
                grad = grad if u == lookup else grad * rows
        return grad

    def weight_gradients(self, feature: int, grad: Tensor, offsets: Tensor) -> Tensor:
        """[N]: gradients of the weights of ids whose rows were combined, of those of bags, [bags, D]; not of means.

        Args:
            offsets: [bags + 1] of the ids.
        """
        rows = self._composed[feature].contiguous()
        each = torch.arange(len(rows), device=rows.device)
        return _ops.embedding_bag_backward_per_sample_weights.table(grad.contiguous(), rows, each, offsets)


def _of_product(factors: list[Tensor], grad: Tensor) -> list[Tensor]:
    """The gradients of factors that were multiplied from the first to the last, in the order of autograd."""
    products = list(itertools.accumulate(factors, torch.mul))
    found = []
    for k in range(len(factors) - 1, 0, -1):
        found.append(grad * products[k - 1])
        grad = grad * factors[k]
    return [grad, *reversed(found)]
