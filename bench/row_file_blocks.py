"""Measures loads of a row file four times as large as its memory, against a bare loop that moves as many blocks.

Every load names other blocks, all of which change, so that nearly every block that comes in sends one to the log. The
loop reads the same blocks of the file into memory of the same size, and first writes what was there to a file of its
own. Times are the processor's, of all threads, on data that the system keeps in its page cache.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

import bench
from bench.limits import limits
from bench.script import machine, options_of, parser_of, positive
from rec_kernels._library import host

BLOCK, BLOCKS, HELD, LOADED = 4096, 144_000, 36_000, 900  # bytes of a block; blocks: of the file, in memory, of a load
LOADS = 300  # that are timed


def filled(path: Path, threads: int):
    """Creates and flushes a row file without blocks of zeros."""
    file = host().RowFile.create(path, BLOCKS * BLOCK, layout="blocks", memory_budget=HELD * BLOCK, threads=threads)
    rng, window = np.random.default_rng(0), file.window.reshape(-1, BLOCK)
    for first in range(0, BLOCKS, HELD // 4):
        some = np.arange(first, min(first + HELD // 4, BLOCKS))
        file.load(some * BLOCK, BLOCK, write=True)
        window[some, ::64] = rng.integers(1, 255, (len(some), BLOCK // 64), dtype=np.uint8)
    file.flush()
    return file


def measure(folder: Path, threads: int) -> dict[str, float]:
    """Returns median microseconds per block read, "load" and "loop", and the blocks that a load reads and writes."""
    path = folder / "blocks"
    file, memory, rng = filled(path, threads), np.ones(HELD * BLOCK, np.uint8), np.random.default_rng(1)
    found: dict[str, list[float]] = {"load": [], "loop": [], "read": [], "written": []}
    with path.open("rb") as main, (folder / "loop").open("w+b") as log:
        first = path.stat().st_size - BLOCKS * BLOCK
        log.truncate(BLOCKS * BLOCK)
        for i in range(2 * LOADS):
            blocks = np.sort(rng.choice(BLOCKS, LOADED, replace=False))
            before, began = file.stats(), time.process_time()
            file.load(blocks * BLOCK, BLOCK, write=True)
            ended, after = time.process_time(), file.stats()
            if i < LOADS:  # until memory is full of dirty blocks that have slots in the log
                continue
            read, written = ((after[name] - before[name]) // BLOCK for name in ("bytes_read", "bytes_written"))
            places = [np.sort(rng.choice(BLOCKS, written, replace=False)), rng.choice(HELD, read, replace=False)]
            began_loop = time.process_time()
            limits().move_blocks((main.fileno(), log.fileno()), memory, blocks[:read], *places, first)
            loop = time.process_time() - began_loop
            for name, number in zip(found, ((ended - began) / read, loop / read, read, written), strict=True):
                found[name].append(number)
    file.close()
    scales = {"load": 1e6, "loop": 1e6, "read": 1, "written": 1}
    return {name: scales[name] * statistics.median(numbers) for name, numbers in found.items()}


def main() -> None:
    """Measures, prints and saves the figures."""
    parser = parser_of(__doc__, "row_file_blocks.json")
    parser.add_argument("--threads", type=positive, default=1, help="threads of the row file (default: 1)")
    args = options_of(parser)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), args.threads)
    print(
        f"{found['load']:.2f} us of the processor for a block, the loop {found['loop']:.2f} "
        f"({found['loop'] / found['load']:.2f} of the load); {found['read']:.0f} blocks read and "
        f"{found['written']:.0f} written by a load"
    )
    bench.save(machine(args.threads) | {"found": found}, args.output)


if __name__ == "__main__":
    main()
