"""Writes a run's JSON file, markdown table and picture."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import bench
import rec_kernels as rk
from bench import RESULTS, ROOT
from bench.gpu import published, recorded
from bench.gpu.model import GPUS
from bench.peers import fbgemm_version

OURS = "ours"
#: Our ops without autograd, for the backward's time as a graph replay.
OPS = "ops"
#: cuBLAS reads this when it starts; without it, torch's products may differ between runs.
CUBLAS, CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"


def output_of(*command: str) -> str:
    """Output of a command, stripped; empty where it is missing or fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def _driver() -> str | None:
    printed = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    if printed:
        return printed.splitlines()[0]
    file = Path("/proc/driver/nvidia/version")
    found = re.search(r"\d+\.\d+(\.\d+)?", file.read_text()) if file.exists() else None
    return found[0] if found else None


def commit_here() -> str:
    """The commit of the files, and whether they differ from it."""
    found = bench.commit()
    changes = " and changes" if found["dirty"] else ""
    return f"{found['commit']}{changes}" if found["commit"] else "unknown: no git repository (--commit names it)"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _gpu() -> dict[str, object]:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "driver": _driver(),
    }


def about(device: torch.device, left_out: dict[str, str], commit: str | None) -> dict[str, object]:
    """Describes machine, versions and commit of the figures; ``left_out``: missing implementations and the reasons."""
    built = rk.build_info()
    return {
        "command": "python -m bench.gpu " + " ".join(sys.argv[1:]),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "commit": commit or commit_here(),
        "gpu": _gpu() if device.type == "cuda" else None,
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "fbgemm": fbgemm_version(),
        "machine": platform.machine(),
        **{key: built[key] for key in ("version", "torch", "python", "cuda_unavailable", "cuda_architectures")},
        "cublas_workspace": os.environ.get(CUBLAS),
        "left_out": left_out,
    }


def default_output(gpu: str) -> Path:
    """bench/results/gpu-<name>.json, the name as a file name: "NVIDIA H200" -> gpu-nvidia-h200.json."""
    return RESULTS / f"gpu-{re.sub(r'[^a-z0-9]+', '-', gpu.lower()).strip('-')}.json"


def read(path: Path) -> dict[str, Any]:
    """Returns the content of a result file; {} if it does not exist."""
    return json.loads(path.read_text()) if path.exists() else {}


def label(row: dict[str, object]) -> str:
    """Returns a label such as "backward, sgd"."""
    return ", ".join(filter(None, (row["operation"], row["optimizer"])))


def by_operation(case: dict[str, object]) -> dict[str, dict[str, dict]]:
    """Groups the rows of a case: operation -> implementation -> row."""
    found: dict[str, dict[str, dict]] = {}
    for row in case["results"]:
        found.setdefault(label(row), {})[row["implementation"]] = row
    return found


def _ms(ms: float) -> str:
    return f"{ms:.4f}" if ms < 1 else f"{ms:.2f}"


def _ours_cells(row: dict | None) -> list[str]:
    if row is None or "error" in row:
        return ["failed" if row else "", "", "", ""]
    graph = _ms(row["graph_ms"]) if "graph_ms" in row else ""
    rates = [f"{row['gb_per_s'][c]:.0f} ({row['percent_of_copy'][c]:.0f} %)" for c in ("all", "unique")]
    return [_ms(row["ms"]), graph, *rates]


def _ours(rows: dict[str, dict]) -> dict | None:
    """Returns our row; the replay of a backward, captured only without autograd, comes from the ops."""
    ours, ops = rows.get(OURS), rows.get(OPS, {})
    if ours is None or "error" in ours or "graph_ms" in ours or "graph_ms" not in ops:
        return ours
    return ours | {key: ops[key] for key in ("graph_ms", "gb_per_s", "percent_of_copy")}


def _peer_cell(row: dict | None, ours: dict | None) -> str:
    if row is None:
        return ""
    if "error" in row:
        return "failed"
    if ours is None or "error" in ours:
        return _ms(row["ms"])
    # Compares replays with replays, and calls with calls.
    which = "graph_ms" if "graph_ms" in row and "graph_ms" in ours else "ms"
    return f"{_ms(row[which])}{' graph' if which == 'graph_ms' else ''} ({row[which] / ours[which]:.2f}x)"


def table(found: dict[str, object]) -> str:
    """The figures in Markdown: a line per case and operation, then the failures with reasons."""
    names = {row["implementation"] for case in found["cases"] for row in case["results"]}
    peers = sorted(names - {OURS, OPS}, key=_column)
    head = ["case", "operation", "ours, ms", "graph, ms", "GB/s, all rows", "GB/s, unique rows", *peers]
    said = [
        name for name, any_of in _SAID.items() if any(any_of(c, o) for c in found["cases"] for o in by_operation(c))
    ]
    lines = []
    for case in found["cases"]:
        for number, (operation, rows) in enumerate(by_operation(case).items()):
            ours = _ours(rows)
            others = [_peer_cell(rows.get(peer), ours) for peer in peers]
            lines.append(["" if number else case["name"], operation, *_ours_cells(ours), *others])
            lines[-1] += [_SAID[name](case, operation) for name in said]
    text = [bench.table(head + said, lines, texts=("operation", *said))]
    failed = [line for case in found["cases"] for line in _failures(case)]
    held = [p["held"] for case in found["cases"] for p in case.get("predicted", {}).values()]
    if held:
        text += ["", f"Predictions of our times: {sum(held)} of {len(held)} held."]
    return "\n".join([*text, *(["", "Not measured:", *_grouped(failed)] if failed else [])])


