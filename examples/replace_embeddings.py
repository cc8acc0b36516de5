"""Replaces the embeddings of torch.nn, FBGEMM or TorchRec in a trained model by rec_kernels, and compares the losses.

    pip install --no-deps fbgemm-gpu-cpu==1.8.0            # and torchrec==1.8.0 with its dependencies
    python examples/replace_embeddings.py --steps 100

torch     one torch.nn.EmbeddingBag per table, with torch.optim.Adagrad -> rk.EmbeddingBag with rk.Adagrad
fbgemm    SplitTableBatchedEmbeddingBagsCodegen with fused row-wise Adagrad -> rk.EmbeddingBagCollection with
          rk.RowwiseAdagrad
torchrec  EmbeddingBagCollection with torch.optim.SGD -> rk.EmbeddingBagCollection with rk.SGD, which
          takes TorchRec's KeyedJaggedTensor

Each model is trained first. Then a copy gets its embeddings replaced, including weights and optimizer state, and both
continue with the same batches. Packages that are not installed are skipped.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import rec_kernels as rk

TABLES, ROWS, COLUMNS, BATCH, DENSE = 8, 1000, 16, 64, 13
NAMES = [f"t{t}" for t in range(TABLES)]
LR = 0.05


@dataclass
class Batch:
    """A batch: dense features, bags of ids per table (table-major), labels."""

    dense: Tensor
    values: Tensor
    lengths: Tensor
    label: Tensor

    @property
    def offsets(self) -> Tensor:
        """Offsets of the bags, int64 [TABLES * BATCH + 1]."""
        return nn.functional.pad(self.lengths.cumsum(0), (1, 0))


def batches(steps: int) -> Iterator[Batch]:
    """Random batches with bags of 0 to 5 ids; labels depend on the dense features and on every id."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(TABLES, ROWS, generator=generator)
    for _ in range(steps):
        dense = torch.randn(BATCH, DENSE, generator=generator)
        lengths = torch.randint(0, 6, (TABLES * BATCH,), generator=generator)
        values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
        table = torch.arange(TABLES).repeat_interleave(BATCH).repeat_interleave(lengths)
        sample = torch.arange(BATCH).repeat(TABLES).repeat_interleave(lengths)
        score = dense.sum(1).index_add(0, sample, scores[table, values])
        label = (score > 0).float()
        yield Batch(dense, values, lengths, label)


