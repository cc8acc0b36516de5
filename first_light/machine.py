"""Prints, as its last line, what this machine is in JSON: GPU, driver, torch, Triton, rec_kernels and its libraries."""

from __future__ import annotations

import json
import os
import platform

import torch

import rec_kernels as rk


def about() -> dict[str, object]:
    """Facts about the machine that every report states."""
    found: dict[str, object] = {"cpus": os.cpu_count(), "system": platform.platform(), "cuda": torch.version.cuda}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        torch.ones(1, device="cuda").item()  # it works at all
        found |= {
            "gpu": properties.name,
            "gpus": torch.cuda.device_count(),
            "compute_capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": properties.L2_cache_size,
        }
    return found | rk.build_info()


if __name__ == "__main__":
    print(json.dumps(about()))
