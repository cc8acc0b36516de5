"""One model with the embeddings of FBGEMM or TorchRec, and with rec_kernels in their place: equal losses.

    pip install --no-deps fbgemm-gpu-cpu==1.8.0            # and torchrec==1.8.0, with what it imports
    python examples/replace_embeddings.py --steps 100

fbgemm    SplitTableBatchedEmbeddingBagsCodegen with fused row-wise Adagrad -> rk.EmbeddingBagCollection with
          rk.RowwiseAdagrad
torchrec  EmbeddingBagCollection with dense gradients and torch.optim.SGD -> rk.EmbeddingBagCollection with rk.SGD,
          fed with TorchRec's own KeyedJaggedTensor

Both models start from the same weights and see the same batches; what changes is the lines between "theirs" and "ours".
"""

from __future__ import annotations

import argparse
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
    """One batch: dense features, bags of ids for every table (key-major), labels."""

    dense: Tensor
    values: Tensor
    lengths: Tensor
    label: Tensor

    @property
    def offsets(self) -> Tensor:
        """[TABLES * BATCH + 1]."""
        return nn.functional.pad(self.lengths.cumsum(0), (1, 0))


def batches(steps: int) -> Iterator[Batch]:
    """Bags of 0 to 5 ids; the label depends on the dense features and on every id."""
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
    """Dense features and pooled embeddings, concatenated, through an MLP."""

    def __init__(self, pooled: Callable[[Batch], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.pooled = pooled
        self.top = nn.Sequential(nn.Linear(DENSE + TABLES * COLUMNS, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, batch: Batch) -> Tensor:
        """Logits [BATCH]."""
        return self.top(torch.cat([batch.dense, self.pooled(batch)], dim=1)).squeeze(1)


def initial() -> list[Tensor]:
    """The tables' first weights, [ROWS, COLUMNS] each."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(ROWS, COLUMNS, generator=generator) * 0.1 for _ in NAMES]


def ours(optimizer: rk.SGD | rk.RowwiseAdagrad) -> rk.EmbeddingBagCollection:
    """Returns the replacement: one EmbeddingBagCollection, whose backward updates the tables without an optimizer
    step."""
    weights = iter(initial())
    tables = [
        rk.EmbeddingBagConfig(ROWS, COLUMNS, name=n, feature_names=[n], init=lambda w: w.copy_(next(weights)))
        for n in NAMES
    ]
    return rk.EmbeddingBagCollection(tables, optimizer=optimizer)


def fbgemm() -> tuple[Model, Model, list[nn.Parameter]]:
    """Theirs, ours, and the parameters of theirs that want a torch optimizer: none."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        EmbeddingLocation,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    theirs = SplitTableBatchedEmbeddingBagsCodegen(
        [(ROWS, COLUMNS, EmbeddingLocation.HOST, ComputeDevice.CPU)] * TABLES,
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=LR,
        eps=1e-8,
    )
    for weight, first in zip(theirs.split_embedding_weights(), initial(), strict=True):
        weight.data.copy_(first)
    mine = ours(rk.RowwiseAdagrad(lr=LR, eps=1e-8))
    return (
        Model(lambda b: theirs(b.values, b.offsets)),
        Model(lambda b: mine(rk.KeyedJaggedTensor(NAMES, b.values, offsets=b.offsets)).values()),
        [],
    )


def torchrec() -> tuple[Model, Model, list[nn.Parameter]]:
    """Theirs, ours, and the parameters of theirs that want a torch optimizer."""
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

    theirs = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name=n, embedding_dim=COLUMNS, num_embeddings=ROWS, feature_names=[n]) for n in NAMES
        ]
    )
    for name, first in zip(NAMES, initial(), strict=True):
        theirs.embedding_bags[name].weight.data.copy_(first)
    mine = ours(rk.SGD(lr=LR))

    def bags(batch: Batch) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(keys=NAMES, values=batch.values, lengths=batch.lengths)

    return (
        Model(lambda b: theirs(bags(b)).values()),
        Model(lambda b: mine(bags(b)).values()),
        list(theirs.parameters()),
    )


def losses(model: Model, tables: list[nn.Parameter], steps: int) -> list[float]:
    """Trains and returns every step's loss."""
    optimizers = [torch.optim.Adam(model.top.parameters(), lr=0.01)]
    if tables:
        optimizers.append(torch.optim.SGD(tables, lr=LR))
    found = []
    for batch in batches(steps):
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch.label)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        found.append(loss.item())
    return found


def compare(name: str, steps: int) -> float:
    """Trains both models, prints some losses side by side, and returns the largest difference."""
    theirs, mine, tables = {"fbgemm": fbgemm, "torchrec": torchrec}[name]()
    pairs = list(zip(losses(theirs, tables, steps), losses(mine, [], steps), strict=True))
    print(f"{'step':>8}{name:>12}{'rec_kernels':>14}")
    for step in sorted({0, steps // 4, steps // 2, steps - 1}):
        print(f"{step:>8}{pairs[step][0]:>12.6f}{pairs[step][1]:>14.6f}")
    largest = max(abs(a - b) for a, b in pairs)
    print(f"largest difference of {steps} losses: {largest:.1e}\n")
    return largest


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="training steps (default: 100)")
    steps = parser.parse_args().steps
    if steps < 1:
        parser.error(f"--steps {steps} must be at least 1")
    found = [name for name, package in (("fbgemm", "fbgemm_gpu"), ("torchrec", "torchrec")) if _installed(package)]
    if not found:
        parser.error("neither fbgemm_gpu nor torchrec is installed: there is nothing to replace")
    for name in found:
        compare(name, steps)


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


if __name__ == "__main__":
    main()
