"""Sharded collections whose lookups are not pooled, on ranks and in one process: what their tests compare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from distributed_cases import KEYS, OPTIMIZERS, ROWS, blocks, plan_of
from torch import Tensor, nn

import rec_kernels as rk

#: Columns of the tables, and of the features.
DIMS = (16, 24, 8)
FEATURE_DIMS = (16, 24, 8, 8)


@dataclass(frozen=True)
class Sequences:
    """A collection that is trained, and how it is shared out.

    Args:
        plan: of ``PLANS``. format, optimizer, compression: of all tables. sizes: samples of each rank.
        weighted: whether the batch of the last rank has weights. steps: of training.
        gradient: the sharder's; the loss is a sum over samples with "sum", else their mean.
        output_dtype: the collection's. padding: each table's ``padding_idx``.
        bad_ids: whether some ids are out of range, which the collection ignores.
        own_sizes: whether feature f of a rank has f samples more than the first.
    """

    plan: str = "table_wise"
    format: str = "fp32"
    optimizer: str = "adam"
    sizes: tuple[int, ...] = (8, 5)
    weighted: bool = False
    steps: int = 3
    gradient: str = "sum"
    output_dtype: torch.dtype = torch.float32
    compression: Any = None
    padding: tuple[int | None, ...] = (None, None, None)
    bad_ids: bool = False
    own_sizes: bool = False


class Model(nn.Module):
    """A collection and something dense behind it."""

    def __init__(self, sequences: nn.Module) -> None:
        super().__init__()
        self.sequences = sequences
        self.dense = nn.Linear(2, 1)

    def forward(self, features: Any) -> dict[str, rk.JaggedTensor]:
        """Rows of each feature."""
        return self.sequences(features)


def collection(case: Sequences, device: str | None = None) -> rk.EmbeddingCollection:
    """The whole collection, whose rows every process draws alike."""
    torch.manual_seed(7)
    features = [["f0"], ["f1"], ["f2", "g2"]]
    tables = [
        rk.EmbeddingConfig(
            rows,
            dim,
            name=f"t{i}",
            feature_names=features[i],
            format=case.format,
            compression=case.compression,
            padding_idx=case.padding[i],
        )
        for i, (rows, dim) in enumerate(zip(ROWS, DIMS, strict=True))
    ]
    return rk.EmbeddingCollection(
        tables,
        optimizer=OPTIMIZERS[case.optimizer],
        seed=5,
        output_dtype=case.output_dtype,
        bounds_check="ignore" if case.bad_ids else "error",
        device=device,
    )


def sharded(case: Sequences, sequences: rk.EmbeddingCollection, kind: type[nn.Module] = Model) -> nn.Module:
    """A model of a kind that TorchRec has sharded, of this rank."""
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.types import ShardingEnv, ShardingPlan

    from rec_kernels.distributed import EmbeddingCollectionSharder

    return DistributedModelParallel(
        kind(sequences),
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        plan=ShardingPlan(plan={"sequences": plan_of(case, dist.get_world_size(), DIMS)}),
        sharders=[EmbeddingCollectionSharder(gradient=case.gradient)],
        device=torch.device("cpu"),
    )


def batch(case: Sequences, step: int, ranks: list[int]) -> rk.KeyedJaggedTensor:
    """The samples of some ranks, one rank's after the other's."""
    parts = [[_ids(case, step, rank, f) for rank in ranks] for f in range(len(KEYS))]
    lengths, values, weights = (torch.cat([p[i] for own in parts for p in own]) for i in range(3))
    strides = [sum(len(p[0]) for p in own) for own in parts] if case.own_sizes else None
    has_weights = case.weighted and len(case.sizes) - 1 in ranks
    return rk.KeyedJaggedTensor(KEYS, values, weights if has_weights else None, lengths=lengths, stride_per_key=strides)


def _ids(case: Sequences, step: int, rank: int, f: int) -> tuple[Tensor, Tensor, Tensor]:
    """Lengths, ids and weights of a rank's feature."""
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + f)
    rows = (*ROWS, ROWS[-1])[f]
    lengths = torch.randint(0, 9, (case.sizes[rank] + f * case.own_sizes,), generator=generator)
    low, high = (-rows // 3, rows + rows // 3) if case.bad_ids else (0, rows)
    values = torch.randint(low, high, (int(lengths.sum()),), generator=generator)
    drawn = torch.rand(len(values), generator=generator)
    return lengths, values, drawn if rank == len(case.sizes) - 1 else torch.ones_like(drawn)


def coefficients(case: Sequences, step: int, ranks: list[int]) -> list[Tensor]:
    """The gradients of the rows of each feature, [N, D], whatever these are."""
    found = []
    for f, dim in enumerate(FEATURE_DIMS):
        generators = [torch.Generator().manual_seed(9000 + 100 * step + 10 * rank + f) for rank in ranks]
        counts = [len(_ids(case, step, rank, f)[1]) for rank in ranks]
        found.append(torch.cat([torch.randn(n, dim, generator=g) for n, g in zip(counts, generators, strict=True)]))
    return found


def train(case: Sequences, model: nn.Module, ranks: list[int]) -> list[list[tuple[Tensor, Tensor]]]:
    """Trains with the samples of some ranks; for each step and feature, lengths and rows."""
    outputs = []
    for step in range(case.steps):
        features = batch(case, step, ranks)
        out = model(features)
        assert list(out) == KEYS
        outputs.append([(out[key].lengths(), out[key].values().detach().clone()) for key in KEYS])
        factors = coefficients(case, step, ranks)
        loss = sum((out[key].values().float() * c).sum() for key, c in zip(KEYS, factors, strict=True))
        (loss / max(features.stride(), 1) if case.gradient != "sum" else loss).backward()
    return outputs


def run(case: Sequences) -> tuple[list, dict[str, Any]]:
    """Outputs and blocks of the state of this rank."""
    model = sharded(case, collection(case))
    outputs = train(case, model, [dist.get_rank()])
    return outputs, blocks(model.module.sequences.state_dict())


def one_process(case: Sequences) -> tuple[list, dict[str, Tensor]]:
    """Outputs and state of one process with the samples of all ranks."""
    model = Model(collection(case))
    outputs = train(case, model, list(range(len(case.sizes))))
    return outputs, dict(model.sequences.state_dict())
