"""Checkpoints of TorchRec's fused kernels, and of this package with their names, on each rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import rec_kernels as rk

ROWS, DIM, KEYS = (40, 33, 57), 16, ["f0", "f1", "f2"]
OPTIMIZERS = {
    "exact_sgd": rk.SGD(lr=0.1),
    "exact_adagrad": rk.Adagrad(lr=0.1, eps=1e-6),
    "exact_row_wise_adagrad": rk.RowwiseAdagrad(lr=0.1, eps=1e-6),
}


@dataclass(frozen=True)
class Import:
    """A model that TorchRec and this package train.

    Args:
        optimizer: FBGEMM's name. pooled: whether lookups are pooled. kinds: TorchRec's sharding types of the tables.
    """

    optimizer: str = "exact_adagrad"
    pooled: bool = True
    kinds: tuple[str, ...] = ("table_wise", "row_wise", "row_wise")


class Model(nn.Module):
    """A collection followed by a layer."""

    def __init__(self, tables: nn.Module, pooled: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.tables, self.pooled = tables, pooled
        self.dense = nn.Linear(len(KEYS) * DIM, 1)

    def forward(self, features: Any) -> Tensor:
        """Returns [B, 1] from the sums of the features' rows."""
        out = self.tables(features)
        blocks = [out[key] if self.pooled else out[key].values() for key in KEYS]
        return self.dense(torch.cat(blocks, dim=1))


def train(model: nn.Module, steps: range, ranks: list[int]) -> list[Tensor]:
    """Trains with 6 samples per rank and one id per bag; returns outputs."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    outputs = []
    for step in steps:
        parts = []
        for rank in ranks:
            generator = torch.Generator().manual_seed(100 * step + rank)
            parts.append([torch.randint(0, rows, (6,), generator=generator) for rows in ROWS])
        values = torch.cat([torch.cat([part[f] for part in parts]) for f in range(len(KEYS))])
        out = model(KeyedJaggedTensor(KEYS, values, lengths=torch.ones_like(values)))
        outputs.append(out.detach().clone())
        model.zero_grad()
        out.square().mean().backward()
    return outputs


def torchrec_model(given: Import) -> nn.Module:
    """The model with TorchRec's tables and kernels."""
    import torchrec
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    fused = {"optimizer": EmbOptimType(given.optimizer), "learning_rate": 0.1, "eps": 1e-6}
    kind = torchrec.EmbeddingBagConfig if given.pooled else torchrec.EmbeddingConfig
    tables = [
        kind(name=f"t{i}", num_embeddings=rows, embedding_dim=DIM, feature_names=[KEYS[i]])
        for i, rows in enumerate(ROWS)
    ]
    whole = torchrec.EmbeddingBagCollection if given.pooled else torchrec.EmbeddingCollection
    sharder = (EmbeddingBagCollectionSharder if given.pooled else EmbeddingCollectionSharder)(fused_params=fused)
    return _sharded(given, Model(whole(tables, device=torch.device("meta")), given.pooled), sharder, given.kinds)


def alone(given: Import, device: str | None = None) -> Model:
    """The model with tables of this package."""
    kind = rk.EmbeddingBagConfig if given.pooled else rk.EmbeddingConfig
    tables = [kind(rows, DIM, name=f"t{i}", feature_names=[KEYS[i]]) for i, rows in enumerate(ROWS)]
    whole = rk.EmbeddingBagCollection if given.pooled else rk.EmbeddingCollection
    return Model(whole(tables, optimizer=OPTIMIZERS[given.optimizer], device=device), given.pooled)


def rk_model(given: Import, *kinds: str) -> nn.Module:
    """The sharded model with tables of this package and different initial rows."""
    bags, ids = rk.distributed.EmbeddingBagCollectionSharder, rk.distributed.EmbeddingCollectionSharder
    sharder = (bags if given.pooled else ids)(gradient="torchrec")
    return _sharded(given, alone(given, "meta"), sharder, kinds)


def _sharded(given: Import, model: Model, sharder: Any, kinds: tuple[str, ...]) -> nn.Module:
    from torchrec.distributed import sharding_plan as by_hand
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.types import ShardingEnv, ShardingPlan

    ways = {
        "table_wise": by_hand.table_wise(rank=1, compute_kernel="fused"),
        "row_wise": by_hand.row_wise(compute_kernel="fused"),
        "column_wise": by_hand.column_wise(ranks=[0, 1], compute_kernel="fused"),
    }
    sizes = {"local_size": 2, "world_size": 2, "device_type": "cpu"}
    plan = by_hand.construct_module_sharding_plan(
        model.tables, {f"t{i}": ways[kind] for i, kind in enumerate(kinds)}, sharder=sharder, **sizes
    )
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        plan=ShardingPlan(plan={"tables": plan}),
        sharders=[sharder],
        device=torch.device("cpu"),
    )


def _of(model: nn.Module) -> dict[str, Any]:
    """The state of a checkpoint in TorchRec's usual form; without the optimizer's if it has none."""
    optimizer = model.fused_optimizer.state_dict()
    return {"model": model.state_dict()} | ({"optim": optimizer} if any(optimizer["state"].values()) else {})


def torchrec_named_state(model: nn.Module) -> dict[str, Any]:
    """The state of a model of this package under TorchRec's names."""
    state = rk.distributed.torchrec_state(model)
    return {"model": state.model} | ({"optim": state.optimizer} if state.optimizer["state"] else {})


def imported(given: Import, folder: str) -> tuple[list[Tensor], list[Tensor]]:
    """TorchRec trains, saves and trains on; this package trains on from the checkpoint. Returns both outputs."""
    theirs, rank = torchrec_model(given), dist.get_rank()
    train(theirs, range(2), [rank])
    dcp.save(_of(theirs), checkpoint_id=folder)
    ours = rk_model(given, "row_wise", "table_wise", "row_wise")
    dcp.load(torchrec_named_state(ours), checkpoint_id=folder)
    return train(theirs, range(2, 5), [rank]), train(ours, range(2, 5), [rank])


def exported(given: Import, folder: str) -> tuple[list[Tensor], list[Tensor]]:
    """This package trains, saves with TorchRec's names and trains on, as does TorchRec. Returns both outputs."""
    ours, rank = rk_model(given, "row_wise", "table_wise", "row_wise"), dist.get_rank()
    train(ours, range(2), [rank])
    dcp.save(torchrec_named_state(ours), checkpoint_id=folder)
    theirs = torchrec_model(given)
    found = _of(theirs)
    dcp.load(found, checkpoint_id=folder)
    return train(ours, range(2, 5), [rank]), train(theirs, range(2, 5), [rank])
