"""Roofline model of a step's parts: bytes that must be moved and FLOPs of matrix products.

A part's lower bound is the time of its bytes at a copy's rate and of its FLOPs at a large matrix product's rate.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rec_kernels as rk
from bench.studies import compare_report
from rec_kernels.dlrm import checkpoint
from rec_kernels.dlrm.config import TrainConfig
from rec_kernels.dlrm.data import Batch, DataError, DataSet
from rec_kernels.dlrm.model import DLRM, dtype_of, flops_per_example
from rec_kernels.dlrm.model_factory import restored_model
from rec_kernels.dlrm.reader import Reader
from rec_kernels.dlrm.runs import Records

_COPIED = 1 << 26  # bytes
_WIDTH = 512  # of the matrices
_TURNS = 5


def costs(model: DLRM, batches: Sequence[Batch], flops_per_example: int) -> dict[str, dict[str, int]]:
    """Bytes and floating-point operations of the parts of a step with ``batches``, as separate kernels have them.

    forward: ids, rows of distinct bags and pooled embeddings once; inputs, parameters among them, and outputs of each
    operation of the dense side. backward: twice the dense side's bytes and operations, which is a gradient of the input
    and one of the parameters; the pooled embeddings' gradients, and each distinct row of the step and its state read
    and written; the parameters' gradients of every batch but the first added to those before, two read and one written.
    optimizer: parameters, gradients and two moments of the layers read, all but the gradients written. Row caches and
    checks of ids are not counted.
    """
    joined = [batch.joined() for batch in batches]
    lookups, rows, pooled = _of_tables(model, [batch.features for batch in joined])
    layers = sum(_of_layers(model, batch) for batch in joined)
    weights = sum(p.numel() * p.element_size() for p in model.dense_parameters())
    flops = flops_per_example * sum(len(batch.label) for batch in batches)
    added = 3 * weights * (len(batches) - 1)
    return {
        "forward": {"bytes": lookups + pooled + layers, "flops": flops},
        "backward": {"bytes": pooled + 2 * rows + 2 * layers + added, "flops": 2 * flops},
        "optimizer": {"bytes": 7 * weights, "flops": 0},
    }


def _of_tables(
    model: DLRM, features: Sequence[rk.KeyedJaggedTensor | rk.InverseKeyedJaggedTensor]
) -> tuple[int, int, int]:
    """Bytes of a step's batches: rows that lookups read, distinct rows with their state, pooled embeddings."""
    kept = [f.bags() if isinstance(f, rk.InverseKeyedJaggedTensor) else f for f in features]
    state = {
        table["name"]: table["state_bytes"] / table["num_embeddings"] for table in model.embeddings.memory_report()
    }
    read = changed = 0
    for table in model.embeddings.tables:
        row = sum(part.row_bytes for part in table.stored)
        of_row = row + sum(state[part.name] for part in table.stored)
        for name in table.feature_names:
            ids = torch.cat([f[name].values() for f in kept])
            read += ids.numel() * (ids.element_size() + row)
            changed += int(len(ids.unique()) * of_row)
    item = model.embeddings.output_dtype.itemsize
    rows = sum(f.stride() for f in features)
    return read, changed, rows * model.num_features * model.embedding_dim * item


class _Traffic(TorchDispatchMode):
    """Sums the bytes of inputs and outputs of operations, except views."""

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
    """Bytes of inputs, outputs and parameters of the dense side's operations in a forward."""
    # Pooled embeddings are zeros, because a lookup would change cache counters.
    sparse = torch.zeros(len(batch.label), model.num_features, model.embedding_dim, device=model.device)
    sparse = sparse.to(model.embeddings.output_dtype)
    with torch.no_grad(), _Traffic() as traffic:
        model.dense_side(batch.dense, sparse)
    return traffic.bytes


