"""Table configurations, and the physical tables that each configuration is stored as."""

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

# The id range of a table without ``num_embeddings``: every int64.
_NUM_INT64_IDS = 2**64


@dataclass(frozen=True)
class ShardPlace:
    """The position of a shard in the unsharded table, which seeds the stochastic rounding of the shard's rows.

    Args:
        table_id: index of the unsharded table among the stored tables of its collection.
        table_rows: rows of the unsharded table.
        first_row, first_column: the shard's first row and column in the unsharded table.
    """

    table_id: int
    table_rows: int
    first_row: int = 0
    first_column: int = 0


@dataclass(frozen=True)
class StoredTable:
    """A table that has its own memory: an uncompressed table, or one part of a compressed table.

    Args:
        part: the mapping from ids to rows; None: id i is row i.
        bound: without ``init``, values are initialized uniformly in [-bound, bound], and row ``padding_row`` to 0.
        place: the position in the unsharded table; None: the table is not a shard.
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
        """Bytes per row."""
        return row_bytes(self.format, self.embedding_dim)

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return self.num_embeddings * self.row_bytes

    def report(self) -> dict[str, object]:
        """The first entries of a collection's ``memory_report()``: name, sizes, format and bytes of the rows."""
        names = "name", "num_embeddings", "embedding_dim", "format"
        return {name: getattr(self, name) for name in names} | {"weight_bytes": self.num_bytes}

    def __getstate__(self) -> dict:
        return {**self.__dict__, "init": None}  # init has run already, and may not be picklable


@dataclass(frozen=True)
class EmbeddingConfig:
    """Configuration of an embedding table for sequence (unpooled) lookups.

    Args:
        num_embeddings: E, rows; at least 1. None, only with ``rk.Hash``: every int64, also negative, is a valid id.
        embedding_dim: D, columns; at least 1.
        name: table name, unique within a collection, without dots.
        feature_names: the features looked up in this table.
        format: row format: "fp32", "fp16", "bf16", "int8", "int4", "mx9", "mx6" or "mx4" (docs/numerics.md).
        compression: None, or a compression that stores fewer parameters: ``rk.Hash``, ``rk.QuotientRemainder``,
            ``rk.Partitions`` or, for pooled lookups, ``rk.MixedDimension``. E is then the number of ids. A compression
            with several parts stores each part as a table named ``<name>_0``, ``<name>_1`` and so on.
        init: function called once with the float32 weight [E, D], or with each part's weight, to fill it in place;
            other formats then round to the nearest. It may be called several times with consecutive rows, to save
            memory, if it has a true attribute ``in_chunks`` or is torch's ``uniform_``, ``normal_``, ``constant_``,
            ``zeros_`` or ``ones_`` (or a ``functools.partial`` of one). None: uniform in +-1/sqrt(E), with parts scaled
            so that the combined rows have that variance; without E, in +-1/sqrt(buckets). It is not pickled.
        padding_idx: id to ignore, from -E to E - 1; negative ids count from the end. It adds nothing to a sum, does not
            count in a mean, looks up zeros and gets no gradient. Without ``init`` and compression its row is
            initialized to zeros, as in torch. Without E it is any int64, unchanged: -1 is id -1. None: no padding.
        lr: initial learning rate of this table under a fused optimizer, at least 0. None: the optimizer's ``lr``.
        optimizer: fused optimizer of this table, as in ``rk.EmbeddingBagCollection``. None: the collection's.

    Raises:
        ValueError: an unsupported size, name, format, compression, padding_idx, lr or optimizer; partitions that map
            two ids to the same row in every part (the error names both ids).
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
            if isinstance(self.lr, Tensor):  # copied, because the tensor's value may change later
                object.__setattr__(self, "lr", number_of(self.lr))
        check_optimizer(f"table {name!r}: optimizer", self.optimizer)
        if not isinstance(self.compression, Compression | None):
            raise ValueError(
                f"table {name!r}: compression must be rk.Hash, rk.QuotientRemainder, rk.Partitions, rk.MixedDimension "
                f"or None, got {self.compression!r}"
            )
        self._check_compression()
        try:
            self.stored  # noqa: B018 -- raises for sizes that do not fit the compression
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
        """Copies the configuration without ``init``, for a pickle of a collection that has its rows."""
        other = copy.copy(self)
        object.__setattr__(other, "init", None)
        return other

    @functools.cached_property
    def stored(self) -> list[StoredTable]:
        """The physical tables: one for each part of a compressed table, else one."""
        ids = _NUM_INT64_IDS if self.num_embeddings is None else self.num_embeddings
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
        """Rows for a sharding plan: E, or the stored rows of a table without E."""
        return self.stored[0].num_embeddings if self.num_embeddings is None else self.num_embeddings

    @property
    def rate(self) -> float | None:
        """Initial learning rate: ``lr``, else that of this table's optimizer. None: the collection's."""
        if self.lr is not None or self.optimizer is None:
            return self.lr
        return self.optimizer.lr

    @property
    def projection(self) -> tuple[int, int] | None:
        """Shape [embedding_dim, dim] of the projection applied to pooled rows, or None."""
        dim = sum(table.embedding_dim for table in self.stored)
        narrow = isinstance(self.compression, MixedDimension) and dim < self.embedding_dim
        return (self.embedding_dim, dim) if narrow else None


@dataclass(frozen=True)
class EmbeddingBagConfig(EmbeddingConfig):
    """Configuration of an embedding table for pooled lookups.

    Args:
        pooling: "sum" or "mean", or TorchRec's ``PoolingType``. Each feature has ``embedding_dim`` output columns.

    Other arguments are documented in ``EmbeddingConfig``.
    """

    _: KW_ONLY
    pooling: str = "sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.pooling, Enum) and isinstance(self.pooling.value, str):
            object.__setattr__(self, "pooling", self.pooling.value.lower())
        check_choice(f"table {self.name!r}: pooling", self.pooling, ("sum", "mean"))

    def _check_compression(self) -> None:
        """Accept every compression: parts may be pooled before they are combined."""


def check_per_id(table: EmbeddingConfig) -> None:
    """Raises ValueError if the table's compression supports pooled lookups only."""
    if table.compression is not None and table.compression.compose != "per_id":
        raise ValueError(
            f"table {table.name!r}: compression = {table.compression} must be None or have compose 'per_id', "
            "because these lookups are not pooled"
        )


def shown(module: object, tables: Iterable[EmbeddingConfig], *others: str) -> str:
    """The ``repr`` of a module: one line per table, followed by ``others``."""
    return "\n  ".join([f"{type(module).__name__}(", *map(describe, tables), *others]) + "\n)"


def describe(table: EmbeddingConfig) -> str:
    """One line: name, size, format unless fp32, compression, pooling, and the table's own lr and optimizer."""
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
