"""Helpers of test_processes.py and test_out_of_memory.py: a collection, its batches, its bits."""

from __future__ import annotations

import hashlib
import os
import resource
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

import rec_kernels as rk
from rec_kernels.testing import jagged_batch

ROOT = Path(__file__).parents[1]
KEYS = ["f", "g", "h"]
ROWS = 2000


def run_script(code: str, *arguments: object, timeout: float = 300, **environment: str) -> subprocess.CompletedProcess:
    """Runs code in another Python process, which finds this folder's modules."""
    paths = os.pathsep.join([str(Path(__file__).parent), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": paths} | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def collection(optimizer: rk.FusedOptimizer, cache: rk.RowCache | None = None) -> rk.EmbeddingBagCollection:
    """Tables of three formats."""
    torch.manual_seed(0)
    formats = zip(KEYS, ["fp32", "int8", "bf16"], strict=True)
    tables = [rk.EmbeddingBagConfig(ROWS, 24, name=k, feature_names=[k], format=format) for k, format in formats]
    return rk.EmbeddingBagCollection(tables, optimizer=optimizer, cache=cache)


def batch(size: int, seed: int = 0) -> rk.KeyedJaggedTensor:
    """A batch of about four ids per bag."""
    values, offsets = jagged_batch([ROWS] * len(KEYS), size, ids="zipf", seed=seed)
    return rk.KeyedJaggedTensor(KEYS, values, offsets=offsets)


def step(tables: rk.EmbeddingBagCollection, given: rk.KeyedJaggedTensor) -> Tensor:
    """Takes one training step; returns its output."""
    out = tables(given).values()
    out.square().sum().backward()
    return out.detach()


def state(tables: rk.EmbeddingBagCollection) -> dict[str, Tensor]:
    """Copies of the tensors in a checkpoint."""
    return {name: t.clone() for name, t in tables.state_dict().items() if isinstance(t, Tensor)}


def address_space() -> int:
    """Bytes of address space that this process uses."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def limit_address_space(bytes: int | None) -> None:
    """Limits the address space of this process; None: to the hard limit."""
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (most if bytes is None else bytes, most))


def digest(tensors: list[Tensor]) -> str:
    """Digest of all bits."""
    found = hashlib.sha256()
    for t in tensors:
        found.update(t.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def trained() -> str:
    """Digest of the outputs and state of two steps, which must be the same in every process."""
    tables = collection(rk.Adam(lr=0.01), rk.RowCache(0.1))
    outputs = [step(tables, batch(700, seed)) for seed in range(2)]
    return digest([*outputs, *state(tables).values()])
