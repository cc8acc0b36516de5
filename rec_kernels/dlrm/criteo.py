"""Click logs in the format of the Kaggle Display Advertising Challenge (Criteo), prepared for training.

docs/data.md has the format. The last 1/7 of the rows is for the test: the challenge's training file has seven days.
Dense columns are log(x + 1), as in DLRM (Naumov et al., arXiv:1906.00091).
"""

from __future__ import annotations

import hashlib
import json
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.lib import format as npy
from tqdm import tqdm

from rec_kernels.dlrm.array_cache import base_directory, fingerprint, ids_by_appearance, mix64, open_directory
from rec_kernels.dlrm.criteo_reader import CATEGORIES, INTEGERS, RAW, read_rows
from rec_kernels.dlrm.data import DataError, Feature, Rows

FORMAT = 1  # raise it whenever the same source gives other arrays
FEWEST_ROWS = 7  # so that one of them is for the test
MOST_TABLE_ROWS = 2**31 - 1  # ids are int32
BLANK = 2**32  # among the values of a category


class Criteo(Rows):
    """The data set (``rec_kernels.dlrm.data.DataSet``); its rows are prepared on the first use.

    Preparing takes 250 bytes of disk per row, 160 of which stay, and memory for one column at a time.

    Args:
        path: a file, plain or ``.gz``, or a folder of such files, read in the order of their names.
        rows: None, or only the first rows. Files are read in blocks: what follows in the same block is checked, too.
        table_rows: None for a vocabulary per column: ids in order of first appearance, 0 for what the training rows do
            not have. Or R, and the id is SplitMix64(column * 2^33 + value) mod R, with 2^32 as the value of a blank.
        data_dir: folder of the prepared data, ``~/.cache/rec_kernels`` by default.
        progress: show progress bars while preparing.

    Attributes:
        label: float32 [N].
        dense: float32 [N, 13].
        ids: int32 [26, N].
        train_rows: first test row.

    Raises:
        DataError: the source is missing, empty, damaged or malformed, or has fewer than 7 rows; says where.
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
            raise DataError(f"rows is {rows}, allowed are {FEWEST_ROWS} or more, so that one is for the test")
        files = source_files(Path(path))
        # A folder per source and options: a changed source replaces what was made of it, other options stand beside it.
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
    """The files of a source: ``path``, or what is in it in the order of names, hidden files left out.

    Raises:
        DataError: there is nothing, or a folder in the folder.
    """
    if not path.exists():
        raise DataError(f"{path} does not exist: path must be a file in Criteo's format or a folder of such files")
    if not path.is_dir():
        return [path]
    files = sorted((file for file in path.iterdir() if not file.name.startswith(".")), key=lambda file: file.name)
    if not files:
        raise DataError(f"{path} has no files: path must be a file in Criteo's format or a folder of such files")
    for file in files:
        if not file.is_file():
            raise DataError(f"{file} is not a file: a folder given as path must hold files in Criteo's format only")
    return files


def train_rows(rows: int) -> int:
    """Number of rows, the first ones, that are for training."""
    return rows * 6 // 7


def _prepare(
    folder: Path, files: list[Path], rows: int | None, table_rows: int | None, progress: bool
) -> dict[str, Any]:
    # Ids need all values of one column, lines bring one value of all columns: the columns wait on the disk.
    with TemporaryDirectory(prefix="columns-", dir=folder) as scratch:
        columns = Path(scratch)
        total = _write_columns(columns, files, rows, progress)
        if total < FEWEST_ROWS:
            where = files[0] if len(files) == 1 else files[0].parent
            raise DataError(f"{where} has {total} rows, needed are {FEWEST_ROWS} or more, so that one is for the test")
        for name, shape in (("label", total), ("dense", (total, len(INTEGERS)))):
            raw = np.memmap(columns / name, np.float32, "r", shape=shape)
            np.save(folder / f"{name}.npy", raw, allow_pickle=False)
            (columns / name).unlink()
        num_embeddings = []
        with (folder / "ids.npy").open("wb") as file:
            header = {"descr": np.dtype(np.int32).str, "fortran_order": False, "shape": (len(CATEGORIES), total)}
            npy.write_array_header_1_0(file, header)
            for number, name in enumerate(tqdm(CATEGORIES, desc="ids", unit="column", disable=not progress)):
                ids, table = _ids(np.fromfile(columns / name, dtype=RAW), number, table_rows)
                file.write(ids.astype(np.int32).data)
                num_embeddings.append(table)
                (columns / name).unlink()
        return {"num_embeddings": np.array(num_embeddings)}


def _write_columns(columns: Path, files: list[Path], rows: int | None, progress: bool) -> int:
    """A raw file each for labels, dense columns and every category; returns the number of rows."""
    total = 0
    with ExitStack() as stack:
        outputs = [stack.enter_context((columns / name).open("wb")) for name in ("label", "dense", *CATEGORIES)]
        for block in read_rows(files, progress=progress):
            keep = len(block.label) if rows is None else min(len(block.label), rows - total)
            for output, values in zip(outputs, (block.label, block.dense, *block.categories), strict=True):
                output.write(values[:keep].data)
            total += keep
            if total == rows:
                break
    return total


def _ids(raw: np.ndarray, number: int, table_rows: int | None) -> tuple[np.ndarray, int]:
    """Ids [N] of category ``number``, of which ``raw`` is as it is in the file, and the rows of its table."""
    values = raw["value"].astype(np.int64)
    values[raw["blank"]] = BLANK
    if table_rows is None:
        return ids_by_appearance(values, train_rows(len(values)))
    return hashed_ids(values, number, table_rows), table_rows


def hashed_ids(values: np.ndarray, column: int, table_rows: int) -> np.ndarray:
    """SplitMix64(column * 2^33 + value) mod table_rows, uint64 [n], of int64 [n] from 0 to 2^32 (a blank)."""
    return mix64((column << 33) + values) % np.uint64(table_rows)
