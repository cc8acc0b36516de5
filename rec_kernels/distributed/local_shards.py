"""The shards of one rank, as a collection of their own: tables that know their place in those of the whole model."""

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

from rec_kernels.distributed.optimizer_face import ShardedRates
from rec_kernels.distributed.parts import PartMap
from rec_kernels.distributed.plan import Shard
from rec_kernels.distributed.routes import Entry
from rec_kernels.nn.collection import TableCollection
from rec_kernels.nn.embedding_bag_collection import EmbeddingBagCollection
from rec_kernels.nn.embedding_collection import EmbeddingCollection
from rec_kernels.nn.tables.config import EmbeddingBagConfig, EmbeddingConfig, ShardPlace, StoredTable
from rec_kernels.nn.tables.parameters import RequiresGrad
from rec_kernels.nn.tables.row_cache import RowCache
from rec_kernels.nn.tables.rows import fill, takes_chunks
from rec_kernels.nn.training.fused_update import rate_groups

#: Rows that are drawn together, by a generator of their own.
_ROWS_AT_ONCE = 1024


@dataclasses.dataclass(frozen=True)
class ShardConfig(EmbeddingBagConfig):
    """A shard as a table.

    Args:
        places: where its stored tables are in the whole model. salt: what the numbers that its rows begin with are
            drawn from, beside their table and row.
    """

    places: tuple[ShardPlace, ...] = ()
    whole: tuple[StoredTable, ...] = ()
    salt: str = ""

    @functools.cached_property
    def stored(self) -> list[StoredTable]:
        """The tables that it is kept in, with their places."""
        found = super().stored
        return [
            dataclasses.replace(t, place=place, init=ShardInit(whole, place, t.num_embeddings, self.salt))
            for t, place, whole in zip(found, self.places, self.whole, strict=True)
        ]


class ShardInit:
    """First rows of a shard: the block that it has of rows which every plan draws alike.

    A table's rows are drawn 1,024 at a time from seeds of their own, on the CPU; if the table has an ``init`` that does
    not ``takes_chunks``, all of them at once.

    Args:
        whole: the stored table that the shard is of. place: where it is there. rows: of the shard.
        salt: what seeds depend on.
    """

    in_chunks = True

    def __init__(self, whole: StoredTable, place: ShardPlace, rows: int, salt: str) -> None:
        self._whole, self._place, self._salt = whole, place, salt
        self._size = min(_ROWS_AT_ONCE if takes_chunks(whole.init) else whole.num_embeddings, whole.num_embeddings)
        self._next, self._end = place.first_row, place.first_row + rows
        self._drawn: tuple[int, Tensor] | None = None

    def __call__(self, rows: Tensor) -> None:
        """Fills ``rows``, [n, D of the shard], the next n of it."""
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
    """Within it, torch's CPU generator has the state that a text stands for."""
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@dataclasses.dataclass(frozen=True)
class Piece:
    """A block of a stored table of the whole model, and its name on the rank that has it.

    Args:
        stored: number of the stored table in the whole model. name: of the table in the rank's own collection.
        shard: the shard that it belongs to.
        first_row, rows, first_column, columns: the block.
    """

    stored: int
    name: str
    shard: Shard
    first_row: int
    rows: int
    first_column: int
    columns: int


def pieces_of(parts: PartMap) -> list[Piece]:
    """The pieces of all ranks, in the order of the shards."""
    firsts, total = [], 0
    for table in parts.tables:
        firsts.append(total)
        total += len(table.stored)
    pieces = []
    for i, shard in enumerate(parts.shards):
        table = parts.tables[shard.table]
        for k, stored in enumerate(table.stored):
            number = firsts[shard.table] + k
            if shard.is_whole(table):
                block = 0, stored.num_embeddings, 0, stored.embedding_dim
                pieces.append(Piece(number, stored.name, shard, *block))
            else:
                block = shard.first_row, shard.rows, shard.first_column, shard.columns
                pieces.append(Piece(number, f"{stored.name}#{i}", shard, *block))
    return pieces


