"""A training step on tables in host memory behind a row cache on the GPU, beside the same with all in the GPU's memory.

41 GB of int8 rows, a cache of 2 GB, Zipf ids. The bytes over the bus are counted from what the cache has done: rows
that came in and that left encoded, and for rows without a slot a read by the lookup and a read and a write by the
update; a row that several bags of a batch have is read more than once, so they are the least. After its backward a step
multiplies two matrices, as dense layers would, which what is prefetched can run beside. Steps are timed many at a time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import rec_kernels as rk
from bench.gpu.cases import ZIPF, batches_of_ids
from bench.shapes import Workload
from rec_kernels.nn.tables.row_cache import slot_bytes

FULL = Workload("host-d120-zipf", 8, 4096, 40_000_000, 120, 8, zipf=ZIPF), 2_000_000_000
TRIAL = Workload("trial-d12-zipf", 2, 8, 1_000, 12, 2, zipf=ZIPF), 20_000
#: Name -> backing (None: no cache), and whether batches are prefetched.
SUBJECTS = {
    "device, no cache": (None, False),
    "device": ("device", False),
    "host": ("host", False),
    "host, prefetched": ("host", True),
}
BATCHES, WARM_UP, TIMED, REPETITIONS = 64, 256, 64, 9


class _Zeros:
    """An init that takes no time to speak of."""

    in_chunks = True

    def __call__(self, weight: Tensor) -> None:
        weight.zero_()


def fraction(w: Workload, cache_bytes: int) -> float:
    """Share of all rows that have a slot in an "lfu" cache of so many bytes, counts included."""
    rows, slot = w.tables * w.rows, slot_bytes(w.dim, "lfu")
    return min(1.0, (cache_bytes - rows) / slot / rows)


class Steps:
    """Steps of one subject, each with the next batch of a cycle."""

    def __init__(self, w: Workload, name: str, cache_bytes: int, device: torch.device) -> None:
        backing, self._prefetches = SUBJECTS[name]
        cache = None if backing is None else rk.RowCache(fraction(w, cache_bytes), policy="lfu", backing=backing)
        tables = [
            rk.EmbeddingBagConfig(w.rows, w.dim, name=f"t{t}", feature_names=[f"f{t}"], format="int8", init=_Zeros())
            for t in range(w.tables)
        ]
        self.module = rk.EmbeddingBagCollection(
            tables, optimizer=rk.RowwiseAdagrad(lr=0.01), cache=cache, device=device
        )
        offsets = torch.arange(0, w.tables * w.batch * w.bag + 1, w.bag, device=device)
        keys = self.module.feature_names
        self._batches = [rk.KeyedJaggedTensor(keys, i, offsets=offsets) for i in batches_of_ids(w, device, BATCHES)]
        side = 4096 if device.type == "cuda" else 64
        self._dense = torch.randn(side, side, device=device)
        self._grad = torch.randn(w.batch, w.tables * w.dim, device=device)
        self.step = 0

    def __call__(self) -> None:
        """One step."""
        pooled = self.module(self._batches[self.step % BATCHES]).values()
        self.step += 1
        if self._prefetches:
            self.module.prefetch(self._batches[self.step % BATCHES])
        pooled.backward(self._grad)
        self.dense()

    def dense(self) -> Tensor:
        """The part of a step that has nothing to do with tables."""
        return self._dense @ self._dense

    def bus_bytes(self) -> int:
        """The least that went over the bus so far."""
        if self.module.row_cache is None or not self.module.tier_report()["host_bytes"]:
            return 0
        row = self.module.embedding_bags["t0"].weight.shape[1]
        left_out = sum(n["left_out"] for n in self.module.row_cache.counters().values())
        return self.module.tier_report()["moved_bytes"] + 3 * row * left_out


def ms_of(call: Callable[[], object], count: int, device: torch.device) -> float:
    """Milliseconds of a call, the mean of ``count``."""
    if device.type == "cpu":
        start = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - start) * 1e3 / count
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / count


def measure(w: Workload, name: str, cache_bytes: int, device: torch.device, count: int) -> dict[str, object]:
    """Time, bytes over the bus and hit rate of a step, once the cache holds what is used most."""
    steps = Steps(w, name, cache_bytes, device)
    cache = steps.module.row_cache
    ms_of(steps, WARM_UP if device.type == "cuda" else 4, device)
    if cache is not None:
        cache.stats.zero_()
    first = steps.step
    ms = statistics.median(ms_of(steps, count, device) for _ in range(REPETITIONS))
    moved = steps.bus_bytes() // (steps.step - first)
    found = {"name": name, "ms": ms, "dense_ms": ms_of(steps.dense, count, device), "bus_bytes": moved}
    lookups, hits = (0, 0) if cache is None else cache.stats.sum(0)[:2].tolist()
    found |= {"bus_gb_per_s": moved / ms / 1e6, "hit_rate": hits / lookups if lookups else None}
    return found | {"tiers": steps.module.tier_report()}


def main() -> None:
    """Prints a table; writes it as JSON, too."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.host_memory", description=__doc__)
    parser.add_argument("--output", type=Path, help="JSON file")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a trial, with tiny tables")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --device cpu tries the program without one")
    w, cache_bytes = FULL if args.device == "cuda" else TRIAL
    print(f"{w.name}: {w.tables} tables x {w.rows} rows, {w.batch} bags x {w.bag} ids; cache of {cache_bytes} bytes")
    device, results = torch.device(args.device), []
    for name in SUBJECTS:
        r = measure(w, name, cache_bytes, device, TIMED if device.type == "cuda" else 2)
        results.append(r)
        times = f"{name:18}{r['ms']:9.3f} ms, dense {r['dense_ms']:.3f}"
        hits = "" if r["hit_rate"] is None else f", hits {r['hit_rate']:.1%}"
        print(f"{times}, bus {r['bus_bytes'] / 1e6:.2f} MB, {r['bus_gb_per_s']:.2f} GB/s{hits}")
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if args.output is not None:
        about = {"workload": w.name, "cache_bytes": cache_bytes, "torch": torch.__version__}
        about["device"] = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
        args.output.write_text(json.dumps(about | {"results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
