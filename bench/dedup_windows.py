"""Bytes of a batch's shared features and time of the reader's stage: without deduplication, with it, and with windows.

Complete Journey, for several lengths of the longest history and sizes of the batch, its rows in two orders:

time        that of the data: between two baskets of a household there are those of others
household   clustered, as RecD has it: a household's baskets, in the order of time, are neighbours

stage       what the trainer's reader does on its thread: equal bags are found, then windows
bags        what the first lookup of windows takes longer: bags are made of them; here on the CPU

Ways take turns; times are medians.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools

import numpy as np
import torch
from tqdm import tqdm

import bench
import rec_kernels as rk
from bench.dedup_step import INPUTS, num_bytes, some_batches, times
from bench.script import options_of, parser_of, positive, write_result
from rec_kernels.dlrm import Batch, CompleteJourney, load_completejourney
from rec_kernels.dlrm.completejourney import FEATURES, HISTORY
from rec_kernels.dlrm.reader import dedup_batch

HISTORIES, BATCHES = (10, 50, 200), (2048, 8192, 65536)
ORDERS = ("time", "household")


def by_household(data: CompleteJourney) -> CompleteJourney:
    """Reorders the baskets household by household, within training and test set."""
    first = np.searchsorted(data.basket, np.arange(len(data.history_offsets) - 1))
    household = data.ids[FEATURES.index("household")][first]
    order = np.lexsort((household, first >= data.train_rows))
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    rows = np.argsort(number[data.basket], kind="stable")
    histories = (torch.from_numpy(np.array(part)) for part in (data.history_products, data.history_offsets))
    products, offsets = rk.jagged_index_select(*histories, torch.from_numpy(order))
    return dataclasses.replace(
        data,
        ids=data.ids[:, rows],
        dense=data.dense[rows],
        label=data.label[rows],
        basket=number[data.basket][rows].astype(np.int32),
        history_offsets=offsets.numpy(),
        history_products=products.numpy(),
    )


def measure(data: CompleteJourney, size: int, turns: int, seconds: float) -> dict:
    """All figures of one data set and batch size."""
    plain = some_batches(data, size)
    ways = {"on": [dedup_batch(b) for b in plain], "windows": [dedup_batch(b, windows=True) for b in plain]}
    check(plain, ways["windows"])
    batches = {"without": plain} | ways
    before = sum(len(batch.shared.values()) for batch in plain)
    stored = {name: sum(batch.shared.num_stored([HISTORY]) for batch in made) for name, made in ways.items()}
    found = [batch.shared for batch in batches["windows"]]
    calls = {"on": lambda i: dedup_batch(plain[i]), "windows": lambda i: dedup_batch(plain[i], windows=True)}
    return {
        "rows": len(plain[0].label),
        "ids_per_row": before / sum(len(batch.label) for batch in plain),
        "factor": {name: before / kept for name, kept in stored.items()},
        "bytes": {name: sum(num_bytes(b.shared) for b in made) / INPUTS for name, made in batches.items()},
        "stage_ms": times(calls, turns, seconds),
        # Moved, they have no bags yet.
        "bags_ms": times({"bags": lambda i: found[i].to("cpu").bags()}, turns, seconds)["bags"],
    }


def check(plain: list[Batch], windows: list[Batch]) -> None:
    """No figure of a wrong batch."""
    for one, other in zip(plain, windows, strict=True):
        whole = other.shared.to("cpu").to_kjt()
        if not (
            torch.equal(whole.values(), one.shared.values()) and torch.equal(whole.offsets(), one.shared.offsets())
        ):
            raise SystemExit("error: windows do not make the batch again: nothing was measured")


def cases(options: argparse.Namespace) -> list[dict]:
    """Every figure, by what was measured."""
    results = []
    todo = list(itertools.product(HISTORIES, ORDERS))
    for history, order in tqdm(todo, desc="history"):
        data = load_completejourney(options.weeks, options.data_dir, history=history)
        data = by_household(data) if order == "household" else data
        for size in BATCHES:
            figures = measure(data, size, options.turns, options.seconds)
            results.append({"history": history, "order": order} | figures)
    return results


def table(results: list[dict]) -> str:
    """The results as Markdown; in parentheses: how many times fewer bytes than with whole bags."""
    heads = ["order", "history", "batch", "factor, on", "windows", "MB, without", "on", "windows", "stage, ms, on"]
    lines = []
    for r in sorted(results, key=lambda r: ORDERS.index(r["order"])):
        size, stage = r["bytes"], r["stage_ms"]
        cells = [r["order"], r["history"], f"{r['rows']:,}", *(f"{r['factor'][way]:.2f}" for way in ("on", "windows"))]
        cells += [f"{size['without'] / 1e6:.2f}", f"{size['on'] / 1e6:.3f}"]
        cells.append(f"{size['windows'] / 1e6:.3f} ({size['on'] / size['windows']:.2f}x)")
        cells += [f"{stage[way]['median']:.2f}" for way in ("on", "windows")]
        cells.append(f"{r['bags_ms']['median']:.2f}")
        lines.append(cells)
    return bench.table([*heads, "windows", "bags, ms"], lines)


def main() -> None:
    parser = parser_of(__doc__, "dedup_windows.json", data=True)
    parser.add_argument("--turns", type=positive, default=8, help="turns of each way (default: 8)")
    parser.add_argument("--seconds", type=float, default=0.3, help="of a turn, at the least (default: 0.3)")
    options = options_of(parser)
    results = cases(options)
    print(table(results))
    write_result(options, ("turns", "seconds", "weeks"), results)


if __name__ == "__main__":
    main()
