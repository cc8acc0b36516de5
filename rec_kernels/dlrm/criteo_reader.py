"""Rows of files in Criteo's format, in blocks: tab-separated text in, arrays out, and where it is malformed."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from io import BufferedIOBase
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import csv
from tqdm import tqdm

from rec_kernels.dlrm.data import DataError

INTEGERS = tuple(f"I{number}" for number in range(1, 14))
CATEGORIES = tuple(f"C{number}" for number in range(1, 27))
COLUMNS = ("label", *INTEGERS, *CATEGORIES)
RAW = np.dtype([("value", "<u4"), ("blank", "?")])  # a category as it is in the file
BLOCK = 1 << 20  # bytes of text; larger ones are slower and take more memory. No line may be longer.
SHOWN = 40  # bytes of an offending text
INT64 = range(-(2**63), 2**63)

_NIBBLE = np.full(256, 255, dtype=np.uint8)
_NIBBLE[np.frombuffer(b"0123456789abcdef", dtype=np.uint8)] = np.arange(16)
_NIBBLE[np.frombuffer(b"ABCDEF", dtype=np.uint8)] = np.arange(10, 16)


class Rows(NamedTuple):
    """n rows.

    Args:
        label: float32 [n], 0 or 1.
        dense: float32 [n, 13], log(x + 1), blanks and negative numbers 0.
        categories: 26 arrays RAW [n], value 0 where blank.
    """

    label: np.ndarray
    dense: np.ndarray
    categories: list[np.ndarray]


class _MalformedError(ValueError):
    """A block has a field that pyarrow lets pass and the format does not."""


def read_rows(files: list[Path], *, progress: bool = False) -> Iterator[Rows]:
    """The rows of ``files``, one file after the other, in blocks of about a megabyte of text.

    Integers may have spaces around them; pyarrow also takes hexadecimal ones with 0x.

    Args:
        files: plain, or gzip if the name ends in .gz.
        progress: show a progress bar, in bytes of the files.

    Raises:
        DataError: a file is empty, damaged or malformed; says which, and where.
    """
    total = sum(file.stat().st_size for file in files)
    with tqdm(total=total, desc="reading", unit="B", unit_scale=True, disable=not progress) as bar:
        for file in files:
            yield from _read_file(file, bar)


def _read_file(file: Path, bar: tqdm) -> Iterator[Rows]:
    done, before = 0, bar.n
    with ExitStack() as stack:
        source = stack.enter_context(pa.OSFile(str(file)))
        text = stack.enter_context(pa.CompressedInputStream(source, "gzip")) if _is_gzip(file) else source
        try:
            for block in _open(text):
                rows = _convert(block)
                done += len(rows.label)
                bar.update(before + source.tell() - bar.n)
                yield rows
        except (pa.ArrowInvalid, _MalformedError, OSError) as error:
            raise _explain(file, done, error) from error


def _open(text: pa.NativeFile) -> csv.CSVStreamingReader:
    return csv.open_csv(
        text,
        # Threads would not help: the blocks are read ahead anyway, and the rest is quicker than what is done with them.
        read_options=csv.ReadOptions(column_names=COLUMNS, block_size=BLOCK, use_threads=False),
        parse_options=csv.ParseOptions(
            delimiter="\t", quote_char=False, double_quote=False, escape_char=False, ignore_empty_lines=False
        ),
        convert_options=csv.ConvertOptions(
            column_types={name: pa.binary() if name in CATEGORIES else pa.int64() for name in COLUMNS},
            null_values=[""],
            strings_can_be_null=False,
        ),
    )


def _convert(block: pa.RecordBatch) -> Rows:
    label, *columns = block.columns
    label = label.fill_null(-1).to_numpy()
    if not ((label == 0) | (label == 1)).all():
        raise _MalformedError("label")
    dense = np.empty((len(label), len(INTEGERS)), dtype=np.float32)
    for number, column in enumerate(columns[: len(INTEGERS)]):
        dense[:, number] = np.log1p(np.maximum(column.fill_null(0).to_numpy(), 0))
    return Rows(label.astype(np.float32), dense, [_categories(column) for column in columns[len(INTEGERS) :]])


def _categories(column: pa.BinaryArray) -> np.ndarray:
    """The numbers that the texts of ``column`` spell in hexadecimal, RAW [n]."""
    _, offsets, content = column.buffers()
    ends = np.frombuffer(offsets, dtype=np.int32)[column.offset : column.offset + len(column) + 1]
    text = np.frombuffer(content, dtype=np.uint8) if content is not None else np.empty(0, dtype=np.uint8)
    lengths = np.diff(ends)
    filled = lengths > 0
    if (lengths > 8).any():
        raise _MalformedError("category of more than 8 digits")
    if (lengths[filled] == 8).all():
        digits = text[ends[0] : ends[-1]].reshape(-1, 8)
    else:
        index = ends[1:][filled, None] + np.arange(-8, 0)
        inside = index >= ends[:-1][filled, None]
        digits = np.where(inside, text[np.maximum(index, 0)], ord("0"))
    nibbles = _NIBBLE[digits]
    if (nibbles > 15).any():
        raise _MalformedError("category with another character")
    raw = np.zeros(len(column), dtype=RAW)
    raw["value"][filled] = ((nibbles[:, 0::2] << 4) | nibbles[:, 1::2]).view(">u4")[:, 0]
    raw["blank"] = ~filled
    return raw


def _explain(file: Path, done: int, error: Exception) -> DataError:
    """What is wrong with ``file`` after its first ``done`` lines, found by reading it once more, line by line."""
    number = 0
    try:
        with _open_lines(file) as lines:
            for number, line in enumerate(iter(lambda: lines.readline(BLOCK), b""), 1):
                problem = _problem(line) if number > done else None
                if problem:
                    return DataError(f"{file}, line {number}: {problem}")
    except (OSError, EOFError, zlib.error) as damage:
        return DataError(f"{file} is truncated or damaged after line {number}: {damage}")
    if number == 0:
        return DataError(f"{file} is empty, expected are lines of {len(COLUMNS)} columns separated by tabs")
    return DataError(f"{file} cannot be read after line {done}: {error}")


def _open_lines(file: Path) -> BufferedIOBase:
    return gzip.open(file, "rb") if _is_gzip(file) else file.open("rb")


def _is_gzip(file: Path) -> bool:
    return file.suffix == ".gz"


def _problem(line: bytes) -> str | None:
    """What is wrong with a line, or None."""
    if len(line) == BLOCK:
        return f"it has {BLOCK} bytes or more: {_shown(line)}"
    fields = line.rstrip(b"\r\n").split(b"\t")
    if len(fields) != len(COLUMNS):
        return f"{len(fields)} columns, expected {len(COLUMNS)} separated by tabs: {_shown(line.rstrip())}"
    for number, (name, field) in enumerate(zip(COLUMNS, fields, strict=True), 1):
        where = f"column {number} ({name}) is {_shown(field)}"
        if name == "label":
            if field.strip(b" ") not in (b"0", b"1"):
                return f"{where}, allowed are 0 and 1"
        elif name in INTEGERS:
            if (field and not re.fullmatch(rb" *-?[0-9]{1,19} *", field)) or int(field or b"0") not in INT64:
                return f"{where}, allowed are whole numbers of 64 bits, or nothing"
        elif not re.fullmatch(rb"[0-9A-Fa-f]{0,8}", field):
            return f"{where}, allowed are up to 8 hexadecimal digits, or nothing"
    return None


def _shown(text: bytes) -> str:
    return repr(text[:SHOWN].decode("latin-1")) + ("..." if len(text) > SHOWN else "")
