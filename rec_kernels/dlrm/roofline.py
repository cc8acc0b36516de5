"""What the parts of a step cost at the machine's limits: bytes that must move, products that must be computed.

A part takes at least as long as its bytes at the rate of a copy, and as its products at that of a large matrix product.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rec_kernels as rk
from rec_kernels.dlrm.data import Batch
from rec_kernels.dlrm.model import DLRM

_COPIED = 1 << 26  # bytes
_WIDTH = 512  # of the matrices
_TURNS = 5


def costs(model: DLRM, batch: Batch, flops_per_example: int) -> dict[str, dict[str, int]]:
    """Bytes and floating-point operations of the parts of a step with ``batch``, as separate kernels have them.

    forward: ids, rows of distinct bags and pooled embeddings once; inputs, parameters among them, and outputs of each
    operation of the dense side. backward: twice the dense side's bytes and operations, which is a gradient of the input
    and one of the parameters; the pooled embeddings' gradients, and each distinct row and its state read and written.
    optimizer: parameters, gradients and two moments of the layers read, all but the gradients written. Row caches and
    checks of ids are not counted.
    """
    joined = batch.joined()
    lookups, rows, pooled = _of_tables(model, joined.features)
    layers = _of_layers(model, joined)
    weights = sum(p.numel() * p.element_size() for p in model.dense_parameters())
    flops = flops_per_example * len(batch.label)
    return {
        "forward": {"bytes": lookups + pooled + layers, "flops": flops},
        "backward": {"bytes": pooled + 2 * rows + 2 * layers, "flops": 2 * flops},
        "optimizer": {"bytes": 7 * weights, "flops": 0},
    }


def _of_tables(model: DLRM, features: rk.KeyedJaggedTensor | rk.InverseKeyedJaggedTensor) -> tuple[int, int, int]:
    """Bytes of what a lookup reads, of distinct rows with their state, and of pooled embeddings."""
    kept = features.bags() if isinstance(features, rk.InverseKeyedJaggedTensor) else features
    state = {table["name"]: table["state_bytes"] / table["num_embeddings"] for table in model.memory_report()}
    read = changed = 0
    for table in model.embeddings.tables:
        row = sum(part.row_bytes for part in table.stored)
        of_row = row + sum(state[part.name] for part in table.stored)
        for name in table.feature_names:
            ids = kept[name].values()
            read += ids.numel() * (ids.element_size() + row)
            changed += int(len(ids.unique()) * of_row)
    item = model.embeddings.output_dtype.itemsize
    return read, changed, features.stride() * model.num_features * model.embedding_dim * item


class _Traffic(TorchDispatchMode):
    """Adds up the bytes of inputs and outputs of operations, but for views of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        given, made = ([t for t in tree_leaves(x) if isinstance(t, Tensor)] for x in ((args, kwargs), output))
        places = {t.untyped_storage().data_ptr() for t in given}
        if not made or any(t.untyped_storage().data_ptr() not in places for t in made):
            self.bytes += sum(t.numel() * t.element_size() for t in (*given, *made))
        return output


def _of_layers(model: DLRM, batch: Batch) -> int:
    """Bytes of inputs and outputs of the dense side's operations, parameters among them, in a forward."""
    # Pooled embeddings of zeros: a lookup would count in caches.
    sparse = torch.zeros(len(batch.label), model.num_features, model.embedding_dim, device=model.device)
    sparse = sparse.to(model.embeddings.output_dtype)
    with torch.no_grad(), _Traffic() as traffic:
        model.dense_side(batch.dense, sparse)
    return traffic.bytes


@functools.cache
def limits(threads: int) -> dict[str, float]:
    """Of this machine with so many threads: bytes a second of a copy of 64 MiB, read and write, and operations a second
    of a float32 matrix product. Takes about a tenth of a second; the fastest of five turns."""
    source = torch.ones(_COPIED // 4)
    target = torch.empty_like(source)
    a = torch.ones(_WIDTH, _WIDTH)
    return {
        "bytes_per_second": 2 * _COPIED / _fastest(lambda: target.copy_(source)),
        "flops_per_second": 2 * _WIDTH**3 / _fastest(lambda: a @ a),
    }


def _fastest(work: Callable[[], object]) -> float:
    work()
    times = []
    for _ in range(_TURNS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def record(model: DLRM, batch: Batch | None, accumulate: int, train: Sequence[dict], flops_per_example: int) -> dict:
    """For the test record: "profile", the seconds of each part of a step, in the mean, beside those at the limits.

    Nothing on a GPU, whose times of parts are the host's, nor without a batch.

    Args:
        batch: one of the training, whole. accumulate: batches of a step.
        train: the records of the training. flops_per_example: of a row's forward.
    """
    if batch is None or model.device.type != "cpu":
        return {}
    limit, parts = limits(torch.get_num_threads()), {}
    batches = sum(r["examples"] for r in train) / len(batch.label)
    for part, cost in costs(model, batch, flops_per_example).items():
        per_batch = cost if part != "optimizer" else {key: number // accumulate for key, number in cost.items()}
        by_bytes, by_flops = (per_batch[key] / limit[f"{key}_per_second"] for key in ("bytes", "flops"))
        seconds, least = sum(r["seconds"][part] for r in train) / batches, max(by_bytes, by_flops)
        parts[part] = {"seconds": seconds, **per_batch, "least_seconds": least, "of_roofline": least / seconds}
    return {"profile": {"rows": len(batch.label), "parts": parts, "limits": limit}}
