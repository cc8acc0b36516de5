"""Compressed tables that are split by rows: each part is sharded as a table, and samples' ranks combine its rows.

A feature of such a table has a *lookup* in each part: its ids become rows of the part before they are sent. ``Routes``
treats lookups as features; without such tables they are the collection's features.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rec_kernels.distributed.parameter_sharding import Shard
from rec_kernels.nn.jagged.select_features import SelectedKeys, ids_per_feature
from rec_kernels.nn.tables.config import EmbeddingConfig

_ops = torch.ops.rec_kernels


@dataclasses.dataclass(frozen=True)
class TableLookup:
    """A feature's lookup in a table or part.

    Args:
        feature: its index. table: index in ``LookupMap.tables``. name: of the feature. dim: columns.
        rows: (divisor, modulus) that map ids to rows of a part; None: ids are rows.
    """

    feature: int
    table: int
    name: str
    dim: int
    rows: tuple[int, int] | None


@dataclasses.dataclass(frozen=True)
class FeatureLookups:
    """A feature as a combination of its lookups.

    Args:
        lookups: their indices, in the order of the parts. combine: the compression's, "concat" of one lookup.
        by_id: whether rows of each id are combined before bags are pooled; else sums of bags are combined.
        unique: whether a rank receives each row once, and sends the sum of its gradients.
        mean: whether bags that are pooled on the samples' rank are averaged.
        num_ids, padding: valid ids are in [0, num_ids), None: any integer, and differ from ``padding``.
    """

    lookups: list[int]
    combine: str
    by_id: bool
    unique: bool
    mean: bool
    num_ids: int | None
    padding: int | None

    def is_valid(self, ids: Tensor) -> Tensor:
        """Returns a flag for each id."""
        good = torch.ones_like(ids, dtype=torch.bool)
        if self.num_ids is not None:
            good = (ids >= 0) & (ids < self.num_ids)
        return good if self.padding is None else good & (ids != self.padding)

    def count_valid(self, bags: SelectedKeys) -> Tensor:
        """[bags] float32: the number of valid ids of each bag, at least 1."""
        before = torch.nn.functional.pad(self.is_valid(bags.values).cumsum(0), (1, 0))
        return before[bags.offsets].diff().clamp(min=1).float()


class LookupBags(NamedTuple):
    """A batch by lookups.

    Args:
        bags: of lookups; unique rows are one bag. inverse: of lookups with unique rows, the index of each id's row in
            that bag; invalid ids have the index after the last.
    """

    bags: SelectedKeys
    inverse: dict[int, Tensor]


class LookupMap:
    """Maps a collection's features to lookups, and its tables to those that are sharded.

    Args:
        tables: of the collection. shards: of all tables, as in the plan, which counts rows in ids.
        pooled: whether a feature has a row per bag instead of per id. row_wise: the sharder's, of pooled lookups.

    Attributes:
        tables: the collection's, with compressed tables that are split by rows replaced by their parts.
        owners: for each of these, the index of its table in the collection.
        shards: of these tables, each table's by columns and rows.
        part_tables: indices of tables that are parts. combined_tables: of those whose rows are combined id by id.
        features: F. lookups: in the order of ``tables``.
    """

    def __init__(
        self, tables: Sequence[EmbeddingConfig], shards: Sequence[Shard], *, pooled: bool, row_wise: str
    ) -> None:
        split = {s.table for s in shards if tables[s.table].compression and not s.is_whole(tables[s.table])}
        self.tables: list[EmbeddingConfig] = []
        self.owners: list[int] = []
        self.shards: list[Shard] = []
        self.part_tables: set[int] = set()
        self.combined_tables: set[int] = set()
        self.features: list[FeatureLookups] = []
        self.lookups: list[TableLookup] = []
        for number, table in enumerate(tables):
            exact = not pooled or row_wise == "exact"
            by_id = number in split and combines_by_id(table, one_process=exact)
            unique = by_id and not exact
            made = _part_configs(table, pools=not unique) if number in split else [table]
            own = range(len(self.tables), len(self.tables) + len(made))
            self.part_tables.update(own if number in split else [])
            self.combined_tables.update(own if by_id else [])
            for i, part in zip(own, made, strict=True):
                blocks = (_part_shard(s, i, table, part) for s in shards if s.table == number)
                self.shards += [block for block in blocks if block.rows]
            self.tables += made
            self.owners += [number] * len(made)
            self._add_features(table, own, by_id=by_id, unique=unique)

    def _add_features(self, table: EmbeddingConfig, own: range, *, by_id: bool, unique: bool) -> None:
        """Adds the features of a table that is split into those with indices ``own`` in ``tables``."""
        names, combine, first = table.feature_names, "concat", len(self.lookups)
        if len(own) > 1 and table.compression is not None:
            combine = table.compression.combine
        for k in range(len(names)):
            lookups = [first + p * len(names) + k for p in range(len(own))]
            mean = by_id and getattr(table, "pooling", "sum") == "mean"
            ids = table.num_embeddings, table.padding_idx
            self.features.append(FeatureLookups(lookups, combine, by_id, unique, mean, *ids))
        for p, i in enumerate(own):
            rows, dim = None, self.tables[i].embedding_dim
            if i in self.part_tables:
                part = table.stored[p].part
                rows = (part.divisor, part.modulus) if part else (1, table.planned_rows)
            for k, name in enumerate(names, len(self.features) - len(names)):
                self.lookups.append(TableLookup(k, i, name, dim, rows))

    @property
    def has_parts(self) -> bool:
        """True if a feature has several lookups."""
        return len(self.lookups) > len(self.features)

    @property
    def dims(self) -> list[int]:
        """Columns of each lookup."""
        return [lookup.dim for lookup in self.lookups]

    def expand_features(self, features: SelectedKeys) -> LookupBags:
        """Returns the bags of all lookups, from those of all features; invalid ids have row -1 in a part."""
        if not self.part_tables:
            return LookupBags(features, {})
        starts = features.bag_starts(len(self.features))
        bounds, lengths = features.offsets[starts].tolist(), features.offsets.diff()
        sizes = [stop - start for start, stop in itertools.pairwise(starts)]
        values, counts, weights, strides, inverse = [], [], [], [], {}
        for number, lookup in enumerate(self.lookups):
            f = lookup.feature
            ids = slice(bounds[f], bounds[f + 1])
            rows, bags = self._rows(lookup, features.values[ids]), lengths[starts[f] : starts[f + 1]]
            if self.features[f].unique:
                rows, inverse[number] = _unique_rows(rows)
                bags = bags.new_full((1,), len(rows))
            values.append(rows)
            counts.append(bags)
            strides.append(1 if self.features[f].unique else sizes[f])
            if features.weights is not None:
                own = features.weights[ids].detach()
                weights.append(own.new_ones(len(rows)) if self.features[f].unique else own)
        factors = None
        if features.weights is not None:
            factors = torch.cat(weights).requires_grad_(features.weights.requires_grad)
        offsets = torch.nn.functional.pad(torch.cat(counts).cumsum(0), (1, 0))
        same = features.strides is None and not inverse
        return LookupBags(SelectedKeys(torch.cat(values), offsets, factors, None if same else strides), inverse)

    def sum_over_lookups(self, values: Tensor, lookups: SelectedKeys, features: SelectedKeys) -> Tensor:
        """[N]: sums a value of each id over its feature's lookups, in the order of parts; not those combined by id.

        Args:
            values: of the ids of all lookups. lookups, features: the bags of all lookups, and of all features.
        """
        if not self.part_tables:
            return values
        out = values.new_zeros(features.values.shape)
        sums = out.split(ids_per_feature(features, len(self.features)))
        for lookup, block in zip(self.lookups, values.split(ids_per_feature(lookups, len(self.lookups))), strict=True):
            if not self.features[lookup.feature].by_id:
                sums[lookup.feature].add_(block)
        return out

    def _rows(self, lookup: TableLookup, ids: Tensor) -> Tensor:
        if lookup.rows is None:
            return ids
        divisor, modulus = lookup.rows
        return torch.where(
            self.features[lookup.feature].is_valid(ids), ids.div(divisor, rounding_mode="floor") % modulus, -1
        )


def _unique_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sorted unique rows, and the index of each row in them; -1 has the index after the last."""
    found, inverse = torch.unique(rows, return_inverse=True)
    if len(found) and found[0] < 0:  # syncs a GPU
        return found[1:], torch.where(inverse == 0, len(found) - 1, inverse - 1)
    return found, inverse


