"""Click logs in the format of the Kaggle Display Advertising Challenge (Criteo); docs/data.md has the format.

The last 1/7 of the rows is for the test: the challenge's training file has seven days. Dense columns are log(x + 1), as
in DLRM (Naumov et al., arXiv:1906.00091).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.lib import format as npy
from pyarrow import csv
from tqdm import tqdm

from rec_kernels.dlrm.array_cache import base_directory, fingerprint, ids_by_appearance, mix64, open_directory
from rec_kernels.dlrm.data import DataError, Feature, Rows

FORMAT = 1  # increase when the same source gives different arrays
FEWEST_ROWS = 7  # gives one test row
MOST_TABLE_ROWS = 2**31 - 1  # ids are int32
BLANK = 2**32  # value of a blank category
INTEGERS = tuple(f"I{number}" for number in range(1, 14))
CATEGORIES = tuple(f"C{number}" for number in range(1, 27))
COLUMNS = ("label", *INTEGERS, *CATEGORIES)
BLOCK = 1 << 20  # bytes of text and maximum line length; larger blocks are slower and use more memory
EXPECTED = (
    f"expected are lines of up to {BLOCK} bytes: label (0 or 1), 13 whole numbers of 64 bits or blanks, 26 categories "
    "of up to 8 hexadecimal digits or blanks, separated by tabs"
)

#: Labels, log(x + 1) of the integers, and categories, null if blank.
SCHEMA = pa.schema([(name, pa.uint32() if name in CATEGORIES else pa.float32()) for name in COLUMNS])


class Criteo(Rows):
    """The data set (``rec_kernels.dlrm.DataSet``), prepared on the first use.

    Preparing needs 330 bytes of disk per row, of which 160 remain, and memory for one column at a time.

    Args:
        path: a file, plain or ``.gz``, or a folder of such files, read in the order of their names.
        rows: use only the first rows; None for all. Files are read and checked in blocks, also beyond the last row.
        table_rows: None for a vocabulary per column: ids in order of first appearance, 0 for values not in the training
            rows. Or R, for ids SplitMix64(column * 2^33 + value) mod R, where a blank has the value 2^32.
        data_dir: folder of the prepared data, ``~/.cache/rec_kernels`` by default.
        progress: show progress bars while preparing.

    Attributes:
        label: float32 [N]. dense: float32 [N, 13]. ids: int32 [26, N].

    Raises:
        DataError: the source is missing, empty, damaged or malformed, or has fewer than 7 rows; names the place.
        OSError: the prepared data cannot be written.
    """

    num_dense = len(INTEGERS)

    def __init__(
        self,
        path: str | Path,
        *,
        rows: int | None = None,
        table_rows: int | None = None,
        data_dir: str | Path | None = None,
        progress: bool = False,
    ):
        if table_rows is not None and table_rows > MOST_TABLE_ROWS:
            raise DataError(f"table_rows is {table_rows}, allowed are 1 to {MOST_TABLE_ROWS}")
        if rows is not None and rows < FEWEST_ROWS:
            raise DataError(f"rows is {rows}, allowed are {FEWEST_ROWS} or more, one of them for the test")
        files = source_files(Path(path))
        # Each path and choice of options has a folder; a changed source replaces its content.
        choice = json.dumps([str(Path(path).resolve()), rows, table_rows])
        directory = base_directory(data_dir) / f"criteo-{hashlib.sha256(choice.encode()).hexdigest()[:12]}"
        build = partial(_prepare, files=files, rows=rows, table_rows=table_rows, progress=progress)
        source = [[f.name, (s := f.stat()).st_size, s.st_mtime_ns] for f in files]
        identity = {"format": FORMAT, "source": source, "rows": rows, "table_rows": table_rows}
        data = open_directory(directory, identity, build)
        self.name = "criteo" + (f"-rows{rows}" if rows else "") + (f"-tables{table_rows}" if table_rows else "")
        self.fingerprint = fingerprint(directory)
        self.label, self.dense, self.ids = data["label"], data["dense"], data["ids"]
        self.features = [Feature(name, int(n)) for name, n in zip(CATEGORIES, data["num_embeddings"], strict=True)]
        self.rows, self.train_rows = len(self.label), train_rows(len(self.label))


def source_files(path: Path) -> list[Path]:
    """``path``, or its files that are not hidden, sorted by name; DataError if it is missing, empty or has folders."""
    allowed = "path must be a file in Criteo's format or a folder of such files"
    if not path.exists():
        raise DataError(f"{path} does not exist: {allowed}")
    if not path.is_dir():
        return [path]
    files = sorted((file for file in path.iterdir() if not file.name.startswith(".")), key=lambda file: file.name)
    if not files:
        raise DataError(f"{path} has no files: {allowed}")
    for file in files:
        if not file.is_file():
            raise DataError(f"{file} is not a file: a folder given as path must hold files in Criteo's format only")
    return files


def train_rows(rows: int) -> int:
    """The number of training rows, which come first."""
    return rows * 6 // 7


def _prepare(
    folder: Path, files: list[Path], rows: int | None, table_rows: int | None, progress: bool
) -> dict[str, Any]:
    path = folder / "rows.arrow"
    table = _write_table(path, files, rows, progress)
    if len(table) < FEWEST_ROWS:
        where = files[0] if len(files) == 1 else files[0].parent
        raise DataError(f"{where} has {len(table)} rows, needs at least {FEWEST_ROWS}, one of them for the test")
    num_embeddings = []
    with (folder / "ids.npy").open("wb") as file:
        shape = len(CATEGORIES), len(table)
        npy.write_array_header_1_0(file, {"descr": np.dtype(np.int32).str, "fortran_order": False, "shape": shape})
        for number, name in enumerate(tqdm(CATEGORIES, desc="ids", unit="column", disable=not progress)):
            values = table[name].cast(pa.int64()).fill_null(BLANK).to_numpy()
            if table_rows is None:
                ids, size = ids_by_appearance(values, train_rows(len(values)))
            else:
                ids, size = hashed_ids(values, number, table_rows), table_rows
            file.write(ids.astype(np.int32).data)
            num_embeddings.append(size)
    dense = npy.open_memmap(folder / "dense.npy", "w+", np.dtype(np.float32), (len(table), len(INTEGERS)))
    for number, name in enumerate(INTEGERS):
        dense[:, number] = table[name].to_numpy()
    path.unlink()  # its pages stay mapped
    return {"label": table["label"].to_numpy(), "num_embeddings": np.array(num_embeddings)}


def _write_table(path: Path, files: list[Path], rows: int | None, progress: bool) -> pa.Table:
    """Converts the rows of text to memory-mapped columns on disk."""
    total = 0
    with pa.ipc.new_file(str(path), SCHEMA) as writer:
        for block in read_rows(files, progress=progress):
            writer.write(block if rows is None else block.slice(0, rows - total))
            total += len(block)
            if rows is not None and total >= rows:
                break
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


def hashed_ids(values: np.ndarray, column: int, table_rows: int) -> np.ndarray:
    """SplitMix64(column * 2^33 + value) mod table_rows, uint64 [n], for values int64 [n] from 0 to 2^32 (a blank)."""
    return mix64((column << 33) + values) % np.uint64(table_rows)


class _MalformedError(ValueError):
    """Row ``row`` of a block has a field that is invalid in the format but not for pyarrow."""

    def __init__(self, row: int, column: str, field: object):
        super().__init__(f"{column} is {'blank' if field is None else format(repr(field), '.60')}")
        self.row = row


def read_rows(files: list[Path], *, progress: bool = False) -> Iterator[pa.RecordBatch]:
    """Yields the rows of ``files``, plain or ``.gz``, as ``SCHEMA``, in blocks of about a megabyte of text.

    Integers may have spaces around them; pyarrow also accepts hexadecimal ones with 0x.

    Raises:
        DataError: a file is empty, damaged or malformed; names the file and the place.
    """
    total = sum(file.stat().st_size for file in files)
    with tqdm(total=total, desc="reading", unit="B", unit_scale=True, disable=not progress) as bar:
        for file in files:
            yield from _read_file(file, bar)


def _read_file(file: Path, bar: tqdm) -> Iterator[pa.RecordBatch]:
    done, before, is_gzip = 0, bar.n, file.suffix.lower() == ".gz"
    with pa.OSFile(str(file)) as source:
        try:
            for block in _open(pa.CompressedInputStream(source, "gzip") if is_gzip else source):
                rows = _convert(block)
                done += len(rows)
                bar.update(before + source.tell() - bar.n)
                yield rows
        except _MalformedError as error:
            raise DataError(f"{file}, Row #{done + error.row + 1}: {error}; {EXPECTED}") from error
        except (pa.ArrowInvalid, OSError) as error:
            raise DataError(f"{file}, {_placed(str(error), done)}; {EXPECTED}") from error


def _placed(text: str, done: int) -> str:
    """Prefixes pyarrow's message with the row and the column's name; ``done`` is the number of rows read before."""
    if "straddl" in text:
        return f"after row {done}: a line of more than {BLOCK} bytes"
    row, column = re.search(r"Row #\d+: ", text), re.search(r"In CSV column #(\d+): ", text)
    if row is None:
        return f"after row {done}: {text}"
    name = f"{COLUMNS[int(column[1])]}: " if column else ""
    return f"{row[0]}{name}{text[row.end() :]}"


def _open(text: pa.NativeFile) -> csv.CSVStreamingReader:
    return csv.open_csv(
        text,
        # Without threads, errors have the row number; reading is faster than what follows in any case.
        read_options=csv.ReadOptions(column_names=COLUMNS, block_size=BLOCK, use_threads=False),
        parse_options=csv.ParseOptions(
            delimiter="\t", quote_char=False, double_quote=False, escape_char=False, ignore_empty_lines=False
        ),
        convert_options=csv.ConvertOptions(
            column_types={name: pa.string() if name in CATEGORIES else pa.int64() for name in COLUMNS},
            null_values=[""],
            strings_can_be_null=True,
        ),
    )


def _convert(block: pa.RecordBatch) -> pa.RecordBatch:
    """Converts a block to ``SCHEMA``; blank integers become 0."""
    label, *columns = block.columns
    if (row := pc.index(pc.is_in(label, pa.array([0, 1])), False).as_py()) >= 0:
        raise _MalformedError(row, "label", label[row].as_py())
    integers, texts = columns[: len(INTEGERS)], zip(CATEGORIES, columns[len(INTEGERS) :], strict=True)
    dense = [np.log1p(np.maximum(column.fill_null(0).to_numpy(), 0)).astype(np.float32) for column in integers]
    return pa.record_batch([label.cast(pa.float32()), *dense, *(_category(n, text) for n, text in texts)], SCHEMA)


def _category(name: str, column: pa.StringArray) -> pa.UInt32Array:
    """Parses hexadecimal numbers; null for blanks."""
    try:
        return pc.binary_join_element_wise("0x", column, "").cast(pa.uint32())
    except pa.ArrowInvalid:
        row = pc.index(pc.match_substring_regex(column, "^[0-9a-fA-F]{1,8}$"), False).as_py()
        raise _MalformedError(row, name, column[row].as_py()) from None
