"""Compares measurements with the predictions committed before them."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from bench.gpu.model import GPUS

PATH = Path(__file__).resolve().parents[1] / "results" / "gpu_predictions.json"


@functools.cache
def load(path: Path = PATH) -> dict:
    """Reads the recorded predictions ("about", "kernels", "gpus"); ``python -m bench.gpu.predict --record`` writes
    them."""
    return json.loads(path.read_text())


def gpu_of(device: str) -> str | None:
    """Returns the predictions' name of a device: "NVIDIA H100 80GB HBM3" -> "H100".

    None: there are none, as of the PCIe and NVL cards of these names, which have other memory, of a slice (MIG) of a
    card, and of GH200.
    """
    words = set(device.split())
    return None if words & {"PCIe", "NVL", "MIG"} else next((name for name in GPUS if name in words), None)


def find(device: str | None, case: str, operation: str) -> dict | None:
    """The prediction of an operation, as the report names it, on a device."""
    gpu = gpu_of(device) if device else None
    rows = load()["gpus"][gpu] if gpu and PATH.exists() else []
    return next((row for row in rows if (row["case"], row["operation"]) == (case, operation)), None)


def hold(measured: dict[str, object], prediction: dict) -> dict[str, object]:
    """Compares a prediction with our measured row: "ms", "error" (a factor), "measured_ms", and whether it "held"."""
    ms = measured.get("graph_ms", measured["ms"])
    held = prediction["ms"] / prediction["error"] <= ms <= prediction["ms"] * prediction["error"]
    return {"ms": prediction["ms"], "error": prediction["error"], "measured_ms": ms, "held": held}


def beside(case: dict, device: str | None) -> dict[str, dict]:
    """Returns operation -> ``hold`` of a measured case, without our operations that failed or have no prediction.

    A backward's time is that of the ops, which a graph holds without autograd.
    """
    found: dict[str, dict] = {}
    for implementation in ("ours", "ops"):
        for row in case["results"]:
            if row["implementation"] != implementation or "ms" not in row:
                continue
            operation = ", ".join(filter(None, (row["operation"], row["optimizer"])))
            prediction = find(device, case["name"], operation)
            if prediction is not None and ("graph_ms" in row or operation not in found):
                found[operation] = hold(row, prediction)
    return found
