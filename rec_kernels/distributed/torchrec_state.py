"""States of this package's models by the names of TorchRec's checkpoints."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel

from rec_kernels.convert.external_tables import FAMILIES
from rec_kernels.convert.fbgemm_tables import OPTIMIZERS
from rec_kernels.distributed.sharded_collection import ShardedCollection
from rec_kernels.nn.collection import TableCollection
from rec_kernels.nn.tables.config import EmbeddingConfig
from rec_kernels.nn.tables.optimizers import Optimizer
from rec_kernels.ops.row_formats import FLOAT_DTYPES

#: TorchRec's names of optimizer state, which are FBGEMM's. Adam and its variants need the step, which is missing there.
_NAMES: dict[type[Optimizer], dict[str, str]] = {
    FAMILIES[family]: {kind: f"momentum{i}" for i, kind in enumerate(kinds, 1)}
    for family, kinds in OPTIMIZERS.values()
    if "exp_avg" not in kinds
}


class TorchRecState(NamedTuple):
    """State of a model by TorchRec's names.

    Args:
        model: as ``DistributedModelParallel.state_dict()`` with TorchRec's own sharders. optimizer: as its
            ``fused_optimizer.state_dict()``, without parameter groups; it has no tables with SGD, which has no state.
    """

    model: dict[str, Any]
    optimizer: dict[str, dict[str, dict[str, Any]]]


def torchrec_state(model: nn.Module) -> TorchRecState:
    """Returns the state of a model by the names of TorchRec's fused kernels; tensors share the model's memory.

    ``torch.distributed.checkpoint.load`` into it loads a checkpoint that TorchRec has written, of any plan, and
    ``save`` writes one that TorchRec loads. It lacks the collections' ``step``.

    Args:
        model: with sharded collections in ``DistributedModelParallel``, or with unsharded ones.

    Raises:
        ValueError: a collection's optimizer is not SGD, RowwiseAdagrad or Adagrad with float32 state; a table's rows
            are not fp32, fp16 or bf16, or it has a compression; a collection has a row cache. TypeError: ``model`` is
            not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    root = model.module if isinstance(model, DistributedModelParallel) else model
    whole, optimizer, weights = dict(model.state_dict()), {}, set()
    for name, module in root.named_modules():
        if not isinstance(module, (ShardedCollection, TableCollection)):
            continue
        own = module.shards if isinstance(module, ShardedCollection) else module
        prefix = f"{name}." if name else ""
        for table in module.tables:
            kinds = _checked(name, own, table)
            held = f"{prefix}{own._holder}.{table.name}"
            state = {f"{table.name}.{theirs}": whole[f"{held}.{kind}"] for kind, theirs in kinds.items()}
            weights.add(f"{held}.weight")
            if state:
                optimizer[f"{held}.weight"] = state
        whole = {key: t for key, t in whole.items() if key in weights or not key.startswith(prefix)}
    return TorchRecState(whole, {"state": optimizer})


def _checked(name: str, collection: TableCollection, table: EmbeddingConfig) -> dict[str, str]:
    """TorchRec's name for each kind of optimizer state of a table; ValueError if there is none."""
    optimizer = table.optimizer or collection.optimizer
    names = {} if optimizer is None else _NAMES.get(type(optimizer))
    if names is None or getattr(optimizer, "state_dtype", torch.float32) != torch.float32:
        raise ValueError(
            f"table {table.name!r} of collection {name!r}: TorchRec's checkpoints cannot hold the whole state "
            f"of {optimizer}: the optimizer must be rk.SGD, rk.Adagrad with state_dtype=torch.float32, "
            "rk.RowwiseAdagrad or None"
        )
    if collection.row_cache is not None:
        raise ValueError(f"collection {name!r} has a row cache, which would miss rows that are loaded in place")
    if table.format not in FLOAT_DTYPES or table.compression is not None:
        raise ValueError(
            f"table {table.name!r} of collection {name!r}: TorchRec's tables must be fp32, fp16 or bf16 without "
            f"compression, got format {table.format!r} and compression {table.compression}"
        )
    return names
