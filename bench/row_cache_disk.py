"""Training of tables on disk four times as large as their memory budget, compared with the same tables in memory.

Each implementation trains in a process of its own on the same Zipf ids: int8 tables behind an LFU cache, in memory and
on disk, the latter with and without `collection.prefetch`. "embedding": the tables alone. "model": an MLP over their
output, as a DLRM has it, whose work the prefetch overlaps with. Memory: what the process has grown by that no file
backs, from before it had tables. The file lies in --folder; its pages may be in the system's cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import bench
import rec_kernels as rk
from bench.script import machine, parser_of, positive
from bench.shapes import Workload

WORKLOAD = Workload("disk", tables=8, batch=512, rows=1_000_000, dim=64, bag=2, zipf=1.15)
FRACTION = 0.05
BATCHES, WARM_UP = 200, 800  # steps that are timed, and before
IMPLEMENTATIONS = ("memory", "disk", "disk, prefetched")


def own_memory() -> int:
    """Resident anonymous bytes of the process."""
    return 1024 * int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


def collection(on_disk: bool, folder: Path, budget: int) -> rk.EmbeddingBagCollection:
    """Makes a collection of the workload's tables in int8."""
    w = WORKLOAD
    tables = [
        rk.EmbeddingBagConfig(w.rows, w.dim, name=f"t{t}", feature_names=[f"f{t}"], format="int8")
        for t in range(w.tables)
    ]
    options = {"backing": "disk", "path": folder / "tables.rows", "memory_budget": budget} if on_disk else {}
    cache = rk.RowCache(FRACTION, policy="lfu", **options)
    return rk.EmbeddingBagCollection(tables, optimizer=rk.RowwiseAdagrad(lr=0.01), cache=cache)


def train(name: str, has_model: bool, folder: Path, budget: int) -> dict:
    """Trains with one implementation: milliseconds, hit rate, memory, and file bytes per step."""
    torch.manual_seed(0)
    w = WORKLOAD
    w.ids(0)  # precomputes the distribution of ids
    before = own_memory()
    tables = collection(name != "memory", folder, budget)
    sizes = (w.tables * w.dim, 1024, 512, 256, 1)
    layers = [layer for a, b in itertools.pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*layers[:-1]) if has_model else None
    dense = torch.optim.SGD(model.parameters(), lr=0.01) if has_model else None
    offsets = w.offsets()

    def features(i: int) -> rk.KeyedJaggedTensor:
        return rk.KeyedJaggedTensor(tables.feature_names, w.ids(i), offsets=offsets)

    times, now = [], features(0)
    for i in range(WARM_UP + BATCHES):
        if i == WARM_UP:
            start = tables.tier_report()
            tables.row_cache.stats.zero_()
        following = features(i + 1)
        began = time.perf_counter()
        pooled = tables(now).values()
        if name == "disk, prefetched":
            tables.prefetch(following)
        loss = model(pooled).square().mean() if has_model else pooled.square().mean()
        loss.backward()
        if has_model:
            dense.step()
            dense.zero_grad()
        times.append(time.perf_counter() - began)
        now = following
    report, (lookups, hits) = tables.tier_report(), tables.row_cache.stats.sum(0)[:2].tolist()
    return {
        "ms": 1000 * statistics.median(times[WARM_UP:]),
        "hit_rate": hits / lookups,
        "loss": loss.item(),
        "grown_bytes": own_memory() - before,
        "cache_bytes": report["cache_bytes"],
        "read_bytes": (report["read_bytes"] - start["read_bytes"]) / BATCHES,
        "written_bytes": (report["written_bytes"] - start["written_bytes"]) / BATCHES,
    }


def run(name: str, has_model: bool, folder: Path | None, budget: int, threads: int) -> dict:
    """Runs ``train`` in a new process."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        arguments = [json.dumps([name, has_model, own, budget, threads])]
        command = [sys.executable, "-m", "bench.row_cache_disk", "--child", *arguments]
        return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def table(found: dict[str, dict[str, dict]]) -> str:
    """A Markdown table with a line per kind of step and implementation."""
    heads = ["step", "tables", "ms", "of memory's speed", "hit rate"]
    heads += ["grown, MB", "read a step, MB", "written a step, MB"]
    lines = []
    for kind, runs in found.items():
        for name, r in runs.items():
            numbers = (r["grown_bytes"], r["read_bytes"], r["written_bytes"])
            cells = [f"{r['ms']:.2f}", f"{runs['memory']['ms'] / r['ms']:.2f}", f"{r['hit_rate']:.3f}"]
            lines.append([kind, name, *cells, *(f"{n / 1e6:.1f}" for n in numbers)])
    return bench.table(heads, lines, texts=("tables",))


def main() -> None:
    """Runs every implementation, checks that all learn the same, prints and saves the figures."""
    parser = parser_of(__doc__, "row_cache_disk.json")
    parser.add_argument("--threads", type=positive, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--folder", type=Path, help="where the files of tables are (default: the system's)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        name, has_model, folder, budget, threads = json.loads(args.child)
        torch.set_num_threads(threads)
        print(json.dumps(train(name, has_model, Path(folder), budget)))
        return
    budget = WORKLOAD.tables * WORKLOAD.rows * (WORKLOAD.dim + 8) // 4
    found = {
        kind: {name: run(name, has_model, args.folder, budget, args.threads) for name in IMPLEMENTATIONS}
        for kind, has_model in (("embedding", False), ("model", True))
    }
    for kind, runs in found.items():
        if len({r["loss"] for r in runs.values()}) > 1:
            sys.exit(f"{kind}: the losses differ: { {name: r['loss'] for name, r in runs.items()} }")
    print(f"tables {4 * budget / 1e6:.0f} MB, memory budget {budget / 1e6:.0f} MB\n\n{table(found)}")
    workload = WORKLOAD.__dict__ | {"fraction": FRACTION, "budget": budget}
    bench.save(machine() | {"workload": workload, "runs": found}, args.output)


if __name__ == "__main__":
    main()