@functools.cache
def limits(threads: int, dtype: torch.dtype) -> dict[str, float]:
    """Measures bytes per second of a copy of 64 MiB (read and written) and FLOP/s of a matrix product of ``dtype``.

    The fastest of five turns counts, about 0.1 s in all.
    """
    source = torch.ones(_COPIED // 4)
    target = torch.empty_like(source)
    a = torch.ones(_WIDTH, _WIDTH, dtype=dtype)
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


def profile(run: Path, data: DataSet | None = None) -> dict:
    """The mean seconds per batch of each part of a run, and the times at this machine's limits.

    All values are per batch. Bytes and FLOPs are those of the last step of full batches, on the model of the run's
    checkpoint.

    Args:
        run: folder of the run.
        data: the data set; by default the one that the run's config names.

    Raises:
        DataError: the run is not finished, ran on a GPU, whose times of parts are the host's, has no full batch, or its
            data or checkpoint is missing or invalid.
    """
    config, records = TrainConfig.read(run), Records(run).read()
    train, test = ([r for r in records if r["kind"] == kind] for kind in ("train", "test"))
    if not test:
        raise DataError(f"{run} is not finished: a profile needs a run that was tested")
    if test[-1].get("device", "cpu") != "cpu":
        raise DataError(
            f"{run} was trained on {test[-1]['device']}, where only the host's part of each time is known: train on "
            "the CPU"
        )
    config = dataclasses.replace(config, device="cpu")
    reader = Reader(config, data, run)
    step = last_step(reader, config)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    model = restored_model(config, reader, run, checkpoint.read(run, config, reader))
    try:
        flops = flops_per_example(model, reader.features, reader.num_dense)
        return beside_limits(model, step, train, flops)
    finally:
        model.embeddings.close()


def last_step(data: Reader, config: TrainConfig) -> list[Batch]:
    """The batches of an epoch's last step of full batches only, or all full batches if they are fewer than a step.

    Raises:
        DataError: the data has no full batch.
    """
    whole = data.num_rows("train") // config.batch_size
    count = min(config.accumulate, whole)
    if not whole:
        raise DataError(f"data set {data.name!r} has no whole batch: batch_size is {config.batch_size}")
    first = (whole // count - 1) * count
    return list(itertools.islice(data.batches("train", config.batch_size, first), count))


def beside_limits(model: DLRM, step: Sequence[Batch], train: Sequence[dict], flops_per_example: int) -> dict:
    """The profile of a run.

    Args:
        step: full batches of one step.
        train: the records of the training. flops_per_example: of a row's forward.
    """
    limit, parts = limits(torch.get_num_threads(), dtype_of(model.precision)), {}
    rows = len(step[0].label)
    batches = sum(r["examples"] for r in train) / rows
    for part, cost in costs(model, step, flops_per_example).items():
        per_batch = {key: number // len(step) for key, number in cost.items()}
        by_bytes, by_flops = (per_batch[key] / limit[f"{key}_per_second"] for key in ("bytes", "flops"))
        seconds, least = sum(r["seconds"][part] for r in train) / batches, max(by_bytes, by_flops)
        parts[part] = {"seconds": seconds, **per_batch, "least_seconds": least, "of_roofline": least / seconds}
    about = {"rows": rows, "batches_of_step": len(step), "precision": model.precision}
    return about | {"parts": parts, "limits": limit}


def markdown(profile: dict) -> str:
    """Formats a profile as text."""
    rows = [("part", "ms", "MB", "MFLOP", "ms at the limits", "share")]
    for part, cost in profile["parts"].items():
        ms, least = (f"{1000 * cost[key]:.3f}" for key in ("seconds", "least_seconds"))
        sizes = f"{cost['bytes'] / 1e6:,.1f}", f"{cost['flops'] / 1e6:,.0f}"
        rows.append((part, ms, *sizes, least, f"{cost['of_roofline']:.0%}"))
    limit, count = profile["limits"], profile["batches_of_step"]
    of_step = "" if count == 1 else f" Of a step's {count} batches, this is the mean one; rows are updated once."
    return compare_report.table(rows) + (
        f"\n\nA batch of {profile['rows']:,} rows, in the mean of the run, beside what inputs and outputs of operations"
        ",\nparameters, ids, rows of tables and optimizer state take at a copy's "
        f"{limit['bytes_per_second'] / 1e9:,.1f} GB/s, or its products at a large one's\n"
        f"{limit['flops_per_second'] / 1e9:,.0f} GFLOP/s, in {profile['precision']}.{of_step}"
    )
