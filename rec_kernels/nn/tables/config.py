"""Configurations of tables: what a user says of one, and the tables that it is kept in."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from enum import Enum

from torch import Tensor

from rec_kernels.nn.arguments import check_choice, check_rate, is_list, number_of, positive_integer
from rec_kernels.nn.tables.compression import Compression, Hash, MixedDimension, Part
from rec_kernels.nn.tables.optimizers import Optimizer, check_optimizer
from rec_kernels.ops.layout_records import BAG_FORMATS, integer
from rec_kernels.ops.row_formats import row_bytes

# Integers of 64 bits.
_EVERY_ID = 2**64


@dataclass(frozen=True)
class ShardPlace:
    """The place of a shard in a table of the whole model, whose noise its rows have.

    Args:
        table_id: number of the whole table among the stored tables of its collection. table_rows: rows of that table.
        first_row, first_column: where the shard begins there.
    """

    table_id: int
    table_rows: int
    first_row: int = 0
    first_column: int = 0


@dataclass(frozen=True)
class StoredTable:
    """A table that has memory: a whole one, or a part of a compressed one.

    Args:
        part: what it has of the ids; None: id i is row i.
        bound: numbers start uniform in +-bound; without ``init``, those of row ``padding_row`` are 0.
        place: where it lies in a table of the whole model; None: it is whole, and numbered as it is stored.
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    format: str
    part: Part | None
    init: Callable[[Tensor], object] | None
    bound: float
    padding_row: int | None = None
    place: ShardPlace | None = None

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return row_bytes(self.format, self.embedding_dim)

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return self.num_embeddings * self.row_bytes

    def report(self) -> dict[str, object]:
        """Name, sizes, format and bytes of the rows, with which ``memory_report()`` of a collection begins."""
        names = "name", "num_embeddings", "embedding_dim", "format"
        return {name: getattr(self, name) for name in names} | {"weight_bytes": self.num_bytes}

    def __getstate__(self) -> dict:
        return {**self.__dict__, "init": None}  # which is called once, and which pickle may refuse


