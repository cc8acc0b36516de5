"""Test AUC and speed of whole runs of rec_kernels against plain torch over seeds, on Complete Journey.

All train one model on the same batches, read ahead on a thread, from the same initial weights. "torch" has one
concatenated table, every distinct history once as ours, plain torch's interaction and a row-wise Adagrad in plain
torch; "recipe" is the usual one: an nn.EmbeddingBag(sparse=True) per table, a history for every row, and torch's own
Adagrad, which is element-wise. Seeds take turns. Finished (implementation, seed) pairs in the result file
are kept, so that an interrupted run can be resumed.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, embedding, embedding_bag

import bench
from bench.script import machine, options_of, parser_of, positive
from rec_kernels.dlrm import DLRM, Batch, CompleteJourney, Feature, TrainConfig, load_completejourney
from rec_kernels.dlrm.completejourney import FEATURES, HISTORY
from rec_kernels.dlrm.data import prefetch
from rec_kernels.dlrm.ranks import SINGLE_PROCESS
from rec_kernels.dlrm.reader import dedup_batch
from rec_kernels.dlrm.scores import predict, score


def _initial_weights(model: DLRM) -> dict[str, torch.Tensor]:
    """Weight [E, D] of each table of ``model``."""
    tables = model.embeddings.embedding_bags
    return {name: tables[name].weight.detach() for name in tables}


class TorchInteraction(nn.Module):
    """``rk.dot_interaction`` in plain torch."""

    def __init__(self, num_features: int, embedding_dim: int):
        super().__init__()
        self.register_buffer("places", torch.tril_indices(num_features + 1, num_features + 1, -1), persistent=False)
        self.out_features = embedding_dim + self.places.shape[1]

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        vectors = torch.cat([dense[:, None], sparse], dim=1)
        products = torch.bmm(vectors, vectors.mT)
        return torch.cat([dense, products[:, self.places[0], self.places[1]]], dim=1)


class StubCollection(nn.Module):
    """A stub collection for models with their own tables."""

    def check(self) -> None:
        """Does nothing: torch reports errors immediately."""


class TorchDLRM(DLRM):
    """DLRM with torch's interaction; the base class of models with their own tables."""

    def __init__(self, features: list[Feature], num_dense: int, **options):
        super().__init__(features, num_dense, interaction=TorchInteraction, **options)

    def dense_parameters(self) -> list[nn.Parameter]:
        return [*self.bottom.parameters(), *self.top.parameters()]


class RecipeDLRM(TorchDLRM):
    """DLRM with one torch.nn.EmbeddingBag per table, sparse gradients, and the initial weights of DLRM."""

    def __init__(self, features: list[Feature], num_dense: int, **options):
        super().__init__(features, num_dense, **options)
        weights = _initial_weights(self)
        self.tables = nn.ModuleDict(
            {
                feature: nn.EmbeddingBag.from_pretrained(
                    weight.clone(), freeze=False, sparse=True, mode="mean" if feature == HISTORY else "sum"
                )
                for feature, weight in weights.items()
            }
        )
        self.embeddings = StubCollection()

    def table_parameters(self) -> list[nn.Parameter]:
        """The tables' weights, for an optimizer of sparse gradients."""
        return list(self.tables.parameters())

    def pooled(self, batch: Batch) -> torch.Tensor:
        ids = batch.features.values().view(len(FEATURES), -1)
        offsets = torch.arange(ids.shape[1], dtype=ids.dtype)
        one_hot = [self.tables[feature](row, offsets) for feature, row in zip(FEATURES, ids, strict=True)]
        values, offsets = batch.shared.values(), batch.shared.offsets()
        history = self.tables[HISTORY](values, offsets[:-1].to(values.dtype))
        return torch.cat([history, *one_hot], dim=1)


class TunedDLRM(TorchDLRM):
    """DLRM with one concatenated table; ids are shifted by the row offset of their table."""

    def __init__(self, features: list[Feature], num_dense: int, **options):
        super().__init__(features, num_dense, **options)
        weights = _initial_weights(self)
        self.table = nn.Parameter(torch.cat([weights[feature.name] for feature in features]))
        starts = torch.tensor([0, *(feature.num_embeddings for feature in features)]).cumsum(0)
        self.shift, self.history_shift = starts[: len(FEATURES), None], int(starts[len(FEATURES)])
        self.embeddings = StubCollection()

    def table_parameters(self) -> list[nn.Parameter]:
        """The table's weight, for an optimizer of sparse gradients."""
        return [self.table]

    def pooled(self, batch: Batch) -> torch.Tensor:
        ids = batch.features.values().view(len(FEATURES), -1) + self.shift
        one_hot = embedding(ids.T, self.table, sparse=True).flatten(1)
        unique = batch.shared.unique(HISTORY)
        values = unique.values().long() + self.history_shift
        offsets = unique.offsets()[:-1].long()
        history = embedding_bag(values, self.table, offsets, mode="mean", sparse=True)
        return torch.cat([history.index_select(0, batch.shared.inverse(HISTORY)), one_hot], dim=1)


IMPLEMENTATIONS = {"ours": DLRM, "torch": TunedDLRM, "recipe": RecipeDLRM}


class RowwiseAdagrad(torch.optim.Optimizer):
    """Row-wise Adagrad for sparse gradients: state += mean(g^2), row -= lr g / (sqrt(state) + eps)."""

    def __init__(self, params, lr: float, eps: float = 1e-8):
        super().__init__(params, {"lr": lr, "eps": eps})
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["sum"] = torch.zeros(weight.shape[0])

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                grad = weight.grad.coalesce()
                rows, values = grad.indices()[0], grad.values()
                state = self.state[weight]["sum"]
                state[rows] += values.square().mean(dim=1)
                rate = group["lr"] / (state[rows].sqrt() + group["eps"])
                weight[rows] -= rate.unsqueeze(1) * values