def make_collection(
    module: TableCollection,
    parts: PartMap,
    entries: Sequence[Entry],
    pieces: Sequence[Piece],
    device: torch.device,
    salt: str,
    *,
    world: int = 1,
) -> TableCollection:
    """The collection of a rank's shards, whose features are ``entries``, in this order.

    Args:
        module: the whole collection, whose options, learning rate, GradScaler and frozen tables it has.
        parts: its lookups, of which the entries are some. pieces: those of this rank.
        salt: names the collection in the model, for the numbers that its rows begin with. world: the number of ranks.
    """
    shards = dict.fromkeys(entry.shard for entry in entries)
    own = [[p for p in pieces if p.shard is shard] for shard in shards]
    configs = [_config(module, parts, entries, mine, salt) for mine in own]
    made = (EmbeddingBagCollection if module._pools else EmbeddingCollection)(
        configs,
        device=device,
        optimizer=module._features.optimizers,
        rounding=module.rounding,
        seed=module.seed,
        cache=_cache(module, parts, list(shards), configs, world),
    )
    made.process_local = True
    if made._update is not None:
        _take_rates(made, module)
    made.freeze(*frozen_entries(entries, parts, module._layout.frozen))
    for table in made._features.tables:
        if table.projection:
            matrix = made._projection(table)
            with _seeded(f"{salt}/{table.name}/projection"), torch.no_grad():
                drawn = torch.empty(table.projection, dtype=torch.float32, device="cpu")
                matrix.copy_(torch.nn.init.xavier_uniform_(drawn))
            matrix.requires_grad_(module._projection(table).requires_grad)
    for piece in pieces:
        weight = module._held[module._features.stored[piece.stored].name].weight
        block = made._held[piece.name].weight
        block.requires_grad_(RequiresGrad.of(weight).requires_grad)
    return made


def _cache(
    module: TableCollection, parts: PartMap, shards: Sequence[Shard], configs: Sequence[ShardConfig], world: int
) -> RowCache | None:
    """The cache of a rank's shards: of each as large a part as of its table in the whole collection ``module``.

    With backing "disk", the rank's file has its number, and that of all ranks, behind the path.
    """
    if module.row_cache is None or not configs:
        return None
    cache, tables = module.row_cache.cache, [module.tables[parts.owners[s.table]] for s in shards]
    of = {c.name: cache.of(t.name) if len(t.stored) == 1 else 0.0 for c, t in zip(configs, tables, strict=True)}
    own: dict[str, Any] = {"fraction": of} if isinstance(cache.fraction, Mapping) or parts.joins else {}
    if cache.path is not None:
        own["path"] = f"{os.fspath(cache.path)}.{shards[0].rank}-of-{world}"
    return dataclasses.replace(cache, **own)


def _config(
    module: TableCollection, parts: PartMap, entries: Sequence[Entry], pieces: Sequence[Piece], salt: str
) -> ShardConfig:
    """The shard of ``pieces`` as a table, looked up by those of a rank's entries that are its."""
    shard, stored = pieces[0].shard, module._features.stored
    table = parts.tables[shard.table]
    whole = shard.is_whole(table)
    mine = [(k, e) for k, e in enumerate(entries) if e.shard is shard]
    return ShardConfig(
        table.num_embeddings if whole else shard.rows,
        table.embedding_dim if whole else shard.columns,
        name=table.name if whole else pieces[0].name,
        feature_names=[feature_name(k, parts.lookups[e.feature].name) for k, e in mine],
        format=table.format,
        compression=table.compression,
        pooling="sum" if mine[0][1].coefficient else getattr(table, "pooling", "sum"),
        padding_idx=_padding_of(table, shard),
        lr=table.lr,
        optimizer=table.optimizer,
        places=tuple(
            ShardPlace(p.stored, stored[p.stored].num_embeddings, p.first_row, p.first_column) for p in pieces
        ),
        whole=tuple(stored[p.stored] for p in pieces),
        salt=salt,
    )


def _take_rates(made: TableCollection, module: TableCollection) -> None:
    """Gives a rank's collection the groups, learning rates and GradScaler of the whole one."""
    weights, groups = made._held.weights(), rate_groups(module._features)
    made._update.face = ShardedRates(weights, groups, made._features.table_ids, made.lr, made.step)
    for group, given in zip(made.fused_optimizer.param_groups, module.fused_optimizer.param_groups, strict=True):
        group["lr"] = given["lr"]
    made._update.take_scaler(module._update, weights, made._buffers)


def _padding_of(table: EmbeddingConfig, shard: Shard) -> int | None:
    """The padding's number among the rows of a shard, if it is one of them."""
    if table.padding_idx is None or shard.is_whole(table):
        return table.padding_idx
    if not 0 <= table.padding_idx - shard.first_row < shard.rows:
        return None
    return table.padding_idx - shard.first_row


def frozen_entries(entries: Sequence[Entry], parts: PartMap, frozen: Collection[str]) -> list[str]:
    """The features of a rank's own collection that look up ``frozen`` ones of the whole collection."""
    names = [parts.lookups[e.feature].name for e in entries]
    return [feature_name(k, name) for k, name in enumerate(names) if name in frozen]


def feature_name(entry: int, name: str) -> str:
    """The name of a feature in a rank's own collection: several of its tables may be shards of one."""
    return f"{name}#{entry}"
