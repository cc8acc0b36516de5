"""Functions of test_distributed_cache.py for each rank and one process: sharded collections with a row cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import distributed_sequence_cases as sequences
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed_backward_cases import train_together, train_weighted
from distributed_cases import Case, batch, blocks, collection, restore, sharded, train
from torch import Tensor, nn


def train_cached(case: Case, model: nn.Module, tables: Any, ranks: list[int]) -> list[Tensor]:
    """Trains with one lookup, several, a block, and weights that require gradients; returns outputs, then gradients.

    Reads the state in between, which encodes rows.
    """
    outputs = train(case, model, ranks)
    tables.state_dict()
    outputs += train_together(replace(case, steps=1), model, ranks)
    with torch.no_grad():
        outputs.append(model.eval()(batch(case, 7, ranks)))
    model.train()
    return outputs + train_weighted(replace(case, steps=3), model, tables, ranks)


def run(case: Case) -> tuple[list[Tensor], dict[str, Any], list[dict]]:
    """Returns this rank's results of ``train_cached``, its blocks, and its shards' memory report."""
    model = sharded(case, collection(case))
    tables = model.module.ebc
    return (
        train_cached(case, model, tables, [dist.get_rank()]),
        blocks(tables.state_dict()),
        tables.shards.memory_report(),
    )


def reshard(case: Case, other: Case, folder: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Trains, saves, loads into a trained model with another plan, and trains on.

    Returns:
        The blocks when saved, after loading, and after another step.
    """
    rank = dist.get_rank()
    model = sharded(case, collection(case))
    train(case, model, [rank])
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    loaded = sharded(other, collection(other))
    train(replace(other, steps=2), loaded, [rank])
    restore(loaded, folder)
    read = blocks(loaded.module.ebc.state_dict())
    train(replace(other, steps=1), loaded, [rank])
    return blocks(model.module.ebc.state_dict()), read, blocks(loaded.module.ebc.state_dict())


def counters(case: Case) -> list[list[tuple[int, int]]]:
    """Returns lookups and insertions of this rank's shards after a training step, then after eval() and no_grad()."""
    model, rank = sharded(case, collection(case)), dist.get_rank()

    def report() -> list[tuple[int, int]]:
        return [(t["lookups"], t["inserted"]) for t in model.module.ebc.shards.memory_report()]

    found = []
    train(replace(case, steps=1), model, [rank])
    found.append(report())
    model.eval()
    model(batch(case, 1, [rank]))
    model.train()
    with torch.no_grad():
        model(batch(case, 2, [rank]))
    found.append(report())
    return found


def sequence(case: sequences.Sequences) -> tuple[list, dict[str, Any], int]:
    """Returns outputs, blocks and the number of cached rows of sequences on this rank."""
    model = sequences.sharded(case, sequences.collection(case))
    outputs = sequences.train(case, model, [dist.get_rank()])
    tables = model.module.sequences
    return outputs, blocks(tables.state_dict()), sum(t["cached_rows"] for t in tables.shards.memory_report())
