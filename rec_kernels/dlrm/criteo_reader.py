"""Rows of files in Criteo's format, in blocks: tab-separated text in, arrays out, and where it is malformed."""

from __future__ import annotations

import re
from collections.abc import Iterator
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
EXPECTED = (
    f"expected are lines of up to {BLOCK} bytes: label (0 or 1), 13 whole numbers of 64 bits or blanks, 26 categories "
    "of up to 8 hexadecimal digits or blanks, separated by tabs"
)

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
    """Row ``row`` of a block has a field that pyarrow lets pass and the format does not."""

    def __init__(self, row: int, column: str, field: object):
        super().__init__(f"{column} is {'blank' if field is None else format(repr(field), '.60')}")
        self.row = row


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
    with pa.OSFile(str(file)) as source:
        try:
            for block in _open(pa.CompressedInputStream(source, "gzip") if file.suffix.lower() == ".gz" else source):
                rows = _convert(block)
                done += len(rows.label)
                bar.update(before + source.tell() - bar.n)
                yield rows
        except _MalformedError as error:
            raise DataError(f"{file}, Row #{done + error.row + 1}: {error}; {EXPECTED}") from error
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"{file}, {_placed(str(error), done)}; {EXPECTED}") from error


def _placed(text: str, done: int) -> str:
    """A message of pyarrow's with row and column in front, by our names; ``done``: rows that were read before."""
    if "straddl" in text:
        return f"behind row {done}: a line of more than {BLOCK} bytes"
    row, column = re.search(r"Row #\d+: ", text), re.search(r"In CSV column #(\d+): ", text)
    if row is None:
        return f"behind row {done}: {text}"
    name = f"{COLUMNS[int(column[1])]}: " if column else ""
    return f"{row[0]}{name}{text[row.end() :]}"


def _open(text: pa.NativeFile) -> csv.CSVStreamingReader:
    return csv.open_csv(
        text,
        # Threads would not help: the blocks are read ahead anyway, and the rest is quicker than what is done with them.
        # And without them, errors have the number of the row.
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
    labels = label.fill_null(-1).to_numpy()
    wrong = (labels != 0) & (labels != 1)
    if wrong.any():
        row = int(wrong.argmax())
        raise _MalformedError(row, "label", label[row].as_py())
    dense = np.empty((len(labels), len(INTEGERS)), dtype=np.float32)
    for number, column in enumerate(columns[: len(INTEGERS)]):
        dense[:, number] = np.log1p(np.maximum(column.fill_null(0).to_numpy(), 0))
    categories = zip(CATEGORIES, columns[len(INTEGERS) :], strict=True)
    return Rows(labels.astype(np.float32), dense, [_category(name, column) for name, column in categories])


def _category(name: str, column: pa.BinaryArray) -> np.ndarray:
    """The numbers that the texts of ``column`` spell in hexadecimal, RAW [n]."""
    _, offsets, content = column.buffers()
    ends = np.frombuffer(offsets, dtype=np.int32)[column.offset : column.offset + len(column) + 1]
    text = np.frombuffer(content, dtype=np.uint8) if content is not None else np.empty(0, dtype=np.uint8)
    lengths = np.diff(ends)
    filled = np.flatnonzero(lengths)
    if (lengths[filled] == 8).all():
        digits = text[ends[0] : ends[-1]].reshape(-1, 8)
    else:
        index = ends[1:][filled, None] + np.arange(-8, 0)
        inside = index >= ends[:-1][filled, None]
        digits = np.where(inside, text[np.maximum(index, 0)], ord("0"))
    nibbles = _NIBBLE[digits]
    if (nibbles > 15).any() or (lengths > 8).any():
        wrong = (lengths > 8)[filled] | (nibbles > 15).any(1)
        row = int(filled[wrong.argmax()])
        raise _MalformedError(row, name, column[row].as_py().decode("latin-1"))
    raw = np.zeros(len(column), dtype=RAW)
    raw["value"][filled] = ((nibbles[:, 0::2] << 4) | nibbles[:, 1::2]).view(">u4")[:, 0]
    raw["blank"] = lengths == 0
    return raw
