"""Tables of embedding rows: what one is, and how many of them lie in one flat tensor."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rec_kernels.nn.arguments import check_choice, positive_integer
from rec_kernels.nn.assigned import copied
from rec_kernels.nn.compression import Compression, MixedDimension, Part
from rec_kernels.ops.embedding_bag import table_starts
from rec_kernels.ops.row_formats import FLOAT_DTYPES, dequantize_rows, quantize_rows, row_bytes

_ops = torch.ops.rec_kernels

#: The row formats that tables can have.
BAG_FORMATS = ("fp32", "fp16", "bf16", "int8", "int4", "mx9", "mx6", "mx4")

# Numbers that are drawn and rounded at once when a table is made, to do without a float32 copy of it.
_FLOATS_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class StoredTable:
    """A table that has memory: a whole one, or a part of a compressed one.

    Args:
        part: what it has of the ids; None: id i is row i.
        bound: numbers start uniform in +-bound.
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    format: str
    part: Part | None
    init: Callable[[Tensor], object] | None
    bound: float

    @property
    def row_bytes(self) -> int:
        """Of a row."""
        return row_bytes(self.format, self.embedding_dim)

    @property
    def num_bytes(self) -> int:
        """Of all rows."""
        return self.num_embeddings * self.row_bytes

    def __getstate__(self) -> dict:
        return {**self.__dict__, "init": None}  # which is called once, and which pickle may refuse


@dataclass(frozen=True)
class EmbeddingConfig:
    """One table, whose lookups are not pooled.

    Args:
        num_embeddings: E, rows; at least 1.
        embedding_dim: D, columns; at least 1.
        name: the table's name, different for every table of a collection, without dots.
        feature_names: the features looked up in this table.
        format: of the rows: "fp32", "fp16", "bf16", "int8", "int4", "mx9", "mx6" or "mx4" (docs/numerics.md).
        compression: None, or how the table is kept in fewer numbers: ``rk.Hash``, ``rk.QuotientRemainder``,
            ``rk.Partitions`` or, where bags are pooled, ``rk.MixedDimension``. E is then the number of ids. Of several
            parts, each is a table of its own, named ``<name>_0``, ``<name>_1`` and so on.
        init: called once with the [E, D] float32 weight to fill it in place (rows of other formats are then rounded
            to the nearest), or with each part's; if it has an attribute ``in_chunks`` that is True, it may be called
            several times with consecutive rows, which takes less memory. None: uniform in +-1/sqrt(E), and parts such
            that the rows that they make have that variance. A pickled collection has none.

    Raises:
        ValueError: a size, name, format or compression that is not offered; partitions for which two ids, which are
            named, have the same row in every part.
    """

    num_embeddings: int
    embedding_dim: int
    _: KW_ONLY
    name: str
    feature_names: list[str]
    format: str = "fp32"
    compression: Compression | None = None
    init: Callable[[Tensor], object] | None = None

    def __post_init__(self) -> None:
        name, feature_names = self.name, self.feature_names
        for size in ("num_embeddings", "embedding_dim"):
            object.__setattr__(self, size, positive_integer(f"table {name!r}: {size}", getattr(self, size)))
        if not name or "." in name:
            raise ValueError(f"table name {name!r} must be non-empty and without dots")
        if not feature_names or isinstance(feature_names, str):
            raise ValueError(f"table {name!r}: feature_names must be a non-empty list of names, got {feature_names!r}")
        if self.format not in BAG_FORMATS:
            raise ValueError(f"table {name!r}: format must be one of {', '.join(BAG_FORMATS)}, got {self.format!r}")
        object.__setattr__(self, "feature_names", list(feature_names))
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

    def _check_compression(self) -> None:
        _check_per_id(self)

    def __getstate__(self) -> dict:
        return {name: value for name, value in self.__dict__.items() if name != "stored"}

    def without_init(self) -> EmbeddingConfig:
        """The same table, as a collection that has rows is to remember it in a pickle."""
        other = copy.copy(self)
        object.__setattr__(other, "init", None)
        return other

    @functools.cached_property
    def stored(self) -> list[StoredTable]:
        """The tables that it is kept in."""
        bound = self.num_embeddings**-0.5
        if self.compression is None:
            size = self.num_embeddings, self.embedding_dim
            return [StoredTable(self.name, *size, self.format, None, self.init, bound)]
        parts = self.compression.parts(self.num_embeddings, self.embedding_dim)
        names = [f"{self.name}_{p}" for p in range(len(parts))] if len(parts) > 1 else [self.name]
        bounds = self.compression.bounds(len(parts), bound)
        whole = len(parts) == 1 and parts[0].num_embeddings == self.num_embeddings
        return [
            StoredTable(
                name, part.num_embeddings, part.embedding_dim, self.format, None if whole else part, self.init, own
            )
            for name, part, own in zip(names, parts, bounds, strict=True)
        ]

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
        pooling: "sum" or "mean". Each feature gets ``embedding_dim`` columns of the output.

    The others are ``EmbeddingConfig``'s.
    """

    _: KW_ONLY
    pooling: str = "sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(f"table {self.name!r}: pooling", self.pooling, ("sum", "mean"))

    def _check_compression(self) -> None:
        """Parts may be pooled before they are combined."""


def _check_per_id(table: EmbeddingConfig) -> None:
    if table.compression is not None and table.compression.compose != "per_id":
        raise ValueError(
            f"table {table.name!r}: compression must not be {table.compression}: these lookups are not pooled, so it "
            "must be None or one with compose 'per_id'"
        )


def checked_tables(tables: Iterable[EmbeddingConfig], *, pooled: bool) -> list[EmbeddingConfig]:
    """The tables of a collection as a list; ``pooled``: whether its lookups are.

    Raises:
        ValueError: they are none, or one has a compression that is for lookups of the other kind.
    """
    if not isinstance(tables, Iterable):
        raise ValueError(f"tables must be a list of rk.EmbeddingBagConfig or rk.EmbeddingConfig, got {tables!r}")
    tables = list(tables)
    for i, table in enumerate(tables):
        if not isinstance(table, EmbeddingConfig):
            raise ValueError(f"tables[{i}] must be an rk.EmbeddingBagConfig or rk.EmbeddingConfig, got {table!r}")
        if not pooled:
            _check_per_id(table)
    return tables


def leave_bytes(requires_grad: bool = True) -> None:
    """In the place of ``requires_grad_`` of a parameter of bytes, which torch refuses, and with it a whole model's."""


