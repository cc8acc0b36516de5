"""Batches, models and comparisons for the tests of converters."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import rec_kernels as rk

SIZES = {"user": (30, 8), "item": (12, 16), "shop": (5, 4)}
BATCH = 6
# Table of each feature. FBGEMM's CPU kernels require adjacent features per table.
FEATURES = [0, 0, 1, 2]


def ids_of(step: int, rows: int, width: int = 4) -> Tensor:
    """Returns ids [BATCH, width], which depend only on the step."""
    return torch.randint(rows, (BATCH, width), generator=torch.Generator().manual_seed(step))


def jagged(step: int) -> rk.KeyedJaggedTensor:
    """Bags of 4 ids for every table; a table's feature is its name followed by f."""
    ids = torch.cat([ids_of(step, rows).flatten() for rows, _ in SIZES.values()])
    return rk.KeyedJaggedTensor([f"{n}f" for n in SIZES], ids, lengths=torch.full((len(SIZES) * BATCH,), 4))


def loss_of(output: Tensor) -> Tensor:
    """A loss with a different gradient per column, of the same magnitude in every update."""
    return (output - torch.linspace(-1, 1, output.shape[-1])).square().mean()


def train(look_up: Callable[[int], Tensor], steps: range, optimizers: Sequence[Any] = ()) -> list[float]:
    """Trains, and returns the losses; ``look_up`` returns the output for a step's batch."""
    losses = []
    for step in steps:
        loss = loss_of(look_up(step))
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses


def layer_lookup(layer: nn.Module) -> Callable[[int], Tensor]:
    """Returns the lookup function of a layer of torch.nn or of this package."""
    return lambda step: layer(ids_of(step, 30))


def same_bits(ours: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    """Returns True if two states have equal names and bits."""
    return list(ours) == list(others) and all(torch.equal(t, others[n]) for n, t in ours.items())


def trained_copy(collection: Any) -> Any:
    """A collection with the same tables and options, different rows and no optimizer state."""
    other = type(collection)(collection.tables, optimizer=collection.optimizer)
    with torch.no_grad():
        for weight in other._tables.weights():
            weight.fill_(7)
    return other


def round_trips(ours: Any, theirs: nn.Module, trainer: Any, *, counts_steps: bool) -> bool:
    """Returns True if export to ``theirs`` and import keep every bit, except the step unless ``counts_steps``."""
    rk.export_tables(ours, theirs, trained_by=trainer)
    back = trained_copy(ours)
    rk.import_tables(back, theirs, trained_by=trainer)
    state = ours.state_dict()
    if not counts_steps:
        state["step"].zero_()
    return same_bits(state, back.state_dict())


def fbgemm(optimizer: str, *, pooling: str = "MEAN", on_device: bool = False, **options: Any) -> Any:
    """FBGEMM's module of three tables.

    Args:
        on_device: whether to allocate as for a GPU, which optimizers with moments require. On the CPU such a module
            cannot look up.
    """
    with contextlib.redirect_stdout(io.StringIO()):
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        where = (
            (EmbeddingLocation.DEVICE, ComputeDevice.CUDA) if on_device else (EmbeddingLocation.HOST, ComputeDevice.CPU)
        )
        sizes = list(SIZES.values()) if pooling != "NONE" else [(rows, 8) for rows, _ in SIZES.values()]
        module = SplitTableBatchedEmbeddingBagsCodegen(
            [(*size, *where) for size in sizes],
            feature_table_map=FEATURES,
            optimizer=EmbOptimType[optimizer],
            pooling_mode=PoolingMode[pooling],
            device=torch.device("cpu"),
            **{"learning_rate": 0.25, "eps": 2**-10, **options},
        )
    for weight in module.split_embedding_weights():
        weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)))
    return module