def _predicted_cell(case: dict, operation: str) -> str:
    """ "0.345, held (within 1.4x)"."""
    found = case.get("predicted", {}).get(operation)
    if found is None:
        return ""
    return f"{_ms(found['ms'])}, {'held' if found['held'] else 'missed'} (within {found['error']}x)"


def _published_cell(case: dict, operation: str) -> str:
    found = published.best(case["name"], operation)
    return published.said(found) if found else ""


#: Predictions for an operation by column name; empty columns are omitted.
_SAID = {"predicted, ms": _predicted_cell, "published": _published_cell}


def _failures(case: dict[str, object]) -> list[str]:
    found = [f"- {case['name']}: {case['error']}"] if "error" in case else []
    for row in case["results"]:
        reasons = [row[key] for key in ("error", "graph_error") if key in row]
        found += [f"- {case['name']}, {label(row)}, {row['implementation']}: {reason}" for reason in reasons]
    return found


def _grouped(lines: list[str], most: int = 20) -> list[str]:
    """The first lines and the number of others, which are in the JSON file."""
    return lines[:most] + ([f"- and {len(lines) - most} more, in the JSON file"] if len(lines) > most else [])


def picture(found: dict[str, object], path: Path) -> str:
    """Draws embedding_bag: a panel per operation with bars for every case, rates as shares of the copy's.

    Unique rows are counted. A cross stands for a figure that could not be taken, a line for what was predicted of ours,
    a diamond for the best figure that others have published of the shape.

    Returns:
        What happened, for the user: where the picture is, or why there is none.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no picture: matplotlib is not installed"
    measured = [(c["name"], by_operation(c)) for c in found["cases"] if c["op"] == "embedding_bag" and c["results"]]
    if not measured:
        return "no picture: nothing was measured"
    panels = list(dict.fromkeys(operation for _, rows in measured for operation in rows))
    figure = Figure(figsize=(max(8, 0.9 * len(measured)), 2.6 * len(panels)), layout="constrained")
    all_axes = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    names = sorted({name for _, rows in measured for found in rows.values() for name in found}, key=_column)
    for axes, operation in zip(all_axes, panels, strict=True):
        _draw(axes, names, [rows.get(operation, {}) for _, rows in measured])
        _draw_said(axes, found, operation, [name for name, _ in measured])
        axes.set_title(operation, loc="left")
    axes.set_xticks(range(len(measured)), [name for name, _ in measured], rotation=60, ha="right")
    if any(case.get("predicted") for case in found["cases"]):
        all_axes[0].plot([], [], "k--", linewidth=1, label="ours, predicted")
    if any(published.best(name, operation) for name, rows in measured for operation in rows):
        all_axes[0].plot([], [], "kD", markersize=4, label="others, published")
    all_axes[0].legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(names) + 2, frameon=False)
    where = found["about"]["gpu"]["name"] if found["about"]["gpu"] else "a CPU (a trial)"
    figure.suptitle(f"GB/s in % of a device-to-device copy's, unique rows counted: {where}")
    figure.savefig(path, dpi=110)
    return f"picture: {path}"


def _draw_said(axes, found: dict, operation: str, names: list[str]) -> None:
    """Draws predictions and published figures at their cases' positions, as shares of the copy's rate."""
    cases = {case["name"]: case for case in found["cases"]}
    gpu = GPUS.get(recorded.gpu_of((found["about"]["gpu"] or {}).get("name") or "") or "")
    for place, name in enumerate(names):
        ours = _ours(by_operation(cases[name]).get(operation, {}))
        if ours is None or "percent_of_copy" not in ours:
            continue
        percent = ours["percent_of_copy"]["unique"]
        if predicted := cases[name].get("predicted", {}).get(operation):
            height = percent * predicted["measured_ms"] / predicted["ms"]
            axes.hlines(height, place - 0.45, place + 0.45, "black", linestyles="dashed", linewidth=1)
        figure = published.best(name, operation)
        if figure is None:
            continue
        if figure.ms is not None:
            axes.plot([place], [percent * ours.get("graph_ms", ours["ms"]) / figure.ms], "kD", markersize=4)
        elif gpu is not None:
            # The published share counts every row and refers to the peak, so it is scaled to ours by the same ratio.
            of_peak = ours["gb_per_s"]["all"] / gpu.peak * 100
            axes.plot([place], [percent * figure.percent_of_peak / of_peak], "kD", markersize=4)


def _column(name: str) -> int:
    order = (OURS, OPS, "triton", "torch", "fbgemm")
    return order.index(name) if name in order else len(order)


def _draw(axes, names: list[str], cases: list[dict[str, dict]]) -> None:
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        places = [case + (number + 0.5) * width - 0.4 for case in range(len(cases))]
        rows = [case.get(name, {}) for case in cases]
        heights = [row.get("percent_of_copy", {}).get("unique", 0.0) for row in rows]
        axes.bar(places, heights, width, label=name)
        failed = [place for place, row in zip(places, rows, strict=True) if "error" in row]
        if failed:
            axes.plot(failed, [0.0] * len(failed), "kx", clip_on=False)
    axes.set_ylabel("% of copy")