class Table(nn.Module):
    """Holds one table's parameters: views of the collection's flat tensors, and the projection if there is one."""

    weight: nn.Parameter
    projection: nn.Parameter  # of tables that have one
    in_bytes = False  # whether the flat tensor of the weights is one of bytes
    in_file = False  # whether the weights are in a file, and not part of a state

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        views = ["weight", *self._views()]
        if self.in_file:
            del destination[prefix + views.pop(0)]
        # A storage of its own, in the same memory: pickle writes all of the storage that a tensor is a view of, and
        # torch.save refuses one that is seen as several dtypes. Who asks for parameters gets the module's, if fp32.
        for name in [] if keep_vars and not self.in_bytes else views:
            rows = destination[prefix + name].detach()
            if type(rows) is Tensor and not rows.is_meta:
                own = torch.from_dlpack(rows)
                held = keep_vars and name == "weight"
                destination[prefix + name] = nn.Parameter(own, requires_grad=False) if held else own

    def _views(self) -> dict[str, Tensor]:
        """The state of the fused optimizer, views of flat tensors as the weight is."""
        return {name: t for name, t in self._buffers.items() if name != "format" and t is not None}

    def empty_views(self) -> dict[int, Tensor]:
        """What is a view of a flat tensor, by its ``id``, with an empty tensor of its kind."""
        return {id(self.weight): self._empty_weight()} | {id(t): t.new_empty(0) for t in self._views().values()}

    def without_rows(self) -> Table:
        """The same table, to be pickled, with an empty weight and no state: its collection has the rows."""
        other = copy.copy(self)
        other._parameters = {**self._parameters, "weight": self._empty_weight()}
        other._buffers = {name: t for name, t in self._buffers.items() if name == "format"}
        return other

    def _empty_weight(self) -> nn.Parameter:
        return nn.Parameter(self.weight.detach().new_empty(0), requires_grad=self.weight.requires_grad)

    def _load_from_state_dict(
        self,
        state_dict: dict,
        prefix: str,
        local_metadata: dict,
        strict: bool,
        missing_keys: list[str],
        *args: object,
    ) -> None:
        missing: list[str] = []
        super()._load_from_state_dict(state_dict, prefix, copied(local_metadata), strict, missing, *args)
        missing_keys += [name for name in missing if not (self.in_file and name == f"{prefix}weight")]


