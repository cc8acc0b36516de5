"""The collection of one rank's shards, whose tables know their place in those of the whole model."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rec_kernels.distributed.parameter_sharding import Shard
from rec_kernels.distributed.routes import Entry
from rec_kernels.distributed.sharded_optimizer import ShardedFusedOptimizer
from rec_kernels.distributed.table_parts import LookupMap
from rec_kernels.nn.collection import TableCollection
from rec_kernels.nn.embedding_bag_collection import EmbeddingBagCollection
from rec_kernels.nn.embedding_collection import EmbeddingCollection
from rec_kernels.nn.tables.config import EmbeddingBagConfig, EmbeddingConfig, ShardPlace, StoredTable
from rec_kernels.nn.tables.parameters import RequiresGrad
from rec_kernels.nn.tables.row_cache import RowCache
from rec_kernels.nn.tables.rows import fill, takes_chunks
from rec_kernels.nn.training.fused_update import rate_groups

#: Rows that are drawn with one seed.
_CHUNK_ROWS = 1024


@dataclasses.dataclass(frozen=True)
class ShardConfig(EmbeddingBagConfig):
    """Config of a shard as a table.

    Args:
        places: of its stored tables in the whole model. whole: these tables of the whole model.
        salt: seeds its first rows, with their table and row.
    """

    places: tuple[ShardPlace, ...] = ()
    whole: tuple[StoredTable, ...] = ()
    salt: str = ""

    @functools.cached_property
    def stored(self) -> list[StoredTable]:
        """Its stored tables, with their places."""
        found = super().stored
        return [
            dataclasses.replace(t, place=place, init=ShardInit(whole, place, t.num_embeddings, self.salt))
            for t, place, whole in zip(found, self.places, self.whole, strict=True)
        ]


class ShardInit:
    """Initializes the rows of a shard: its block of the table's rows, which are the same in every plan.

    A table's rows are drawn on the CPU, in chunks of 1,024 with seeds of their own; all at once if the table's ``init``
    is not ``takes_chunks``.

    Args:
        whole: the stored table. place: of the shard in it. rows: of the shard. salt: of the seeds.
    """

    in_chunks = True

    def __init__(self, whole: StoredTable, place: ShardPlace, rows: int, salt: str) -> None:
        self._whole, self._place, self._salt = whole, place, salt
        self._size = min(_CHUNK_ROWS if takes_chunks(whole.init) else whole.num_embeddings, whole.num_embeddings)
        self._next, self._end = place.first_row, place.first_row + rows
        self._drawn: tuple[int, Tensor] | None = None

    def __call__(self, rows: Tensor) -> None:
        """Fills ``rows``, [n, D of the shard], with the next n rows."""
        column, done = self._place.first_column, 0
        while done < len(rows):
            block, first = divmod(self._next, self._size)
            drawn = self._block(block)[first : first + len(rows) - done, column : column + rows.shape[1]]
            rows[done : done + len(drawn)] = drawn.to(rows.device)
            done += len(drawn)
            self._next += len(drawn)
        if self._next >= self._end:
            self._drawn = None

    def _block(self, block: int) -> Tensor:
        if self._drawn is None or self._drawn[0] != block:
            whole = self._whole
            count = min(self._size, whole.num_embeddings - block * self._size)
            floats = torch.empty(count, whole.embedding_dim, dtype=torch.float32, device="cpu")
            with _seeded(f"{self._salt}/{whole.name}/{block}"):
                fill(floats, whole, block * self._size)
            self._drawn = block, floats
        return self._drawn[1]


@contextlib.contextmanager
def _seeded(text: str) -> Iterator[None]:
    """Seeds torch's CPU generator with a text inside the context."""
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@dataclasses.dataclass(frozen=True)
class StoredBlock:
    """A block of a stored table of the whole model, and its name on its rank.

    Args:
        stored: index of the stored table in the whole model. name: of the table in the rank's own collection.
        shard: that it belongs to.
        first_row, rows, first_column, columns: the block.
    """

    stored: int
    name: str
    shard: Shard
    first_row: int
    rows: int
    first_column: int
    columns: int


def stored_blocks(lookup_map: LookupMap) -> list[StoredBlock]:
    """The blocks of all ranks, in the order of the shards."""
    firsts, total = [], 0
    for table in lookup_map.tables:
        firsts.append(total)
        total += len(table.stored)
    blocks = []
    for i, shard in enumerate(lookup_map.shards):
        table = lookup_map.tables[shard.table]
        for k, stored in enumerate(table.stored):
            number = firsts[shard.table] + k
            if shard.is_whole(table):
                place = 0, stored.num_embeddings, 0, stored.embedding_dim
                blocks.append(StoredBlock(number, stored.name, shard, *place))
            else:
                place = shard.first_row, shard.rows, shard.first_column, shard.columns
                blocks.append(StoredBlock(number, f"{stored.name}#{i}", shard, *place))
    return blocks