class Model(nn.Module):
    """An MLP over dense features concatenated with pooled embeddings.

    Args:
        tables: the embedding module.
        look_up: a function of ``tables`` and a batch, returns pooled embeddings [BATCH, TABLES * COLUMNS].
    """

    def __init__(self, tables: nn.Module, look_up: Callable[[nn.Module, Batch], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables, self.look_up = tables, look_up
        self.top = nn.Sequential(nn.Linear(DENSE + TABLES * COLUMNS, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, batch: Batch) -> Tensor:
        """Logits [BATCH]."""
        return self.top(torch.cat([batch.dense, self.look_up(self.tables, batch)], dim=1)).squeeze(1)


def torch_nn() -> tuple[Model, list[torch.optim.Optimizer]]:
    """A model with one torch.nn layer per table, and its optimizer."""

    def look_up(tables: nn.Module, batch: Batch) -> Tensor:
        lengths = batch.lengths.view(TABLES, BATCH)
        ids = batch.values.split(lengths.sum(1).tolist())
        return torch.cat([tables[t](ids[t], lengths[t].cumsum(0) - lengths[t]) for t in range(TABLES)], dim=1)

    layers = nn.ModuleList(nn.EmbeddingBag(ROWS, COLUMNS, mode="sum", sparse=True) for _ in NAMES)
    for layer in layers:
        nn.init.normal_(layer.weight, std=0.1)
    return Model(layers, look_up), [torch.optim.Adagrad(layers.parameters(), lr=LR)]


def torchrec() -> tuple[Model, list[torch.optim.Optimizer]]:
    """A model with TorchRec's collection, and its optimizer."""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

    def look_up(tables: nn.Module, batch: Batch) -> Tensor:
        return tables(KeyedJaggedTensor(keys=NAMES, values=batch.values, lengths=batch.lengths)).values()

    configs = [EmbeddingBagConfig(name=n, embedding_dim=COLUMNS, num_embeddings=ROWS, feature_names=[n]) for n in NAMES]
    tables = EmbeddingBagCollection(tables=configs)
    return Model(tables, look_up), [torch.optim.SGD(tables.parameters(), lr=LR)]


def fbgemm() -> tuple[Model, list[torch.optim.Optimizer]]:
    """A model with all tables in one FBGEMM module, which has a fused optimizer."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        EmbeddingLocation,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    tables = SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, COLUMNS, EmbeddingLocation.HOST, ComputeDevice.CPU)] * TABLES,
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=LR,
        eps=1e-8,
    )
    tables.init_embedding_weights_uniform(-0.1, 0.1)
    return Model(tables, lambda module, batch: module(batch.values, batch.offsets)), []


def replace(model: Model, optimizers: list[torch.optim.Optimizer]) -> Model:
    """Copies a torch.nn or TorchRec model and replaces its embeddings by rec_kernels."""
    ours, optimizers = copy.deepcopy((model, optimizers))
    print(rk.replace_embeddings(ours, trained_by=optimizers))
    return ours


def replace_fbgemm(model: Model, _: list[torch.optim.Optimizer]) -> Model:
    """Builds the equivalent model with rec_kernels; FBGEMM identifies features by position, rec_kernels by name."""
    tables = rk.convert_embeddings(model.tables)
    print(tables)
    features = [f"f{i}" for i in range(TABLES)]

    def look_up(tables: nn.Module, batch: Batch) -> Tensor:
        return tables(rk.KeyedJaggedTensor(features, batch.values, offsets=batch.offsets)).values()

    ours = Model(tables, look_up)
    ours.top.load_state_dict(model.top.state_dict())
    return ours


CASES = {"torch": (torch_nn, replace), "fbgemm": (fbgemm, replace_fbgemm), "torchrec": (torchrec, replace)}
PACKAGES = {"torch": "torch", "fbgemm": "fbgemm_gpu", "torchrec": "torchrec"}


def losses(model: Model, table_optimizers: list[torch.optim.Optimizer], steps: int) -> list[float]:
    """Trains the model and returns the loss of every step."""
    optimizers = [torch.optim.Adam(model.top.parameters(), lr=0.01), *table_optimizers]
    result = []
    for batch in batches(steps):
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch.label)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        result.append(loss.item())
    return result


def compare(name: str, steps: int) -> float:
    """Trains a model, replaces its embeddings, prints the losses of both; returns the largest difference."""
    make_model, replace_tables = CASES[name]
    theirs, optimizers = make_model()
    losses(theirs, optimizers, steps)
    ours = replace_tables(theirs, optimizers)
    pairs = list(zip(losses(theirs, optimizers, steps), losses(ours, [], steps), strict=True))
    print(f"{'step':>8}{name:>12}{'rec_kernels':>14}")
    for step in sorted({0, steps // 4, steps // 2, steps - 1}):
        print(f"{step:>8}{pairs[step][0]:>12.6f}{pairs[step][1]:>14.6f}")
    largest = max(abs(a - b) for a, b in pairs)
    print(f"largest difference of {steps} losses: {largest:.1e}\n")
    return largest


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="training steps (default: 100)")
    steps = parser.parse_args().steps
    if steps < 1:
        parser.error(f"--steps {steps} must be at least 1")
    for name in [name for name, package in PACKAGES.items() if importlib.util.find_spec(package) is not None]:
        compare(name, steps)


if __name__ == "__main__":
    main()