@dataclass(frozen=True)
class EmbeddingConfig:
    """One table, whose lookups are not pooled.

    Args:
        num_embeddings: E, rows; at least 1. None, with ``rk.Hash`` alone: every int64 is an id, negative ones, too.
        embedding_dim: D, columns; at least 1.
        name: the table's name, different for every table of a collection, without dots.
        feature_names: the features looked up in this table.
        format: of the rows: "fp32", "fp16", "bf16", "int8", "int4", "mx9", "mx6" or "mx4" (docs/numerics.md).
        compression: None, or how the table is kept in fewer numbers: ``rk.Hash``, ``rk.QuotientRemainder``,
            ``rk.Partitions`` or, where bags are pooled, ``rk.MixedDimension``. E is then the number of ids. Of several
            parts, each is a table of its own, named ``<name>_0``, ``<name>_1`` and so on.
        init: called once with the [E, D] float32 weight to fill it in place (rows of other formats are then rounded
            to the nearest), or with each part's; if it has an attribute ``in_chunks`` that is True, or is torch's
            ``uniform_``, ``normal_``, ``constant_``, ``zeros_`` or ``ones_`` (or a ``functools.partial`` of one), it
            may be called several times with consecutive rows, which takes less memory. None: uniform in +-1/sqrt(E),
            and parts such that the rows that they make have that variance; without E, in +-1/sqrt(buckets). A pickled
            collection has none.
        padding_idx: an id, from -E to E - 1, negative ones counted from the end, that is left out: it adds nothing to a
            sum, does not count in a mean, has zeros for a row and gives the table no gradient. Without ``init`` and
            compression its row begins as zeros, as torch's. Without E it is any int64, and itself: -1 is id -1. None:
            no id is.
        lr: the learning rate that a fused optimizer begins with for this table, at least 0. None: the optimizer's.
        optimizer: the fused optimizer of this table, as ``rk.EmbeddingBagCollection`` takes one for all. None: the
            collection's.

    Raises:
        ValueError: a size, name, format, compression, padding_idx, lr or optimizer that is not offered; partitions for
            which two ids, which are named, have the same row in every part.
    """

    num_embeddings: int | None
    embedding_dim: int
    _: KW_ONLY
    name: str
    feature_names: list[str]
    format: str = "fp32"
    compression: Compression | None = None
    init: Callable[[Tensor], object] | None = None
    padding_idx: int | None = None
    lr: float | None = None
    optimizer: Optimizer | None = None

    def __post_init__(self) -> None:
        name, feature_names = self.name, self.feature_names
        self._check_sizes()
        if not isinstance(name, str) or not name or "." in name:
            raise ValueError(f"table name {name!r} must be a string, non-empty and without dots")
        if not is_list(feature_names) or not feature_names or not all(isinstance(f, str) and f for f in feature_names):
            names = "a non-empty list of names, which are non-empty strings"
            raise ValueError(f"table {name!r}: feature_names must be {names}, got {feature_names!r}")
        if self.init is not None and not callable(self.init):
            raise ValueError(f"table {name!r}: init must be a function of the weight, or None, got {self.init!r}")
        if self.format not in BAG_FORMATS:
            raise ValueError(f"table {name!r}: format must be one of {', '.join(BAG_FORMATS)}, got {self.format!r}")
        object.__setattr__(self, "feature_names", list(feature_names))
        self._check_padding()
        if self.lr is not None:
            check_rate(f"table {name!r}: lr", self.lr)
            if isinstance(self.lr, Tensor):  # whose number may change later
                object.__setattr__(self, "lr", number_of(self.lr))
        check_optimizer(f"table {name!r}: optimizer", self.optimizer)
        if not isinstance(self.compression, Compression | None):
            raise ValueError(
                f"table {name!r}: compression must be rk.Hash, rk.QuotientRemainder, rk.Partitions, rk.MixedDimension "
                f"or None, got {self.compression!r}"
            )
        self._check_compression()
        try:
            self.stored  # noqa: B018 -- finds what does not fit
        except ValueError as error:
            raise ValueError(f"table {name!r}: {error}") from None

    def _check_sizes(self) -> None:
        of = f"table {self.name!r}:"
        object.__setattr__(self, "embedding_dim", positive_integer(f"{of} embedding_dim", self.embedding_dim))
        is_hashed = isinstance(self.compression, Hash)
        if self.num_embeddings is None and is_hashed:
            return
        try:
            rows = positive_integer(f"{of} num_embeddings", self.num_embeddings)
        except ValueError as error:
            advice = "; with compression=rk.Hash(buckets) it may be None: every int64 is an id then"
            raise ValueError(f"{error}{advice if is_hashed or self.num_embeddings is None else ''}") from None
        object.__setattr__(self, "num_embeddings", rows)

    def _check_padding(self) -> None:
        if self.padding_idx is None:
            return
        row = integer(self.padding_idx, f"table {self.name!r}: padding_idx")
        rows = self.num_embeddings
        if rows is None:
            object.__setattr__(self, "padding_idx", row)
            return
        if not -rows <= row < rows:
            raise ValueError(f"table {self.name!r}: padding_idx = {row} must be in [{-rows}, {rows})")
        object.__setattr__(self, "padding_idx", row % rows)

    def _check_compression(self) -> None:
        check_per_id(self)

    def __getstate__(self) -> dict:
        return {name: value for name, value in self.__dict__.items() if name != "stored"}

    def without_init(self) -> EmbeddingConfig:
        """The table without its init, as a collection that has rows keeps it in a pickle."""
        other = copy.copy(self)
        object.__setattr__(other, "init", None)
        return other

    @functools.cached_property
    def stored(self) -> list[StoredTable]:
        """The tables that it is kept in."""
        ids = _EVERY_ID if self.num_embeddings is None else self.num_embeddings
        if self.compression is None:
            size = ids, self.embedding_dim
            return [StoredTable(self.name, *size, self.format, None, self.init, ids**-0.5, self.padding_idx)]
        parts = self.compression.parts(ids, self.embedding_dim)
        bound = (parts[0].num_embeddings if self.num_embeddings is None else ids) ** -0.5
        names = [f"{self.name}_{p}" for p in range(len(parts))] if len(parts) > 1 else [self.name]
        bounds = self.compression.bounds(len(parts), bound)
        whole = len(parts) == 1 and parts[0].num_embeddings == ids
        return [
            StoredTable(
                name, part.num_embeddings, part.embedding_dim, self.format, None if whole else part, self.init, own
            )
            for name, part, own in zip(names, parts, bounds, strict=True)
        ]

    @property
    def planned_rows(self) -> int:
        """The rows that a plan of shards counts: E, or those that are kept where every integer is an id."""
        return self.stored[0].num_embeddings if self.num_embeddings is None else self.num_embeddings

    @property
    def rate(self) -> float | None:
        """The learning rate that it begins with: ``lr``, or its own optimizer's. None: the collection's."""
        if self.lr is not None or self.optimizer is None:
            return self.lr
        return self.optimizer.lr

    @property
    def projection(self) -> tuple[int, int] | None:
        """Shape [embedding_dim, dim] of the matrix that rows are multiplied by once pooled, or None."""
        dim = sum(table.embedding_dim for table in self.stored)
        narrow = isinstance(self.compression, MixedDimension) and dim < self.embedding_dim
        return (self.embedding_dim, dim) if narrow else None


@dataclass(frozen=True)
class EmbeddingBagConfig(EmbeddingConfig):
    """One table whose bags are pooled.

    Args:
        pooling: "sum" or "mean", or TorchRec's ``PoolingType``. Each feature gets ``embedding_dim`` columns of the
            output.

    The others are ``EmbeddingConfig``'s.
    """

    _: KW_ONLY
    pooling: str = "sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.pooling, Enum) and isinstance(self.pooling.value, str):
            object.__setattr__(self, "pooling", self.pooling.value.lower())
        check_choice(f"table {self.name!r}: pooling", self.pooling, ("sum", "mean"))

    def _check_compression(self) -> None:
        """Parts may be pooled before they are combined."""


def check_per_id(table: EmbeddingConfig) -> None:
    """Raises ValueError if a table has a compression that is for pooled lookups only."""
    if table.compression is not None and table.compression.compose != "per_id":
        raise ValueError(
            f"table {table.name!r}: compression must not be {table.compression}: these lookups are not pooled, so it "
            "must be None or one with compose 'per_id'"
        )


def shown(module: object, tables: Iterable[EmbeddingConfig], *others: str) -> str:
    """The text of a module that has these tables: a line for each, and others behind."""
    return "\n  ".join([f"{type(module).__name__}(", *map(describe, tables), *others]) + "\n)"


def describe(table: EmbeddingConfig) -> str:
    """Name, size, the format unless it is the usual one, and the pooling if there is one."""
    ids = "every id" if table.num_embeddings is None else table.num_embeddings
    parts = [f"{table.name}: {ids} x {table.embedding_dim}"]
    if table.format != "fp32":
        parts.append(table.format)
    if table.compression is not None:
        parts.append(str(table.compression))
    if isinstance(table, EmbeddingBagConfig):
        parts.append(table.pooling)
    if table.lr is not None:
        parts.append(f"lr={table.lr}")
    if table.optimizer is not None:
        parts.append(f"optimizer={table.optimizer}")
    return " ".join(parts)