class Tables(nn.Module):
    """name -> Table. Unlike nn.ModuleDict, any name is allowed, "type" and "keys" too."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self._modules.update({name: Table() for name in names})

    def without_rows(self) -> Tables:
        """As ``Table``'s, of all."""
        other = copy.copy(self)
        other._modules = {name: self[name].without_rows() for name in self}
        return other

    def __getitem__(self, name: str) -> Table:
        table: Any = self._modules[name]
        return table

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)

    def __contains__(self, name: str) -> bool:
        return name in self._modules


class Storage:
    """Where the tables of a collection lie in its one flat tensor.

    Float32 tables alone lie in a float32 tensor; with any other format among them, in one of bytes.

    Args:
        tables: the tables, in this order; each starts at a cache line.
    """

    def __init__(self, tables: list[StoredTable]) -> None:
        self.formats = sorted({t.format for t in tables if t.format != "fp32"})
        self.is_bytes = bool(self.formats)
        if any(t.format == "fp32" for t in tables):
            self.formats.append("fp32")
        self.dtype = torch.uint8 if self.is_bytes else torch.float32
        self._tables = tables
        self.starts = table_starts([self._size(t) for t in tables], 64 // self.dtype.itemsize)

    def _size(self, table: StoredTable) -> int:
        row = table.row_bytes if self.is_bytes else table.embedding_dim
        return table.num_embeddings * row

    def view(self, flat: Tensor, i: int) -> Tensor:
        """Table i of the flat tensor: [E, D] of the format's dtype, or uint8 [E, row_bytes]."""
        table, start = self._tables[i], self.starts[i]
        rows = flat[start : start + self._size(table)]
        return rows.view(FLOAT_DTYPES.get(table.format, torch.uint8)).view(table.num_embeddings, -1)


def initialize(
    weight: Tensor, table: StoredTable, most: int | None = None, begin: Callable[[int, int], object] | None = None
) -> None:
    """Fills a table's rows, a view of ``Storage.view``, as its ``init`` says.

    ``begin(first, count)`` is called before rows are written, ``most`` at a time. An ``init`` whose ``in_chunks`` is
    True fills the rows of consecutive calls; another one is given all of them at once.
    """
    rows, bound = table.num_embeddings, table.bound
    if table.format == "fp32" and begin is None:
        weight.uniform_(-bound, bound) if table.init is None else table.init(weight)
        return
    in_chunks = table.init is None or getattr(table.init, "in_chunks", False)
    step = min(most or rows, -(-_FLOATS_AT_ONCE // table.embedding_dim)) if in_chunks else rows
    # One piece of memory for all: glibc cannot always give a freed one of torch's alignment to the next that asks.
    chunk = torch.empty(min(step, rows), table.embedding_dim, dtype=torch.float32, device=weight.device)
    for first in range(0, rows, step):
        floats = chunk[: rows - first]
        floats.uniform_(-bound, bound) if table.init is None else table.init(floats)
        if not weight.is_meta:
            _write(weight, encode(floats, table.format), first, most, begin)


def _write(
    weight: Tensor, rows: Tensor, first: int, most: int | None, begin: Callable[[int, int], object] | None
) -> None:
    for chunk in rows.split(most or len(rows)):
        if begin is not None:
            begin(first, len(chunk))
        weight[first : first + len(chunk)] = chunk
        first += len(chunk)


def encode(floats: Tensor, format: str) -> Tensor:
    """[N, D] floats as rows of a format, rounded to the nearest: of its dtype, or uint8 [N, row_bytes]."""
    if format in FLOAT_DTYPES:
        return floats.to(FLOAT_DTYPES[format])
    return quantize_rows(floats, format)


def decode(rows: Tensor, format: str, embedding_dim: int) -> Tensor:
    """The reverse of ``encode``: float32 [N, D]."""
    return rows.float() if format in FLOAT_DTYPES else dequantize_rows(rows, format, embedding_dim)


def describe(table: EmbeddingConfig) -> str:
    """Name, size, the format unless it is the usual one, and the pooling if there is one."""
    parts = [f"{table.name}: {table.num_embeddings} x {table.embedding_dim}"]
    if table.format != "fp32":
        parts.append(table.format)
    if table.compression is not None:
        parts.append(str(table.compression))
    if isinstance(table, EmbeddingBagConfig):
        parts.append(table.pooling)
    return " ".join(parts)


def format_tensor(name: str, device: torch.device | None = None) -> Tensor:
    """A format's name as a tensor, its characters' codes: a state has tensors only."""
    return torch.tensor(list(name.encode()), dtype=torch.uint8, device=device)


def fit_formats(state: dict, prefix: str, tables: list[StoredTable], *, convert: bool) -> None:
    """Replaces, in a state, tables whose rows are in another format than those of ``tables``.

    Args:
        state: names to tensors, those of a collection's tables below ``prefix``. Missing ones are not looked at.
        convert: whether tables in another format are converted.

    Raises:
        RuntimeError: a table is in another format and ``convert`` is False, or in one that tables cannot have, or its
            rows are not of the width that its format and the table's columns ask for.
    """
    fitting: dict[str, Tensor | None] = {}
    for table in tables:
        name = f"{prefix}embedding_bags.{table.name}"
        rows = state.get(f"{name}.weight")
        found = _format_of_state(rows, state.get(f"{name}.format"), table)
        if found in (None, table.format):
            continue
        if found not in BAG_FORMATS:
            raise RuntimeError(
                f"{name}.format must name the rows of {name}.weight, as one of {', '.join(BAG_FORMATS)}, got "
                f"{found!r}; no table of the collection was changed"
            )
        if not convert:
            raise RuntimeError(
                f"{name}.weight has rows of format {found}, this collection's are {table.format}: "
                "load_state_dict(..., convert=True) of the collection converts them, or its convert_formats() around "
                "that of a model; none of its tables was changed"
            )
        width = table.embedding_dim if found in FLOAT_DTYPES else row_bytes(found, table.embedding_dim)
        if rows.dim() != 2 or rows.shape[1] != width:
            raise RuntimeError(
                f"size mismatch for {name}.weight: {list(rows.shape)} with rows of format {found}, which are {width} "
                f"wide for {table.embedding_dim} columns; no table of the collection was changed"
            )
        fitting[f"{name}.weight"] = encode(decode(rows, found, table.embedding_dim), table.format)
        fitting[f"{name}.format"] = None if table.format in FLOAT_DTYPES else format_tensor(table.format)
    state.update(fitting)
    for name in [name for name, value in fitting.items() if value is None]:
        del state[name]


def _format_of_state(rows: object, name: object, table: StoredTable) -> str | None:
    """None: nothing that could be told, or floats that torch casts to the table's own. "": bytes of no named format."""
    if not isinstance(rows, Tensor):
        return None
    for format, dtype in FLOAT_DTYPES.items():
        if rows.dtype == dtype:
            return format
    if rows.dtype != torch.uint8:
        return None if table.format in FLOAT_DTYPES else "fp32"
    if not isinstance(name, Tensor) or name.dtype != torch.uint8 or name.dim() != 1:
        return ""  # two formats may have rows of one width
    return bytes(name.tolist()).decode(errors="replace")


@torch.library.register_fake("rec_kernels::_advise_huge_pages")
def _(flat: Tensor) -> bool:
    return False  # a fake tensor has no memory


def zeros(size: int, dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
    """[size] zeros; in the CPU's memory on huge pages, where the system offers them."""
    flat = torch.empty(size, dtype=dtype, device=device)
    if flat.device.type == "cpu":
        _ops._advise_huge_pages(flat)  # before the first touch, which is what allocates the pages
    return flat.zero_()
