"""Checks that parts of a layout share tables and cache sets wholly or not at all."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TypeAlias

from rec_kernels.ops.layout_records import Column, Records, check
from rec_kernels.ops.row_formats import ROW_FORMATS, row_bytes

#: Returns the name of a part for messages.
NameOf: TypeAlias = Callable[[int], str]

#: The arguments of ``table_layout`` by which parts read one table.
_IDENTITY = {
    Column.num_embeddings: "num_embeddings",
    Column.embedding_dim: "embedding_dims",
    Column.format: "formats",
    Column.row_offset: "row_offsets",
    Column.weight_offset: "weight_offsets",
    Column.table_id: "table_ids",
}
#: Further arguments that describe a table, equal for all parts that read it.
_OF_TABLE = {
    Column.state_offset: "state_offsets",
    Column.table_rows: "shards.table_rows",
    Column.first_row: "shards.first_rows",
    Column.first_column: "shards.first_columns",
    Column.cache_sets: "cache.sets",
    Column.cache_first_set: "cache.first_sets",
    Column.cache_row_offset: "cache.row_offsets",
}
_ARGUMENTS = _IDENTITY | _OF_TABLE


def check_cache_apart(records: Records, ways: int) -> None:
    """Checks that tables share their sets and memory in the row cache wholly or not at all."""

    def extent(i: int) -> tuple[int, int, int, int, int]:
        r = records[i]
        first, dim = r[Column.cache_first_set] * ways, r[Column.embedding_dim]
        last = first + r[Column.cache_sets] * ways
        offset = r[Column.cache_row_offset]
        return first, last, offset + first * dim, offset + last * dim, dim

    cached = [i for i, r in enumerate(records) if r[Column.cache_sets] > 0]
    for i in cached:
        begin = extent(i)[2]
        check(
            begin >= 0,
            f"cache.row_offsets[{i}] places its first slot at element {begin} of cache_rows; it must be at least 0",
        )
    for a, b in itertools.pairwise(sorted(cached, key=extent)):
        x, y = extent(a), extent(b)
        rule = "tables of equal width share all of their sets or none, other tables none"
        good = x == y or x[1] <= y[0]
        check(
            good,
            f"cache.first_sets[{b}] = {records[b][Column.cache_first_set]}: its sets overlap those of part {a}: {rule}",
        )
    for a, b in itertools.pairwise(sorted(cached, key=lambda i: extent(i)[2])):
        good = extent(a) == extent(b) or extent(a)[3] <= extent(b)[2]
        check(
            good,
            f"cache.row_offsets[{b}]: its slots overlap those of part {a} in cache_rows; they must be the same or "
            "disjoint",
        )


def check_tables(records: Records, name_of: NameOf, element_bytes: int) -> None:
    """Checks that features share whole tables or nothing, and that the parts of a feature read different tables.

    Args:
        element_bytes: bytes of the unit of ``weight_offsets``.
    """
    tables: dict[tuple[int, ...], int] = {}
    parts_by_row: dict[tuple[int, int], int] = {}
    for i, record in enumerate(records):
        if record[Column.num_embeddings] == 0:
            continue  # occupies nothing
        first = tables.setdefault(tuple(record[c] for c in _IDENTITY), i)
        if first != i:
            _check_same_table(records, name_of, first, i)
        feature, row = record[Column.feature], record[Column.row_offset]
        other = parts_by_row.setdefault((feature, row), i) - records[feature][Column.part_start]
        rule = "the parts of a feature must read different tables"
        of_part = f"row_offsets[{i}] = {row}, of {name_of(i)}, is also that of the feature's part {other}"
        check(parts_by_row[feature, row] == i, f"{of_part}: {rule}")
    for column in (Column.row_offset, Column.weight_offset, Column.state_offset):
        for a, b in _overlapping(records, list(tables.values()), column):
            here, there = (_argument_value(column, records[i][column], element_bytes) for i in (b, a))
            where = f"is inside the table of {name_of(a)}"
            if here == there:
                where = f"is also that of {name_of(a)}, but {_differences(records, a, b, element_bytes)}"
            raise ValueError(f"{_ARGUMENTS[column]}[{b}] = {here} {where}: features must share whole tables or nothing")


def _differences(records: Records, a: int, b: int, element_bytes: int) -> str:
    """Lists the arguments in which two tables with the same start differ, with both values."""
    found = []
    for column in (*_IDENTITY, Column.state_offset):
        here, there = (_argument_value(column, records[i][column], element_bytes) for i in (b, a))
        if here != there:
            found.append(f"{_ARGUMENTS[column]}[{b}] = {here} differs from its {there}")
    return ", ".join(found)


def _argument_value(column: Column, number: int, element_bytes: int) -> int | str:
    if column == Column.format:
        return f'"{ROW_FORMATS[number]}"'
    return number // element_bytes if column == Column.weight_offset else number


def _check_same_table(records: Records, name_of: NameOf, first: int, i: int) -> None:
    for column, argument in _OF_TABLE.items():
        here, there = records[i][column], records[first][column]
        rule = f"that of {name_of(first)}, which reads the same table"
        check(here == there, f"{argument}[{i}] = {here} must be {there}, {rule}")


def _overlapping(records: Records, tables: list[int], column: Column) -> Iterator[tuple[int, int]]:
    """Yields neighbouring tables where the second starts before the end of the first."""

    def end(record: list[int]) -> int:
        rows, dim = record[Column.num_embeddings], record[Column.embedding_dim]
        widths = {
            Column.row_offset: 1,
            Column.weight_offset: row_bytes(ROW_FORMATS[record[Column.format]], dim),
            Column.state_offset: dim,
        }
        return record[column] + rows * widths[column]

    for a, b in itertools.pairwise(sorted(tables, key=lambda i: (records[i][column], i))):
        if end(records[a]) > records[b][column]:
            yield a, b
