"""Launches the five kernels whose counters are worth most; `--profile FILE` does so within Nsight Compute.

`pool_kernel` sums the rows of a bag: 128 columns in fp32, int8 and int4. `finish_kernel` updates the rows that a
batch names, with row-wise Adagrad: 128 and 16 columns in fp32. Between cudaProfilerStart and cudaProfilerStop each runs
once, after the same call has run before.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import torch

import rec_kernels as rk

#: Kernels that Nsight Compute looks at: names in csrc/*/cuda.
KERNELS = ("pool_kernel", "finish_kernel")
SECTIONS = ("SpeedOfLight", "LaunchStats", "Occupancy", "MemoryWorkloadAnalysis", "MemoryWorkloadAnalysis_Tables")
SECTIONS += ("SchedulerStats", "WarpStateStats", "InstructionStats", "SourceCounters")
#: Tables, samples, ids of a bag, rows of a table; and of a trial without a GPU.
SIZES, TRIAL = (8, 2048, 20, 500_000), (2, 3, 2, 20)
CASES = (("fp32", 128, False), ("int8", 128, False), ("int4", 128, False), ("fp32", 128, True), ("fp32", 16, True))


@contextmanager
def _profiled(device: str):
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
    yield
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()


def launch(device: str, row_format: str, columns: int, train: bool) -> None:
    """A lookup of uniform ids, or the update after one, once unobserved and once observed."""
    tables, samples, bag, rows = SIZES if device == "cuda" else TRIAL
    names = [f"feature_{t}" for t in range(tables)]
    configs = [rk.EmbeddingBagConfig(rows, columns, name=n, feature_names=[n], format=row_format) for n in names]
    bags = rk.EmbeddingBagCollection(configs, optimizer=rk.RowwiseAdagrad(lr=0.01), device=device)
    offsets = torch.arange(0, tables * samples * bag + 1, bag, device=device)
    for observed in (False, True):
        ids = torch.randint(rows, (tables * samples * bag,), device=device)
        batch = rk.KeyedJaggedTensor(names, ids, offsets=offsets)
        if not train:
            with torch.no_grad(), _profiled(device if observed else "unobserved"):
                bags(batch)
            continue
        loss = bags(batch).values().sum()
        with _profiled(device if observed else "unobserved"):
            loss.backward()


def find_profiler() -> str | None:
    """Nsight Compute's ncu: on the PATH, beside nvcc, or where its package puts it."""
    found, nvcc = shutil.which("ncu"), shutil.which("nvcc")
    if found:
        return found
    beside = [Path(nvcc).resolve().parent / "ncu"] if nvcc else []
    places = [*beside, *sorted(Path("/opt/nvidia").glob("nsight-compute/*/ncu"), reverse=True)]
    return next((str(path) for path in places if path.exists()), None)


def profile(report: Path, device: str) -> int:
    """Runs this file within Nsight Compute and prints what it found; the exit status.

    Args:
        report: the file to write, which Nsight Compute's window opens: a name ending in .ncu-rep.
    """
    ncu = find_profiler()
    if ncu is None:
        print("Nsight Compute is neither on the PATH nor beside nvcc: left out")
        return 0
    chosen = [option for section in SECTIONS for option in ("--section", section)]
    # Clocks as they are: a machine may refuse to have them fixed. The program's own kernels only, which it marks.
    command = [ncu, *chosen, "--profile-from-start", "off", "--clock-control", "none", "--force-overwrite"]
    command += ["--kernel-name", f"regex:{'|'.join(KERNELS)}", "--export", str(report)]
    status = subprocess.run([*command, sys.executable, "-m", "first_light.kernels", "--device", device]).returncode
    if report.exists():
        subprocess.run([ncu, "--import", str(report), "--page", "details"])
    return status


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m first_light.kernels", description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--profile", type=Path, metavar="FILE", help="within Nsight Compute, which writes FILE (.ncu-rep)"
    )
    options = parser.parse_args()
    if options.profile:
        return profile(options.profile, options.device)
    torch.manual_seed(0)
    for row_format, columns, train in CASES:
        launch(options.device, row_format, columns, train)
        print(f"{'finish' if train else 'pool'}, {row_format}, {columns} columns: launched", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