class CombinedOptimizer:
    """Several optimizers as one."""

    def __init__(self, *optimizers: torch.optim.Optimizer):
        self.optimizers = optimizers

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


class ConvertingReader:
    """A reader for ``predict`` that converts every batch of a data set."""

    ranks = SINGLE_PROCESS

    def __init__(self, data: CompleteJourney, batch_size: int, change: Callable[[Batch], Batch]):
        self.data, self.batch_size, self.change = data, batch_size, change
        self.name, self.num_rows = data.name, data.num_rows

    def batches(self, split: str, batch_size: int) -> Iterator[Batch]:
        """Yields the converted batches of a split."""
        return map(self.change, self.data.batches(split, batch_size))


#: Histories are stored once per batch for both; ours has all features in one container, like the trainer's reader.
CHANGES: dict[str, Callable[[Batch], Batch]] = {
    "ours": lambda batch: dedup_batch(batch).joined(),
    "torch": dedup_batch,
    "recipe": lambda batch: batch,
}


def run(implementation: str, config: TrainConfig, data: CompleteJourney) -> dict:
    """Trains and tests an implementation; returns its scores and the training speed, including reading."""
    model = IMPLEMENTATIONS[implementation](
        data.features, data.num_dense, embedding_dim=config.embedding_dim, seed=config.seed
    )
    optimizer = torch.optim.Adam(model.dense_parameters(), lr=config.dense_lr, fused=True)
    if implementation != "ours":
        tables = RowwiseAdagrad if implementation == "torch" else torch.optim.Adagrad
        optimizer = CombinedOptimizer(optimizer, tables(model.table_parameters(), lr=config.lr))
    rows = ConvertingReader(data, config.batch_size, CHANGES[implementation])
    started = time.perf_counter()
    for batch in prefetch(rows.batches("train", config.batch_size)):
        loss = binary_cross_entropy_with_logits(model(batch), batch.label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    rate = rows.num_rows("train") / (time.perf_counter() - started)
    return score(*predict(model, rows, "test")) | {"examples_per_second": rate}


def read_finished(path: Path, settings: dict) -> list[dict]:
    """The saved pairs in ``path``; exits with the reason if their settings differ."""
    if not path.exists():
        return []
    found = json.loads(path.read_text())
    if found["settings"] != settings:
        raise SystemExit(f"error: {path} holds runs with {found['settings']}, not {settings}: choose another --output")
    return found["runs"]


def summarise(runs: list[dict]) -> dict:
    """Over the seeds that all finished: mean AUC and speed of each, the differences of ours to the others' AUC, and how
    many times as fast ours is, the median."""
    of = {name: {entry["seed"]: entry for entry in runs if entry["implementation"] == name} for name in IMPLEMENTATIONS}
    paired = sorted(set.intersection(*map(set, of.values())))
    if not paired:
        return {"seeds": paired}
    auc, rate = ({n: [of[n][seed][key] for seed in paired] for n in of} for key in ("auc", "examples_per_second"))
    return {
        "seeds": paired,
        "mean_auc": {name: statistics.mean(values) for name, values in auc.items()},
        "mean_examples_per_second": {name: statistics.mean(values) for name, values in rate.items()},
        "auc_differences": {n: [a - b for a, b in zip(auc["ours"], auc[n], strict=True)] for n in of if n != "ours"},
        "speedup": {n: statistics.median(a / b for a, b in zip(rate["ours"], rate[n], strict=True)) for n in of},
    }


def write(path: Path, settings: dict, runs: list[dict]) -> None:
    """Writes the result file."""
    content = {"environment": machine(), "settings": settings, "summary": summarise(runs), "runs": runs}
    bench.save(content, path)


def main() -> None:
    parser = parser_of(__doc__, "train_quality.json", data=True)
    parser.add_argument("--seeds", type=positive, default=5, help="seeds 0 .. N-1 (default: 5)")
    options = options_of(parser)
    data = load_completejourney(options.weeks, options.data_dir, progress=True)
    base = TrainConfig(weeks=options.weeks)
    settings = {key: getattr(base, key) for key in ("epochs", "batch_size", "embedding_dim", "lr", "dense_lr", "weeks")}
    settings["threads"] = torch.get_num_threads()  # speeds with other numbers of threads are not comparable
    runs = read_finished(options.output, settings)
    for seed in range(options.seeds):
        turn = seed % len(IMPLEMENTATIONS)  # the first one warms up the machine
        for name in [*IMPLEMENTATIONS][turn:] + [*IMPLEMENTATIONS][:turn]:
            if any(entry["implementation"] == name and entry["seed"] == seed for entry in runs):
                continue
            scores = run(name, TrainConfig(weeks=options.weeks, seed=seed), data)
            runs.append({"implementation": name, "seed": seed} | scores)
            print(f"seed {seed} {name:<6} AUC {scores['auc']:.5f}  log loss {scores['log_loss']:.5f}")
            write(options.output, settings, runs)
    summary = summarise(runs)
    print(f"means over {len(summary['seeds'])} seeds")
    for name, mean in summary["mean_auc"].items():
        rate, speedup = summary["mean_examples_per_second"][name], summary["speedup"][name]
        print(f"{name:<7} AUC {mean:.5f}  {rate:>9,.0f} examples/s, ours is {speedup:.2f}x")
    print(f"written to {options.output}")


if __name__ == "__main__":
    main()
