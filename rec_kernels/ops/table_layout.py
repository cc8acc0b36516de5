"""``table_layout``: where the tables of an embedding_bag call lie, and what becomes of their rows, as one value.

csrc/ops/table_layout.h is the contract: a record for each part of a feature, and a short list of what the host must
know. Nobody else writes records; the kernels check of them only what their safety needs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from rec_kernels.ops.row_formats import ROW_FORMATS, row_bytes

T = TypeVar("T")

#: Formats that tables can have.
BAG_FORMATS = ("fp32", "fp16", "bf16", "int8", "int4", "mx9", "mx6", "mx4")
#: What the rows of an id's parts become, by its number.
COMBINE = ("concat", "add", "mult")
MAX_PARTS = 4
MAX_TABLE_ID = 65536
MAX_WAYS = 1024
_LARGEST = 2**63 - 1

#: The columns of a layout: csrc/ops/table_layout.h, struct TablePart.
Column = IntEnum(
    "Column",
    "weight_offset row_offset num_embeddings table_rows embedding_dim column part_column table_id state_offset feature "
    "part_start id_limit divisor modulus combine format first_row first_column mean frozen multiplied cache_sets "
    "cache_first_set cache_row_offset by_row",
    start=0,
)
#: The elements of layout_sizes: struct LayoutSizes.
Size = IntEnum(
    "Size",
    "num_features output_dim widest_feature num_rows max_embedding_dim most_parts cache_ways formats flags",
    start=0,
)


class Flag(IntEnum):
    """Bits of ``layout_sizes[Size.flags]``: enum LayoutFlag."""

    any_mean = 1
    multiplies = 2
    bytes = 4
    maps_ids = 8


class TableLayout(NamedTuple):
    """What ops take as ``layout`` and ``layout_sizes``.

    Attributes:
        layout: [parts, columns] int64, a record for each part of a feature, on the device of the ids.
        layout_sizes: what the host must know of all records.
    """

    layout: Tensor
    layout_sizes: list[int]

    def column(self, column: Column) -> Tensor:
        """[parts]: a column of the layout, a view."""
        return self.layout[:, column]


@dataclass(frozen=True)
class CachePlaces:
    """Where rows of the tables may lie in a row cache (docs/numerics.md, "Row cache").

    Attributes:
        ways: slots of a set.
        sets: [parts] how many sets the rows of each part's table are spread over; 0: the table is not cached.
        first_sets: [parts] the first of them.
        row_offsets: [parts] the element of ``cache_rows`` at which slot 0 would start, were all slots of the width of
            this table.
    """

    ways: int
    sets: Sequence[int]
    first_sets: Sequence[int]
    row_offsets: Sequence[int]


def table_layout(
    num_embeddings: Sequence[int],
    embedding_dims: Sequence[int],
    *,
    weight_offsets: Sequence[int] | None = None,
    row_offsets: Sequence[int] | None = None,
    formats: Sequence[str] | None = None,
    mean: Sequence[bool] | None = None,
    frozen: Sequence[bool] | None = None,
    table_ids: Sequence[int] | None = None,
    state_offsets: Sequence[int] | None = None,
    partition_starts: Sequence[int] | None = None,
    divisors: Sequence[int] | None = None,
    moduli: Sequence[int] | None = None,
    id_limits: Sequence[int] | None = None,
    combine: Sequence[str | int] | None = None,
    table_rows: Sequence[int] | None = None,
    first_rows: Sequence[int] | None = None,
    first_columns: Sequence[int] | None = None,
    cache: CachePlaces | None = None,
    widest_feature: int | None = None,
    num_rows: int | None = None,
    device: torch.device | str | None = None,
) -> TableLayout:
    """The layout of F features, each of which reads one table or, with ``partition_starts``, several parts; P parts.

    ``rk.table_layout([1000, 50], [16, 8])`` is two tables of a feature each, one after the other in flat weights.

    Args:
        num_embeddings, embedding_dims: [P] E and D of each part's table.
        weight_offsets: [P] where each table starts in the flat ``weights``, in elements: floats, or with ``formats``
            bytes. Default: the tables lie one after the other, without gaps.
        row_offsets: [P] the linear row of each table's row 0. Default: rows are numbered through. Parts that read one
            table have its offsets.
        formats: [P] one of ``BAG_FORMATS`` each; ``weights`` is uint8 then. Default: float32.
        mean: [F] whether bags are averaged. Default: summed.
        frozen: [F] whether ids give no gradient; ``set_frozen`` changes it later. Default: none.
        table_ids: [P] the numbers of the tables in stochastic rounding's noise, in [0, 65536). Default: 0.
        state_offsets: [P] where each table starts in optimizer state for every element. Default: tables without gaps.
        partition_starts: [F + 1] feature f has parts [partition_starts[f], partition_starts[f + 1]), at most 4.
        divisors, moduli: [P] an id's row is ``id // divisor % modulus``. Default: the id itself.
        id_limits: [F] ids of the feature are in [0, id_limit). Default: E of its only part.
        combine: [F] what the rows of an id's parts become: "concat" (or 0), "add" (1), "mult" (2). Default: "concat".
        table_rows, first_rows, first_columns: [P] of a shard: rows of the whole table, and its first row and column
            there. Default: the parts' tables are whole.
        cache: where rows may lie in a row cache.
        widest_feature: columns of the output of calls with ``bag_starts``. Default: of the widest feature.
        num_rows: above every linear row. Default: the least.
        device: of the layout.

    Raises:
        ValueError: a list of another length than said above, or a number out of its range; tables, their state or
            their places in a cache that overlap in part. The message names the argument, the element, and what is
            allowed.
    """
    build = _Builder(list(num_embeddings), list(embedding_dims), partition_starts, formats)
    build.place_features(id_limits, divisors, moduli, combine)
    build.place_tables(weight_offsets, row_offsets, state_offsets, table_ids)
    build.place_shards(table_rows, first_rows, first_columns)
    build.place_columns()
    build.say_of_features("mean", mean)
    build.say_of_features("frozen", frozen)
    build.place_cache(cache)
    build.check_shared()
    build.order_by_row()
    sizes = build.sizes(widest_feature, num_rows, cache)
    records = torch.tensor(build.records, dtype=torch.int64, device=device).reshape(-1, len(Column))
    return TableLayout(records, sizes)


def set_frozen(layout: Tensor, frozen: Sequence[bool]) -> None:
    """Changes, in place, which features of a layout give no gradient: [F] flags."""
    flags = torch.tensor(list(frozen), dtype=torch.int64, device=layout.device)
    layout[:, Column.frozen] = flags[layout[:, Column.feature]]


def _check(good: bool, message: str) -> None:
    if not good:
        raise ValueError(message)


def _sized(values: Iterable[T] | None, size: int, name: str, what: str) -> list[T] | None:
    if values is None:
        return None
    found = list(values)
    _check(len(found) == size, f"{name} must have an element for each of the {size} {what}, got {len(found)}")
    return found


class _Builder:
    """The records of a layout under way, by their columns."""

    def __init__(
        self, rows: list[int], dims: list[int], starts: Sequence[int] | None, formats: Sequence[str] | None
    ) -> None:
        count = len(dims)
        _sized(rows, count, "num_embeddings", "embedding_dims")
        self.records = [[0] * len(Column) for _ in range(count)]
        self.is_bytes = formats is not None
        self.formats = _sized(formats, count, "formats", "parts") or ["fp32"] * count
        self.starts = self._part_starts(starts, count)
        self.partitioned = starts is not None
        for i, record in enumerate(self.records):
            _check(1 <= dims[i] < 2**31, f"embedding_dims[{i}] = {dims[i]} must be in [1, 2^31)")
            _check(rows[i] >= 0, f"num_embeddings[{i}] = {rows[i]} must not be negative")
            name = self.formats[i]
            known = ", ".join(BAG_FORMATS)
            _check(name in BAG_FORMATS, f'formats[{i}]: tables cannot have format "{name}"; it must be one of {known}')
            record[Column.num_embeddings], record[Column.embedding_dim] = rows[i], dims[i]
            record[Column.format] = ROW_FORMATS.index(name)
        for f, (first, last) in enumerate(itertools.pairwise(self.starts)):
            for record in self.records[first:last]:
                record[Column.feature] = f
            self.records[f][Column.part_start] = first
        for record in self.records[len(self.starts) - 1 :]:
            record[Column.part_start] = count

    @property
    def num_features(self) -> int:
        return len(self.starts) - 1

    @staticmethod
    def _part_starts(starts: Sequence[int] | None, count: int) -> list[int]:
        if starts is None:
            return list(range(count + 1))
        starts = list(starts)
        _check(len(starts) > 0, "partition_starts must have num_features + 1 elements, got none")
        _check(starts[0] == 0, f"partition_starts[0] = {starts[0]} must be 0")
        for f, (before, here) in enumerate(itertools.pairwise(starts), 1):
            good = before < here <= before + MAX_PARTS
            limits = f"1 to {MAX_PARTS} above the one before it, {before}"
            _check(good, f"partition_starts[{f}] = {here} must be {limits}")
        last = f"partition_starts[{len(starts) - 1}] = {starts[-1]}"
        _check(starts[-1] == count, f"{last} must be {count}, the number of elements of embedding_dims")
        return starts

    def _name(self, i: int) -> str:
        feature = self.records[i][Column.feature]
        part = f"part {i - self.starts[feature]} of " if self.partitioned else ""
        return f"{part}feature {feature}"

    def _row_bytes(self, i: int) -> int:
        return row_bytes(self.formats[i], self.records[i][Column.embedding_dim])

    def place_features(
        self,
        id_limits: Sequence[int] | None,
        divisors: Sequence[int] | None,
        moduli: Sequence[int] | None,
        combine: Sequence[str | int] | None,
    ) -> None:
        """How the ids of features find rows."""
        given = {"divisors": divisors, "moduli": moduli, "id_limits": id_limits, "combine": combine}
        for name, values in given.items():
            missing = "partition_starts is missing: divisors, moduli, id_limits and combine mean nothing without it"
            _check(values is None or self.partitioned, missing)
            asks = f"{name} is missing: partition_starts is given, so divisors, moduli, id_limits and combine must be"
            _check(values is not None or not self.partitioned, asks)
        if not self.partitioned:
            for record in self.records:
                rows = record[Column.num_embeddings]
                record[Column.id_limit], record[Column.divisor], record[Column.modulus] = rows, 1, max(rows, 1)
            return
        of_parts = {name: _sized(given[name], len(self.records), name, "parts") for name in ("divisors", "moduli")}
        limits = _sized(id_limits, self.num_features, "id_limits", "features") or []
        how = _sized(combine, self.num_features, "combine", "features") or []
        for i, record in enumerate(self.records):
            f = record[Column.feature]
            number = COMBINE.index(how[f]) if how[f] in COMBINE else how[f]
            _check(number in (0, 1, 2), f"combine[{f}] = {how[f]} must be 0 (concat), 1 (add) or 2 (mult)")
            record[Column.divisor], record[Column.modulus] = of_parts["divisors"][i], of_parts["moduli"][i]
            record[Column.id_limit] = limits[f]
            self._check_rows(i, record)
            record[Column.combine] = number if self.starts[f + 1] - self.starts[f] > 1 else 0
        for record in self.records:
            self._check_parts(record[Column.feature])

    def _check_rows(self, i: int, record: list[int]) -> None:
        f, divisor, modulus, limit = (
            record[c] for c in (Column.feature, Column.divisor, Column.modulus, Column.id_limit)
        )
        _check(divisor >= 1, f"divisors[{i}] = {divisor} must be at least 1")
        _check(modulus >= 1, f"moduli[{i}] = {modulus} must be at least 1, for a table without rows, too")
        _check(limit >= 0, f"id_limits[{f}] = {limit} must not be negative")
        rows, have = min(modulus, -(-limit // divisor)), record[Column.num_embeddings]
        lead = f"divisors[{i}] = {divisor} and moduli[{i}] = {modulus} lead to from ids below {limit}"
        _check(rows <= have, f"num_embeddings[{i}] = {have} must be {rows} or more, the rows that {lead}")

    def _check_parts(self, f: int) -> None:
        first, *others = range(self.starts[f], self.starts[f + 1])
        a = self.records[first]
        for i in others:
            b = self.records[i]
            shape, of_first = ((r[Column.embedding_dim], ROW_FORMATS[r[Column.format]]) for r in (b, a))
            here = f"embedding_dims[{i}] = {shape[0]} and format {shape[1]}, of {self._name(i)},"
            there = f"those of its part 0, {of_first[0]} and {of_first[1]}: combine[{f}] adds or multiplies them"
            _check(a[Column.combine] == 0 or shape == of_first, f"{here} must be {there}")

    def place_tables(
        self,
        weight_offsets: Sequence[int] | None,
        row_offsets: Sequence[int] | None,
        state_offsets: Sequence[int] | None,
        table_ids: Sequence[int] | None,
    ) -> None:
        """Where tables lie in weights, rows and state."""
        size, element = len(self.records), 1 if self.is_bytes else 4
        rows = [r[Column.num_embeddings] for r in self.records]
        elements = [r[Column.num_embeddings] * r[Column.embedding_dim] for r in self.records]
        widths = [self._row_bytes(i) // element for i in range(size)]
        places = {
            Column.weight_offset: (
                weight_offsets,
                "weight_offsets",
                [r * w for r, w in zip(rows, widths, strict=True)],
            ),
            Column.row_offset: (row_offsets, "row_offsets", rows),
            Column.state_offset: (state_offsets, "state_offsets", elements),
        }
        for column, (given, name, lengths) in places.items():
            starts = _sized(given, size, name, "parts") or self._one_after_another(lengths, column)
            for i, record in enumerate(self.records):
                here = starts[i]
                most = f"[0, 2^63 - num_embeddings[{i}])" if column == Column.row_offset else "[0, 2^62)"
                last = _LARGEST - lengths[i] if column == Column.row_offset else _LARGEST // 2
                _check(0 <= here <= last, f"{name}[{i}] = {here} must be in {most}")
                record[column] = here
        for i, record in enumerate(self.records):
            record[Column.weight_offset] *= element
            odd = self.formats[i] == "fp32" and record[Column.weight_offset] % 4
            at = f"weight_offsets[{i}] = {record[Column.weight_offset] // element}"
            _check(not odd, f'{at} must be a multiple of 4 for format "fp32"')
        ids = _sized(table_ids, size, "table_ids", "parts") or [0] * size
        for i, record in enumerate(self.records):
            _check(0 <= ids[i] < MAX_TABLE_ID, f"table_ids[{i}] = {ids[i]} must be in [0, {MAX_TABLE_ID})")
            record[Column.table_id] = ids[i]

    def _one_after_another(self, lengths: list[int], column: Column) -> list[int]:
        """Where parts start that lie one after the other; those of one table, which has one state, together."""
        tables: dict[int, int] = {}
        starts, end = [], 0
        for i, length in enumerate(lengths):
            table = self.records[i][Column.row_offset] if column == Column.state_offset else i
            start = tables.setdefault(table, end) if length else end
            starts.append(start)
            end = max(end, start + length)
        return starts

    def place_shards(
        self,
        table_rows: Sequence[int] | None,
        first_rows: Sequence[int] | None,
        first_columns: Sequence[int] | None,
    ) -> None:
        """Where the parts are in whole tables."""
        size = len(self.records)
        firsts = _sized(first_rows, size, "first_rows", "parts") or [0] * size
        columns = _sized(first_columns, size, "first_columns", "parts") or [0] * size
        least = [first + r[Column.num_embeddings] for first, r in zip(firsts, self.records, strict=True)]
        whole = _sized(table_rows, size, "table_rows", "parts") or least
        for i, record in enumerate(self.records):
            _check(firsts[i] >= 0, f"first_rows[{i}] = {firsts[i]} must not be negative")
            good = whole[i] >= least[i]
            _check(good, f"table_rows[{i}] = {whole[i]} must be at least {least[i]}, where the shard's rows end")
            block = 16 if self.formats[i].startswith("mx") else 4
            good = 0 <= columns[i] < 2**31 and columns[i] % block == 0
            _check(good, f"first_columns[{i}] = {columns[i]} must be a multiple of {block} in [0, 2^31)")
            record[Column.first_row], record[Column.first_column] = firsts[i], columns[i]
            record[Column.table_rows] = whole[i]

    def place_columns(self) -> None:
        """Columns of the output, which follow one another; parts that are added or multiplied share them."""
        column = 0
        self.widths = []
        for first, last in itertools.pairwise(self.starts):
            start = column
            for record in self.records[first:last]:
                record[Column.column], record[Column.part_column] = column, column - start
                if record[Column.combine] == 0:
                    column += record[Column.embedding_dim]
            if self.records[first][Column.combine] != 0:
                column += self.records[first][Column.embedding_dim]
            self.widths.append(column - start)
        self.output_dim = column

    def say_of_features(self, name: str, flags: Sequence[bool] | None) -> None:
        """``mean`` or ``frozen``, of features."""
        given = _sized(flags, self.num_features, name, "features") or [False] * self.num_features
        for record in self.records:
            record[Column[name]] = int(bool(given[record[Column.feature]]))

    def place_cache(self, cache: CachePlaces | None) -> None:
        """Places of rows in a row cache."""
        if cache is None:
            return
        _check(1 <= cache.ways <= MAX_WAYS, f"cache.ways = {cache.ways} must be in [1, {MAX_WAYS}]")
        for name, column in (
            ("sets", Column.cache_sets),
            ("first_sets", Column.cache_first_set),
            ("row_offsets", Column.cache_row_offset),
        ):
            numbers = _sized(getattr(cache, name), len(self.records), f"cache.{name}", "parts") or []
            for record, number in zip(self.records, numbers, strict=True):
                record[column] = number
        for i, record in enumerate(self.records):
            sets, first, f = (record[c] for c in (Column.cache_sets, Column.cache_first_set, Column.feature))
            _check(sets >= 0, f"cache.sets[{i}] = {sets} must not be negative")
            _check(sets == 0 or first >= 0, f"cache.first_sets[{i}] = {first} must not be negative")
            alone = self.starts[f + 1] - self.starts[f] == 1
            several = f"feature {f} has several parts, whose rows are not cached"
            _check(sets == 0 or alone, f"cache.sets[{i}] = {sets} must be 0: {several}")
        self._check_cache_apart(cache.ways)

    def _check_cache_apart(self, ways: int) -> None:
        """Tables share their sets, and the memory of these, or have none in common."""

        def extent(i: int) -> tuple[int, int, int, int, int]:
            r = self.records[i]
            first, dim = r[Column.cache_first_set] * ways, r[Column.embedding_dim]
            last = first + r[Column.cache_sets] * ways
            offset = r[Column.cache_row_offset]
            return first, last, offset + first * dim, offset + last * dim, dim

        cached = [i for i, r in enumerate(self.records) if r[Column.cache_sets] > 0]
        for i in cached:
            begin = extent(i)[2]
            _check(begin >= 0, f"cache.row_offsets[{i}]: its first slot starts at element {begin} of cache_rows")
        for a, b in itertools.pairwise(sorted(cached, key=extent)):
            x, y = extent(a), extent(b)
            rule = "tables of one width share all of their sets or none, others none"
            good = x == y or x[1] <= y[0]
            _check(good, f"cache.first_sets[{b}]: its sets are some of those of part {a}: {rule}")
        for a, b in itertools.pairwise(sorted(cached, key=lambda i: extent(i)[2])):
            good = extent(a) == extent(b) or extent(a)[3] <= extent(b)[2]
            _check(good, f"cache.row_offsets[{b}]: its slots lie in the memory of those of part {a}")

    def check_shared(self) -> None:
        """Features share a whole table, or nothing."""
        same = (
            *(Column.row_offset, Column.weight_offset, Column.num_embeddings, Column.embedding_dim),
            *(Column.format, Column.table_id),
        )
        tables: dict[tuple[int, ...], int] = {}
        for i, record in enumerate(self.records):
            if record[Column.num_embeddings] == 0:
                continue  # occupies nothing
            first = tables.setdefault(tuple(record[c] for c in same), i)
            if first != i:
                self._check_same_table(first, i)
        for f, (start, end) in enumerate(itertools.pairwise(self.starts)):
            self._check_different_tables(f, start, end)
        held = list(tables.values())
        self._check_apart(held, Column.row_offset, "row_offsets", lambda r, _: r[Column.num_embeddings])
        self._check_apart(
            held, Column.weight_offset, "weight_offsets", lambda r, i: r[Column.num_embeddings] * self._row_bytes(i)
        )
        self._check_apart(
            held,
            Column.state_offset,
            "state_offsets",
            lambda r, _: r[Column.num_embeddings] * r[Column.embedding_dim],
        )
        multiplied = {r[Column.row_offset] for r in self.records if r[Column.combine] == 2 and r[Column.num_embeddings]}
        for record in self.records:
            record[Column.multiplied] = int(record[Column.row_offset] in multiplied)

    def order_by_row(self) -> None:
        """``by_row``: the parts by their rows; those of empty tables, which occupy nothing, come first."""

        def key(i: int) -> tuple[bool, int, int]:
            return self.records[i][Column.num_embeddings] > 0, self.records[i][Column.row_offset], i

        for record, part in zip(self.records, sorted(range(len(self.records)), key=key), strict=True):
            record[Column.by_row] = part

    def _check_same_table(self, first: int, i: int) -> None:
        for column, name in (
            (Column.state_offset, "state_offsets"),
            (Column.first_row, "first_rows"),
            (Column.first_column, "first_columns"),
            (Column.cache_sets, "cache.sets"),
            (Column.cache_first_set, "cache.first_sets"),
            (Column.cache_row_offset, "cache.row_offsets"),
        ):
            here, there = self.records[i][column], self.records[first][column]
            _check(
                here == there,
                f"{name}[{i}] = {here} must be {there}, that of {self._name(first)}, which reads the same table",
            )

    def _check_different_tables(self, f: int, start: int, end: int) -> None:
        seen: dict[int, int] = {}
        for i in range(start, end):
            row = self.records[i][Column.row_offset]
            if self.records[i][Column.num_embeddings] == 0:
                continue
            rule = "the parts of a feature must read different tables"
            _check(
                row not in seen,
                f"row_offsets[{i}] = {row}, of {self._name(i)}, is that of its part {seen.get(row, 0)}: {rule}",
            )
            seen[row] = i - start

    def _check_apart(self, parts: list[int], column: Column, name: str, length) -> None:
        for a, b in itertools.pairwise(sorted(parts, key=lambda i: (self.records[i][column], i))):
            x, y = self.records[a], self.records[b]
            here = y[column] // (1 if self.is_bytes or column != Column.weight_offset else 4)
            overlaps = f"{name}[{b}] = {here} lies in the table of {self._name(a)}"
            _check(x[column] + length(x, a) <= y[column], f"{overlaps}: features share a whole table or nothing")

    def sizes(self, widest: int | None, num_rows: int | None, cache: CachePlaces | None) -> list[int]:
        """layout_sizes."""
        least = max(self.widths, default=0)
        wide = least if widest is None else widest
        _check(wide >= least, f"widest_feature = {wide} must be {least}, the most columns of a feature, or more")
        rows = max((r[Column.row_offset] + r[Column.num_embeddings] for r in self.records), default=0)
        above = rows if num_rows is None else num_rows
        most = "the most of row_offsets + num_embeddings"
        _check(above >= rows, f"num_rows = {above} must be {rows}, {most}, or more")
        flags = {
            Flag.any_mean: any(r[Column.mean] for r in self.records),
            Flag.multiplies: any(r[Column.combine] == 2 for r in self.records),
            Flag.bytes: self.is_bytes,
            Flag.maps_ids: any(r[Column.divisor] != 1 or r[Column.modulus] < r[Column.id_limit] for r in self.records),
        }
        sizes = {
            Size.num_features: self.num_features,
            Size.output_dim: self.output_dim,
            Size.widest_feature: wide,
            Size.num_rows: above,
            Size.max_embedding_dim: max((r[Column.embedding_dim] for r in self.records), default=0),
            Size.most_parts: max((b - a for a, b in itertools.pairwise(self.starts)), default=1),
            Size.cache_ways: 0 if cache is None else cache.ways,
            Size.formats: sum({1 << r[Column.format] for r in self.records}) or 1,
            Size.flags: sum(flag for flag, given in flags.items() if given),
        }
        return [sizes[size] for size in Size]
