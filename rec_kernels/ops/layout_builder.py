"""Builds the records of a layout for ``table_layout``, column by column."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rec_kernels.ops.layout_overlaps import check_cache_apart, check_tables
from rec_kernels.ops.layout_records import (
    BAG_FORMATS,
    COMBINE,
    EVERY_ID,
    EVERY_OTHER_ID,
    MAX_ELEMENTS,
    MAX_NOISY_ROWS,
    MAX_PARTS,
    MAX_TABLE_ID,
    MAX_WAYS,
    CachePlaces,
    Column,
    Flag,
    IdPartitions,
    Shards,
    Size,
    check,
    check_kind,
    flags,
    integer,
    integers,
    sized,
    sized_integers,
)
from rec_kernels.ops.row_formats import ROW_FORMATS, row_bytes


class Builder:
    """Builder of a layout's records, one column at a time; it checks each argument as it writes it."""

    def __init__(
        self, rows: list[int], dims: list[int], partitions: IdPartitions | None, formats: Sequence[str] | None
    ) -> None:
        count = len(dims)
        sized(rows, count, "num_embeddings", "embedding_dims")
        check_kind(partitions, IdPartitions, "partitions")
        self.records = [[0] * len(Column) for _ in range(count)]
        self.is_bytes = formats is not None
        self.formats = ["fp32"] * count if formats is None else sized(formats, count, "formats", "parts")
        self.starts = self._part_starts(partitions, count)
        self.partitioned = partitions is not None
        self.ways = 0  # slots per set of the row cache; 0 without a cache
        for i, record in enumerate(self.records):
            check(1 <= dims[i] < 2**31, f"embedding_dims[{i}] = {dims[i]} must be in [1, 2^31)")
            check(rows[i] >= 0, f"num_embeddings[{i}] = {rows[i]} must not be negative")
            most = min(MAX_NOISY_ROWS, MAX_ELEMENTS // dims[i])
            check(
                rows[i] <= most,
                f"num_embeddings[{i}] = {rows[i]} must be at most {most} for embedding_dims[{i}] = {dims[i]}",
            )
            name = self.formats[i]
            known = ", ".join(BAG_FORMATS)
            check(name in BAG_FORMATS, f'formats[{i}] = "{name}" must be one of {known}')
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
    def _part_starts(partitions: IdPartitions | None, count: int) -> list[int]:
        if partitions is None:
            return list(range(count + 1))
        starts = integers(partitions.starts, "partitions.starts")
        check(len(starts) > 0, "partitions.starts must have num_features + 1 elements, got none")
        check(starts[0] == 0, f"partitions.starts[0] = {starts[0]} must be 0")
        for f, (before, here) in enumerate(itertools.pairwise(starts), 1):
            good = before < here <= before + MAX_PARTS
            limits = f"1 to {MAX_PARTS} greater than partitions.starts[{f - 1}] = {before}"
            check(good, f"partitions.starts[{f}] = {here} must be {limits}")
        last = f"partitions.starts[{len(starts) - 1}] = {starts[-1]}"
        check(starts[-1] == count, f"{last} must be {count}, the length of embedding_dims")
        return starts

    def _name(self, i: int) -> str:
        feature = self.records[i][Column.feature]
        part = f"part {i - self.starts[feature]} of " if self.partitioned else ""
        return f"{part}feature {feature}"

    def _row_bytes(self, i: int) -> int:
        return row_bytes(self.formats[i], self.records[i][Column.embedding_dim])

    def place_features(self, partitions: IdPartitions | None) -> None:
        """Writes id limits, divisors and moduli, which map a feature's ids to rows."""
        if partitions is None:
            for record in self.records:
                rows = record[Column.num_embeddings]
                record[Column.id_limit], record[Column.divisor], record[Column.modulus] = rows, 1, max(rows, 1)
            return
        divisors = sized_integers(partitions.divisors, len(self.records), "partitions.divisors", "parts")
        moduli = sized_integers(partitions.moduli, len(self.records), "partitions.moduli", "parts")
        limits = self._id_limits(partitions)
        combine = sized(partitions.combine, self.num_features, "partitions.combine", "features")
        for i, record in enumerate(self.records):
            f = record[Column.feature]
            how = combine[f]
            number = COMBINE.index(how) if how in COMBINE else how
            check(number in (0, 1, 2), f"partitions.combine[{f}] = {how} must be concat (0), add (1) or mult (2)")
            record[Column.divisor], record[Column.modulus] = divisors[i], moduli[i]
            record[Column.id_limit] = limits[f]
            self._check_rows(i, record)
            record[Column.combine] = int(number) if self.starts[f + 1] - self.starts[f] > 1 else 0
        for f in range(self.num_features):
            self._check_parts(f)

    def _id_limits(self, partitions: IdPartitions) -> list[int]:
        given = sized(partitions.id_limits, self.num_features, "partitions.id_limits", "features")
        limits = [EVERY_ID if x is None else integer(x, f"partitions.id_limits[{f}]") for f, x in enumerate(given)]
        for f, limit in enumerate(limits):
            check(given[f] is None or limit >= 0, f"partitions.id_limits[{f}] = {limit} must not be negative")
        return limits

    def _check_rows(self, i: int, record: list[int]) -> None:
        f, divisor, modulus, limit = (
            record[c] for c in (Column.feature, Column.divisor, Column.modulus, Column.id_limit)
        )
        check(divisor >= 1, f"partitions.divisors[{i}] = {divisor} must be at least 1")
        check(modulus >= 1, f"partitions.moduli[{i}] = {modulus} must be at least 1, even for a table without rows")
        every = limit == EVERY_ID
        alone = self.starts[f + 1] - self.starts[f] == 1
        shape = f"feature {f}, which accepts every integer, must have one part with divisor 1"
        check(not every or (alone and divisor == 1), f"partitions.id_limits[{f}] = None: {shape}")
        rows, have = modulus if every else min(modulus, -(-limit // divisor)), record[Column.num_embeddings]
        parts = f"partitions.divisors[{i}] = {divisor} and partitions.moduli[{i}] = {modulus}"
        lead = f"{parts} map {'all integers' if every else f'ids below {limit}'} to"
        check(rows <= have, f"num_embeddings[{i}] = {have} must be at least {rows}, the rows that {lead}")

    def _check_parts(self, f: int) -> None:
        first, *others = range(self.starts[f], self.starts[f + 1])
        a = self.records[first]
        for i in others:
            b = self.records[i]
            shape, of_first = ((r[Column.embedding_dim], ROW_FORMATS[r[Column.format]]) for r in (b, a))
            here = f"embedding_dims[{i}] = {shape[0]} and format {shape[1]}, of {self._name(i)},"
            there = (
                f"those of its part 0, {of_first[0]} and {of_first[1]}, because partitions.combine[{f}] adds or "
                "multiplies them"
            )
            check(a[Column.combine] == 0 or shape == of_first, f"{here} must be {there}")

    def place_tables(
        self,
        weight_offsets: Sequence[int] | None,
        row_offsets: Sequence[int] | None,
        state_offsets: Sequence[int] | None,
        table_ids: Sequence[int] | None,
    ) -> None:
        """Writes the tables' offsets in weights, linear rows and state, and the table ids."""
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
            if given is None:
                starts = self._consecutive_starts(lengths, column)
            else:
                starts = sized_integers(given, size, name, "parts")
            bits = 60 if column == Column.weight_offset and not self.is_bytes else 62
            what = f"num_embeddings are too large: the default {name}" if given is None else name
            for i, record in enumerate(self.records):
                here, above, most = starts[i], 2**bits, f"2^{bits}"
                if column == Column.row_offset:
                    above, most = 2**63 - rows[i], f"2^63 - num_embeddings[{i}]"
                check(0 <= here < above, f"{what}[{i}] = {here} must be in [0, {most})")
                record[column] = here
        for i, record in enumerate(self.records):
            record[Column.weight_offset] *= element
            odd = self.formats[i] == "fp32" and record[Column.weight_offset] % 4
            at = f"weight_offsets[{i}] = {record[Column.weight_offset] // element}"
            check(not odd, f'{at} must be a multiple of 4 for format "fp32"')
        ids = [0] * size if table_ids is None else sized_integers(table_ids, size, "table_ids", "parts")
        for i, record in enumerate(self.records):
            check(0 <= ids[i] < MAX_TABLE_ID, f"table_ids[{i}] = {ids[i]} must be in [0, {MAX_TABLE_ID})")
            record[Column.table_id] = ids[i]

    def _consecutive_starts(self, lengths: list[int], column: Column) -> list[int]:
        """Returns the starts of consecutive parts; parts of one table share its state, so they have the same start."""
        tables: dict[int, int] = {}
        starts, end = [], 0
        for i, length in enumerate(lengths):
            table = self.records[i][Column.row_offset] if column == Column.state_offset else i
            start = tables.setdefault(table, end) if length else end
            starts.append(start)
            end = max(end, start + length)
        return starts

    def place_shards(self, shards: Shards | None) -> None:
        """Writes the position of each part within its unsharded table."""
        check_kind(shards, Shards, "shards")
        if shards is None:
            for record in self.records:
                record[Column.table_rows] = record[Column.num_embeddings]
            return
        size = len(self.records)
        firsts = sized_integers(shards.first_rows, size, "shards.first_rows", "parts")
        columns = sized_integers(shards.first_columns, size, "shards.first_columns", "parts")
        whole = sized_integers(shards.table_rows, size, "shards.table_rows", "parts")
        least = [first + r[Column.num_embeddings] for first, r in zip(firsts, self.records, strict=True)]
        for i, record in enumerate(self.records):
            check(firsts[i] >= 0, f"shards.first_rows[{i}] = {firsts[i]} must not be negative")
            good = whole[i] >= least[i]
            check(good, f"shards.table_rows[{i}] = {whole[i]} must be at least {least[i]}, the end of the shard's rows")
            good = whole[i] <= MAX_NOISY_ROWS
            check(good, f"shards.table_rows[{i}] = {whole[i]} must be at most 2^44, the limit of stochastic rounding")
            block = 16 if self.formats[i].startswith("mx") else 4
            good = 0 <= columns[i] < 2**31 and columns[i] % block == 0
            check(good, f"shards.first_columns[{i}] = {columns[i]} must be a multiple of {block} in [0, 2^31)")
            record[Column.first_row], record[Column.first_column] = firsts[i], columns[i]
            record[Column.table_rows] = whole[i]

    def place_columns(self) -> None:
        """Writes consecutive output columns; parts that are added or multiplied share theirs."""
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

    def set_flags(self, **given: Sequence[bool] | None) -> None:
        """Writes the per-feature flags ``mean`` and ``frozen`` to the parts of each feature."""
        for name, values in given.items():
            by_feature = [False] * self.num_features if values is None else flags(values, self.num_features, name)
            for record in self.records:
                record[Column[name]] = int(by_feature[record[Column.feature]])

    def set_padding(self, padding_idx: Sequence[int | None] | None) -> None:
        """Writes each feature's padding id; call it after ``place_features``, which writes the id limits."""
        count = self.num_features
        given = [None] * count if padding_idx is None else sized(padding_idx, count, "padding_idx", "features")
        ids = [-1 if x is None else integer(x, f"padding_idx[{f}]") for f, x in enumerate(given)]
        for record in self.records:
            f, limit = record[Column.feature], record[Column.id_limit]
            record[Column.padding_idx] = ids[f]
            if given[f] is None:
                continue
            good = limit == EVERY_ID or 0 <= ids[f] < limit
            check(good, f"padding_idx[{f}] = {ids[f]} must be None or an id of the feature, in [0, {limit})")
            if limit == EVERY_ID:
                record[Column.id_limit] = EVERY_OTHER_ID

    def place_cache(self, cache: CachePlaces | None) -> None:
        """Writes the cache sets of each part's rows."""
        check_kind(cache, CachePlaces, "cache")
        if cache is None:
            return
        self.ways = integer(cache.ways, "cache.ways")
        check(1 <= self.ways <= MAX_WAYS, f"cache.ways = {self.ways} must be in [1, {MAX_WAYS}]")
        for name, column in (
            ("sets", Column.cache_sets),
            ("first_sets", Column.cache_first_set),
            ("row_offsets", Column.cache_row_offset),
        ):
            numbers = sized_integers(getattr(cache, name), len(self.records), f"cache.{name}", "parts")
            for record, number in zip(self.records, numbers, strict=True):
                record[column] = number
        for i, record in enumerate(self.records):
            sets, first, f = (record[c] for c in (Column.cache_sets, Column.cache_first_set, Column.feature))
            check(sets >= 0, f"cache.sets[{i}] = {sets} must not be negative")
            check(sets == 0 or first >= 0, f"cache.first_sets[{i}] = {first} must not be negative")
            alone = self.starts[f + 1] - self.starts[f] == 1
            several = f"feature {f} has several parts, which cannot be cached"
            check(sets == 0 or alone, f"cache.sets[{i}] = {sets} must be 0: {several}")
        check_cache_apart(self.records, self.ways)

    def check_tables(self) -> None:
        """Checks which parts share memory, and marks every part of a table whose rows are multiplied."""
        check_tables(self.records, self._name, 1 if self.is_bytes else 4)
        multiplied = {r[Column.row_offset] for r in self.records if r[Column.combine] == 2 and r[Column.num_embeddings]}
        for record in self.records:
            record[Column.multiplied] = int(record[Column.row_offset] in multiplied)

    def order_by_row(self) -> None:
        """Writes ``by_row``: the parts sorted by linear row; empty tables come first."""

        def key(i: int) -> tuple[bool, int, int]:
            return self.records[i][Column.num_embeddings] > 0, self.records[i][Column.row_offset], i

        for record, part in zip(self.records, sorted(range(len(self.records)), key=key), strict=True):
            record[Column.by_row] = part

    def sizes(self, widest: int | None, num_rows: int | None) -> list[int]:
        """Returns ``layout_sizes``."""
        least = max(self.widths, default=0)
        wide = least if widest is None else integer(widest, "widest_feature")
        check(wide >= least, f"widest_feature = {wide} must be at least {least}, the columns of the widest feature")
        rows = max((r[Column.row_offset] + r[Column.num_embeddings] for r in self.records), default=0)
        bound = rows if num_rows is None else integer(num_rows, "num_rows")
        most = "the maximum of row_offsets + num_embeddings"
        hashes = any(r[Column.id_limit] in (EVERY_ID, EVERY_OTHER_ID) for r in self.records)
        check(bound >= rows, f"num_rows = {bound} must be at least {rows}, {most}")
        flag_values = {
            Flag.any_mean: any(r[Column.mean] for r in self.records),
            Flag.multiplies: any(r[Column.combine] == 2 for r in self.records),
            Flag.bytes: self.is_bytes,
            Flag.pads: any(r[Column.padding_idx] != -1 or r[Column.id_limit] == EVERY_OTHER_ID for r in self.records),
            Flag.hashes: hashes,
            Flag.maps_ids: hashes
            or any(r[Column.divisor] != 1 or r[Column.modulus] < r[Column.id_limit] for r in self.records),
        }
        sizes = {
            Size.num_features: self.num_features,
            Size.output_dim: self.output_dim,
            Size.widest_feature: wide,
            Size.num_rows: bound,
            Size.max_embedding_dim: max((r[Column.embedding_dim] for r in self.records), default=0),
            Size.most_parts: max((b - a for a, b in itertools.pairwise(self.starts)), default=1),
            Size.cache_ways: self.ways,
            Size.formats: sum({1 << r[Column.format] for r in self.records}) or 1,
            Size.flags: sum(flag for flag, is_set in flag_values.items() if is_set),
        }
        return [sizes[size] for size in Size]
