"""Times every kernel of an update separately, and computes a digest of the tables afterwards.

    python -m bench.gpu.kernel_times --case t32-b2048-e1e5-d128-uniform --label before --output kernels.json

The L2 is emptied before each call. Runs with another library or commit and another label go into the same file: equal
digests say that the updates leave the same rows. Without a GPU (``--device cpu``) there are no kernels, and a digest.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import bench
from bench.gpu.cases import ADAGRAD, ADAM, SGD, TRIAL, workloads
from bench.gpu.implementations import Ops, Tables
from bench.gpu.report import about, read
from bench.gpu.timing import CudaTimer
from bench.shapes import Workload

CALLS, UNTIMED = 8, 3
#: Part of a kernel's name -> its name in the report.
KERNELS = {
    "start_kernel": "layout's check",
    "entries": "entries",
    "Onesweep": "sort's passes",
    "DeviceScan": "runs",
    "list_chunks": "chunks",
    "sum_chunk": "sums of chunks",
    "finish_kernel": "rows",
}


def digest(rows: Tensor) -> str:
    """Hexadecimal digest of the bits and positions of [N] float32."""
    total = 0
    for part in rows.split(2**26):
        weights = torch.arange(len(part), device=rows.device) % 1_000_003 + 1
        total = (total * 31 + int((part.view(torch.int32).long() * weights).sum())) % 2**61
    return f"{total:016x}"


def _kernels_of(call: Callable[[], object], device: torch.device) -> list[tuple[str, float]]:
    """Returns (name, microseconds) of each kernel of a call; empty on the CPU."""
    if device.type != "cuda":
        call()
        return []
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    return [(e.name, e.time_range.elapsed_us()) for e in seen.events() if e.device_type == DeviceType.CUDA]


def update_times(w: Workload, optimizer: str, device: torch.device) -> dict[str, object]:
    """Returns median microseconds of each kernel of an update and of all together, and the tables' digest.

    Args:
        w: the workload; random numbers have the same seed in every run.
        optimizer: "rowwise_adagrad", "sgd" or "adam".
    """
    torch.manual_seed(0)
    data = Tables(w, device)
    of = Ops(data, optimizer)
    timer = CudaTimer() if device.type == "cuda" else None
    calls: dict[str, list[float]] = defaultdict(list)
    for turn in range(UNTIMED + CALLS):
        data.use(turn)
        if timer is not None:
            timer.flush()
            torch.cuda.synchronize()
        here: dict[str, float] = defaultdict(float)
        for name, microseconds in _kernels_of(of.backward, device):
            here[next((KERNELS[part] for part in KERNELS if part in name), "others")] += microseconds
        if turn < UNTIMED:
            continue
        for name, microseconds in (here | {"all": sum(here.values())}).items():
            calls[name].append(microseconds)
    medians = {name: round(statistics.median(times), 2) for name, times in calls.items()}
    return {"case": w.name, "optimizer": optimizer, "kernels_us": medians, "digest": digest(data.weights)}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.kernel_times", description=__doc__)
    parser.add_argument("--case", action="append", required=True, help="the name of a case (repeatable)")
    parser.add_argument("--optimizer", choices=[ADAGRAD, SGD, ADAM], default=ADAGRAD)
    parser.add_argument("--label", required=True, help="what the kernels are called in the file")
    parser.add_argument("--output", type=Path, required=True, help="JSON file, to which the run is added")
    parser.add_argument("--commit", help="the commit to record, where the files are no git repository")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    args = parser.parse_args()
    device = torch.device(args.device)
    memory = torch.cuda.get_device_properties(0).total_memory if device.type == "cuda" else 2**34
    known = {w.name: w for w in [*workloads(memory), *TRIAL]}
    if unknown := [name for name in args.case if name not in known]:
        parser.error(f"no case is called {unknown[0]!r}; there are {', '.join(known)}")
    found = read(args.output) or {"about": about(device, {}, args.commit), "runs": []}
    found["about"]["command"] = "python -m bench.gpu.kernel_times " + " ".join(sys.argv[1:])
    for name in args.case:
        run = {"label": args.label} | update_times(known[name], args.optimizer, device)
        found["runs"].append(run)
        print(f"{args.label:12} {name:32} {run['kernels_us']} {run['digest']}", flush=True)
        bench.save(found, args.output)


if __name__ == "__main__":
    main()