def _part_configs(table: EmbeddingConfig, *, pools: bool) -> list[EmbeddingConfig]:
    """Configs of a table's parts as tables; ``pools``: whether they keep the table's pooling."""
    changes: dict[str, Any] = {"compression": None, "padding_idx": None, "init": None}
    changes |= {} if pools else {"pooling": "sum"}
    return [
        dataclasses.replace(
            table, num_embeddings=part.num_embeddings, embedding_dim=part.embedding_dim, name=part.name, **changes
        )
        for part in table.stored
    ]


def part_block(first: int, rows: int, ids: int, part: int) -> tuple[int, int]:
    """Returns the first row, and the number of rows, of a part's share of a block of its table.

    Plans count a table's rows in ids. Rows [a, b) of them are rows [ceil(a * part / ids), ceil(b * part / ids)) of a
    part.

    Args:
        first, rows: of the block. ids: of the table. part: rows of the part.
    """
    begin, end = (-(-row * part // ids) for row in (first, first + rows))
    return begin, end - begin


def _part_shard(shard: Shard, number: int, table: EmbeddingConfig, part: EmbeddingConfig) -> Shard:
    """The shard of a part, which is table ``number``, that belongs to a shard of its table."""
    first, rows = part_block(shard.first_row, shard.rows, table.planned_rows, part.planned_rows)
    columns = part.embedding_dim if shard.columns == table.embedding_dim else shard.columns
    return dataclasses.replace(shard, table=number, first_row=first, rows=rows, columns=columns)


def combines_by_id(table: EmbeddingConfig, *, one_process: bool = False) -> bool:
    """True if rows of a table's parts on several ranks must be combined id by id instead of bag by bag.

    Products are not linear in bags. Sums are, but only id by id do they have ``one_process``'s bits.
    """
    compression = table.compression
    if compression is None or len(table.stored) == 1 or compression.compose == "pooled":
        return False
    return compression.combine == "mult" or (compression.combine == "add" and one_process)


class PartCombiner:
    """Combines the rows of lookups into those of features for one batch, and computes gradients of the former.

    Args:
        lookup_map: the lookups.

    Attributes:
        saves_rows: whether a backward may run, which needs the factors of products.
        needs_weight_grad: whether it computes gradients of per-sample weights, which need rows combined by id.
    """

    def __init__(self, lookup_map: LookupMap) -> None:
        self._map, self.saves_rows, self.needs_weight_grad = lookup_map, False, False
        self._factors: dict[int, list[Tensor]] = {}
        self._combined: dict[int, Tensor] = {}

    def combine(self, feature: int, blocks: Sequence[Tensor]) -> Tensor:
        """[N, D]: rows, or sums of bags, of a feature; ``blocks``: those of all lookups."""
        spec = self._map.features[feature]
        own = [blocks[u] for u in spec.lookups]
        if spec.combine == "concat":
            return own[0] if len(own) == 1 else torch.cat(own, dim=1)
        if spec.combine == "mult" and self.saves_rows:
            self._factors[feature] = own
        out = own[0]
        for other in own[1:]:
            out = out * other if spec.combine == "mult" else out + other
        if spec.by_id and self.needs_weight_grad:
            self._combined[feature] = out
        return out

    def lookup_gradients(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Returns gradients of the lookups, from those of the features; those combined by id still need
        ``row_gradients``.
        """
        found: dict[int, Tensor] = {}
        for f, (spec, grad) in enumerate(zip(self._map.features, grads, strict=True)):
            own = [grad] * len(spec.lookups)
            if spec.combine == "concat":
                own = list(grad.split([self._map.lookups[u].dim for u in spec.lookups], dim=1))
            elif spec.combine == "mult" and not spec.by_id:
                own = _of_product(self._factors[f], grad)
            found |= zip(spec.lookups, own, strict=True)
        return [found[u] for u in range(len(found))]

    def row_gradients(self, lookup: int, grad: Tensor) -> Tensor:
        """[N, D]: gradients of the rows of a lookup, from those of rows combined by id."""
        feature = self._map.lookups[lookup].feature
        spec = self._map.features[feature]
        if spec.by_id and spec.combine == "mult":
            for u, rows in zip(spec.lookups, self._factors[feature], strict=True):
                grad = grad if u == lookup else grad * rows
        return grad

    def weight_gradients(self, feature: int, grad: Tensor, offsets: Tensor) -> Tensor:
        """[N]: gradients of the weights of ids whose rows were combined, from those of summed bags, [bags, D].

        Args:
            offsets: [bags + 1] of the ids.
        """
        rows = self._combined[feature].contiguous()
        each = torch.arange(len(rows), device=rows.device)
        return _ops.embedding_bag_backward_per_sample_weights.table(grad.contiguous(), rows, each, offsets)


def _of_product(factors: list[Tensor], grad: Tensor) -> list[Tensor]:
    """Gradients of factors that were multiplied from first to last, rounded as autograd does."""
    products = list(itertools.accumulate(factors, torch.mul))
    found = []
    for k in range(len(factors) - 1, 0, -1):
        found.append(grad * products[k - 1])
        grad = grad * factors[k]
    return [grad, *reversed(found)]