def make_local_collection(
    module: TableCollection,
    lookup_map: LookupMap,
    entries: Sequence[Entry],
    blocks: Sequence[StoredBlock],
    device: torch.device,
    salt: str,
    *,
    world: int = 1,
) -> TableCollection:
    """Makes the collection of a rank's shards, whose features are ``entries``, in this order.

    Args:
        module: the unsharded collection, whose options, learning rate, GradScaler and frozen tables it copies.
        lookup_map: of the entries. blocks: those of this rank.
        salt: names the collection in the model and seeds its first rows. world: the number of ranks.
    """
    shards = dict.fromkeys(entry.shard for entry in entries)
    own = [[p for p in blocks if p.shard is shard] for shard in shards]
    configs = [_config(module, lookup_map, entries, own_blocks, salt) for own_blocks in own]
    made = (EmbeddingBagCollection if module._pools else EmbeddingCollection)(
        configs,
        device=device,
        optimizer=module._features.optimizers,
        rounding=module.rounding,
        seed=module.seed,
        cache=_cache(module, lookup_map, list(shards), configs, world),
    )
    made.process_local = True
    if made._update is not None:
        _copy_optimizer_settings(made, module)
    made.freeze(*local_frozen_features(entries, lookup_map, module._layout.frozen))
    for table in made._features.tables:
        if table.projection:
            matrix = made._projection(table)
            with _seeded(f"{salt}/{table.name}/projection"), torch.no_grad():
                drawn = torch.empty(table.projection, dtype=torch.float32, device="cpu")
                matrix.copy_(torch.nn.init.xavier_uniform_(drawn))
            matrix.requires_grad_(module._projection(table).requires_grad)
    for block in blocks:
        weight = module._tables[module._features.stored[block.stored].name].weight
        made._tables[block.name].weight.requires_grad_(RequiresGrad.of(weight).requires_grad)
    return made


def _cache(
    module: TableCollection, lookup_map: LookupMap, shards: Sequence[Shard], configs: Sequence[ShardConfig], world: int
) -> RowCache | None:
    """The cache of a rank's shards, with the fractions of their tables in the unsharded collection ``module``.

    With backing "disk", the path of the rank's file ends in the rank and the number of ranks.
    """
    if module.row_cache is None or not configs:
        return None
    cache, tables = module.row_cache.cache, [module.tables[lookup_map.owners[s.table]] for s in shards]
    of = {c.name: cache.of(t.name) if len(t.stored) == 1 else 0.0 for c, t in zip(configs, tables, strict=True)}
    own: dict[str, Any] = {"fraction": of} if isinstance(cache.fraction, Mapping) or lookup_map.has_parts else {}
    if cache.path is not None:
        own["path"] = f"{os.fspath(cache.path)}.{shards[0].rank}-of-{world}"
    return dataclasses.replace(cache, **own)


def _config(
    module: TableCollection, lookup_map: LookupMap, entries: Sequence[Entry], blocks: Sequence[StoredBlock], salt: str
) -> ShardConfig:
    """Config of the shard of ``blocks`` as a table, looked up by its entries."""
    shard, stored = blocks[0].shard, module._features.stored
    table = lookup_map.tables[shard.table]
    whole = shard.is_whole(table)
    own_entries = [(k, e) for k, e in enumerate(entries) if e.shard is shard]
    return ShardConfig(
        table.num_embeddings if whole else shard.rows,
        table.embedding_dim if whole else shard.columns,
        name=table.name if whole else blocks[0].name,
        feature_names=[local_feature_name(k, lookup_map.lookups[e.feature].name) for k, e in own_entries],
        format=table.format,
        compression=table.compression,
        pooling="sum" if own_entries[0][1].divides_by_count else getattr(table, "pooling", "sum"),
        padding_idx=_padding_of(table, shard),
        lr=table.lr,
        optimizer=table.optimizer,
        places=tuple(
            ShardPlace(p.stored, stored[p.stored].num_embeddings, p.first_row, p.first_column) for p in blocks
        ),
        whole=tuple(stored[p.stored] for p in blocks),
        salt=salt,
    )


def _copy_optimizer_settings(made: TableCollection, module: TableCollection) -> None:
    """Copies the parameter groups, learning rates and GradScaler of the unsharded collection."""
    weights, groups = made._tables.weights(), rate_groups(module._features)
    made._update.fused_optimizer = ShardedFusedOptimizer(weights, groups, made._features.table_ids, made.lr, made.step)
    for group, given in zip(made.fused_optimizer.param_groups, module.fused_optimizer.param_groups, strict=True):
        group["lr"] = given["lr"]
    made._update.take_scaler(module._update, weights, made._buffers)


def _padding_of(table: EmbeddingConfig, shard: Shard) -> int | None:
    """The padding's row in a shard, or None if the shard lacks it."""
    if table.padding_idx is None or shard.is_whole(table):
        return table.padding_idx
    if not 0 <= table.padding_idx - shard.first_row < shard.rows:
        return None
    return table.padding_idx - shard.first_row


def local_frozen_features(entries: Sequence[Entry], lookup_map: LookupMap, frozen: Collection[str]) -> list[str]:
    """The features of a rank's own collection that look up ``frozen`` features of the whole collection."""
    names = [lookup_map.lookups[e.feature].name for e in entries]
    return [local_feature_name(k, name) for k, name in enumerate(names) if name in frozen]


def local_feature_name(entry: int, name: str) -> str:
    """The unique name of an entry in a rank's own collection: several of its tables may be shards of one."""
    return f"{name}#{entry}"
