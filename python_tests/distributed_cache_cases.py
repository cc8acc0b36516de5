"""Sharded collections with a row cache on each rank: what test_distributed_cache.py runs there and in one process."""

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
    """Steps with one lookup, with several, in a block, and with weights that want gradients; outputs, then gradients.

    Rows are encoded in between, as a state needs them.
    """
    outputs = train(case, model, ranks)
    tables.state_dict()
    outputs += train_together(replace(case, steps=1), model, ranks)
    with torch.no_grad():
        outputs.append(model.eval()(batch(case, 7, ranks)))
    model.train()
    return outputs + train_weighted(replace(case, steps=3), model, tables, ranks)


def run(case: Case) -> tuple[list[Tensor], dict[str, Any], list[dict]]:
    """Returns what ``train_cached`` has on this rank, blocks, and the report of its shards."""
    model = sharded(case, collection(case))
    tables = model.module.ebc
    return (
        train_cached(case, model, tables, [dist.get_rank()]),
        blocks(tables.state_dict()),
        tables.shards.memory_report(),
    )


def reshard(case: Case, other: Case, folder: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Trains, saves, loads in place into a model of another plan that has trained before, and goes on.

    Returns:
        The blocks when saved, when loaded, and after another step.
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
    """Lookups and insertions of this rank's shards after a training step, one in eval(), and one without gradients."""
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
    """Outputs, blocks, and rows in slots, of sequences on this rank."""
    model = sequences.sharded(case, sequences.collection(case))
    outputs = sequences.train(case, model, [dist.get_rank()])
    tables = model.module.sequences
    return outputs, blocks(tables.state_dict()), sum(t["cached_rows"] for t in tables.shards.memory_report())
