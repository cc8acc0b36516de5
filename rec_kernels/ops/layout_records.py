"""Columns of a layout's records, and checks of its arguments; csrc/embedding_bag/table_layout.h is the contract."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, SupportsIndex, TypeAlias, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
#: One record per part.
Records: TypeAlias = "list[list[int]]"

#: The dtypes of ids, offsets and lengths.
ID_DTYPES = (torch.int32, torch.int64)
#: The row formats that tables can have.
BAG_FORMATS = ("fp32", "fp16", "bf16", "int8", "int4", "mx9", "mx6", "mx4")
#: Combinations of an id's parts, by their code in the records.
COMBINE = ("concat", "add", "mult")
#: The most parts of an id that the kernels combine.
MAX_PARTS = 4
MAX_TABLE_ID = 65536
MAX_WAYS = 1024
#: The counter of the random number generator of stochastic rounding has 44 bits for the row.
MAX_NOISY_ROWS = 2**44
#: Maximum elements of a table; it keeps its bytes and its offset below 2^62.
MAX_ELEMENTS = 2**59
LARGEST = 2**63 - 1

#: The columns of a layout: csrc/embedding_bag/table_layout.h, struct TablePart.
Column = IntEnum(
    "Column",
    "weight_offset row_offset num_embeddings table_rows embedding_dim column part_column table_id state_offset feature "
    "part_start id_limit padding_idx divisor modulus combine format first_row first_column mean frozen multiplied "
    "cache_sets cache_first_set cache_row_offset by_row",
    start=0,
)
#: ``id_limit`` of features that accept every integer, and every integer but ``padding_idx``.
EVERY_ID = -1
EVERY_OTHER_ID = -2
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
    pads = 16
    hashes = 32


@dataclass(frozen=True)
class IdPartitions:
    """Mapping of an id to rows of several tables: in part p, row ``id // divisors[p] % moduli[p]``.

    Attributes:
        starts: [F + 1] feature f has parts [starts[f], starts[f + 1]), at least one and at most 4.
        divisors, moduli: [P] divisor and modulus of each part.
        id_limits: [F] ids of the feature are in [0, id_limit). None, for a feature of one part with divisor 1: every
            integer is an id, including negative ones, and its row is ``id % modulus`` as in Python and torch.
        combine: [F] how the rows of an id's parts are combined: "concat" (or 0), "add" (1), "mult" (2).
    """

    starts: Sequence[int]
    divisors: Sequence[int]
    moduli: Sequence[int]
    id_limits: Sequence[int | None]
    combine: Sequence[str | int]


@dataclass(frozen=True)
class Shards:
    """Position of each part within its unsharded table, which determines its random numbers in stochastic rounding.

    Attributes:
        table_rows: [P] rows of the unsharded table.
        first_rows: [P] the shard's first row there.
        first_columns: [P] the shard's first column there, a multiple of 4, and of 16 for MX formats.
    """

    table_rows: Sequence[int]
    first_rows: Sequence[int]
    first_columns: Sequence[int]


@dataclass(frozen=True)
class CachePlaces:
    """Sets and slots of the tables' rows in a row cache (docs/numerics.md, "Row cache").

    Attributes:
        ways: slots per set.
        sets: [parts] number of sets for the rows of each part's table; 0: the table is not cached.
        first_sets: [parts] first of these sets.
        row_offsets: [parts] element of ``cache_rows`` at which slot 0 would start if all slots had this table's width.
    """

    ways: int
    sets: Sequence[int]
    first_sets: Sequence[int]
    row_offsets: Sequence[int]


def check(good: bool, message: str) -> None:
    """Raises ValueError(message) unless ``good``."""
    if not good:
        raise ValueError(message)


def check_kind(value: object, kind: type, name: str) -> None:
    check(value is None or isinstance(value, kind), f"{name} = {value!r} must be an rk.{kind.__name__} or None")


def check_tensor(name: str, t: object) -> None:
    """Raises TypeError unless argument ``name`` is a tensor."""
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(t).__name__}")


def listed(values: Iterable[T] | None, name: str) -> list[T]:
    if not isinstance(values, Iterable) or getattr(values, "ndim", 1) == 0:  # a 0-dim tensor is an instance of Iterable
        raise ValueError(f"{name} = {values!r} must be a list, an array or a tensor of one dimension")
    return list(values)


def sized(values: Iterable[T] | None, size: int, name: str, what: str) -> list[T]:
    found = listed(values, name)
    check(len(found) == size, f"{name} must have an element for each of the {size} {what}, got {len(found)}")
    return found


def _is_flag(value: object) -> bool:
    return isinstance(value, bool) or getattr(value, "dtype", None) == torch.bool


def integer(value: SupportsIndex, name: str) -> int:
    """Converts an integer of any type to a Python int; booleans are refused."""
    try:
        number = None if _is_flag(value) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise ValueError(f"{name} = {value!r} must be an integer")
    check(number <= LARGEST, f"{name} = {number} must be below 2^63")
    check(number >= -LARGEST - 1, f"{name} = {number} must be at least -2^63")
    return number


def integer_or_symbol(value: Any, name: str) -> Any:
    """Converts like ``integer``, but returns a torch.SymInt unchanged."""
    return value if type(value) is int or isinstance(value, torch.SymInt) else integer(value, name)


def integers(values: Iterable[SupportsIndex] | None, name: str) -> list[int]:
    """Converts a list, an array or a tensor of integers to Python ints."""
    return [integer(value, f"{name}[{i}]") for i, value in enumerate(listed(values, name))]


def sized_integers(values: Iterable[SupportsIndex] | None, size: int, name: str, what: str) -> list[int]:
    return integers(sized(values, size, name, what), name)


def flags(values: Iterable[object] | None, features: int, name: str) -> list[bool]:
    """Converts a list, an array or a tensor of booleans, or of 0 and 1, to one bool per feature."""
    found = []
    given: list[Any] = sized(values, features, name, "features")
    for f, value in enumerate(given):
        number = value.item() if getattr(value, "ndim", 1) == 0 else value
        check(isinstance(number, int) and number in (0, 1), f"{name}[{f}] = {value!r} must be True (1) or False (0)")
        found.append(bool(number))
    return found
