"""Preparing a file in Criteo's format: rec_kernels.dlrm.criteo against csv and dicts of plain Python.

The file is a sample repeated until it has the wanted size, so its columns have few distinct values: real ones take
longer to be numbered. Three cases take turns, each in a process of its own, for its peak resident memory:

plain file  text to prepared arrays on disk, checked and mapped
.gz file    the same from a smaller, compressed file; bytes count as text
python      csv.reader, a dict per column and lists, on the first rows only; writes the same arrays
"""

from __future__ import annotations

import argparse
import csv
import gzip
import itertools
import math
import multiprocessing
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from tqdm import tqdm

from bench.script import options_of, parser_of, positive, write_result
from rec_kernels.dlrm.criteo import Criteo, train_rows
from rec_kernels.dlrm.runs import peak_memory_bytes


def make_file(sample: Path, target: Path, size: int) -> tuple[int, int]:
    """Repeats ``sample`` (.gz) in ``target`` up to ``size`` bytes of text; returns its bytes of text and rows."""
    with gzip.open(sample) as file:
        text = file.read()
    copies = max(size // len(text), 1)
    with gzip.open(target, "wb", compresslevel=6) if target.suffix == ".gz" else target.open("wb") as file:
        for _ in tqdm(range(copies), desc=f"writing {target.name}"):
            file.write(text)
    return copies * len(text), copies * text.count(b"\n")


def prepare(file: Path, store: Path, rows: int) -> int:
    """Prepares the whole file with rec_kernels."""
    return len(Criteo(file, data_dir=store).label)


def plain_python(file: Path, store: Path, rows: int) -> int:
    """Reads the first ``rows`` with the csv module and dicts, into arrays equal to the reader's."""
    labels, dense, categories = [], [], [[] for _ in range(26)]
    with file.open(newline="") as lines:
        for row in itertools.islice(csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE), rows):
            labels.append(float(row[0]))
            dense.append([math.log1p(max(int(field or 0), 0)) for field in row[1:14]])
            for column, field in zip(categories, row[14:], strict=True):
                column.append(int(field, 16) if field else None)
    ids = []
    train = train_rows(len(labels))
    for column in categories:
        vocabulary: dict[int | None, int] = {}
        for value in column[:train]:
            vocabulary.setdefault(value, len(vocabulary) + 1)
        ids.append([vocabulary.get(value, 0) for value in column])
    for name, values, dtype in (("label", labels, "f4"), ("dense", dense, "f4"), ("ids", ids, "i4")):
        np.save(store / f"{name}.npy", np.array(values, dtype=dtype))
    return len(labels)


def timed(case, file: Path, store: Path, rows: int) -> tuple[int, float, int]:
    """Returns rows, seconds and peak resident bytes of one call; run it in a fresh process."""
    start = time.perf_counter()
    count = case(file, store, rows)
    return count, time.perf_counter() - start, peak_memory_bytes()


def in_fresh_process(case, file: Path, scratch: Path, rows: int) -> tuple[int, float, int]:
    """Runs ``timed`` with an empty store in a fresh process."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=scratch) as store, ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(timed, case, file, Path(store), rows).result()


def measure(options: argparse.Namespace, scratch: Path) -> dict[str, dict]:
    """Returns medians over the rounds for every case."""
    plain, packed = scratch / "rows.tsv", scratch / "rows.tsv.gz"
    sizes = {plain: make_file(options.sample, plain, int(options.gigabytes * 1e9))}
    sizes[packed] = make_file(options.sample, packed, int(options.gz_gigabytes * 1e9))
    cases = {"plain file": (prepare, plain), ".gz file": (prepare, packed), "python": (plain_python, plain)}
    results = {name: [] for name in cases}
    for _ in tqdm(range(options.rounds), desc="rounds"):
        for name, (case, file) in cases.items():
            results[name].append(in_fresh_process(case, file, scratch, options.python_rows))
    summary = {}
    for name, (_, file) in cases.items():
        text_bytes, file_rows = sizes[file]
        rows, seconds, peak = (statistics.median(values) for values in zip(*results[name], strict=True))
        rates = [count / taken for count, taken, _ in results[name]]
        summary[name] = {
            "rows": rows,
            "rows_per_second": rows / seconds,
            "rows_per_second_range": [min(rates), max(rates)],
            "text_mb_per_second": rows / file_rows * text_bytes / 1e6 / seconds,
            "peak_resident_mb": peak / 1e6,
        }
    return summary


def table(summary: dict[str, dict]) -> str:
    """The summary as text."""
    lines = [f"{'':<12}{'rows':>12}{'rows/s':>12}{'MB/s':>9}{'peak MB':>9}{'ours is':>9}"]
    for name, row in summary.items():
        ratio = summary["plain file"]["rows_per_second"] / row["rows_per_second"]
        lines.append(
            f"{name:<12}{row['rows']:>12,}{row['rows_per_second']:>12,.0f}{row['text_mb_per_second']:>9.1f}"
            f"{row['peak_resident_mb']:>9,.0f}{ratio:>8.1f}x"
        )
    return "\n".join(lines)


def main() -> None:
    parser = parser_of(__doc__, "criteo_reader.json")
    parser.add_argument("--sample", type=Path, required=True, help="rows in Criteo's format, .gz")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the plain file (default: 2)")
    parser.add_argument("--gz-gigabytes", type=float, default=0.5, help="text in the .gz file (default: 0.5)")
    parser.add_argument("--python-rows", type=positive, default=200_000, help="rows for Python (default: 200000)")
    parser.add_argument("--rounds", type=positive, default=3, help="times each case is measured (default: 3)")
    parser.add_argument("--scratch", type=Path, help="folder for the files (default: the system's)")
    options = options_of(parser)
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        summary = measure(options, Path(scratch))
    print(table(summary))
    write_result(options, ("gigabytes", "gz_gigabytes", "python_rows", "rounds"), summary)


if __name__ == "__main__":
    main()
