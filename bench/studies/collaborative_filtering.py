"""Matrix factorization of MovieLens ratings: narrow rows for rare ids against one width for all, over seeds.

A rating is told by the mean, a number of the user, one of the movie, and the product of their vectors (Koren, Bell and
Volinsky, "Matrix Factorization Techniques for Recommender Systems", 2009). The tables are of one width ("uniform"), or
in blocks by popularity ("blocks", ``rk.MixedDimensionEmbeddingBag``). The last tenth of each user's ratings, of those
in one second the movies with the highest ids, is the test. Writes the mean squared error of every run as JSON.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import torch
from scipy.stats import t
from torch import Tensor, nn
from tqdm import tqdm

import bench
import rec_kernels as rk
from bench.run import machine
from bench.studies.movielens_reader import find, read_ratings
from rec_kernels.nn.jagged.tensors import JaggedTensor

TEST_SHARE = 10


class Ratings:
    """Ratings of a data set, split; ids count from 0."""

    def __init__(self, path: Path) -> None:
        table = read_ratings(find(path).ratings).sort_values(["timestamp", "user", "movie"], kind="stable")
        columns = [np.unique(table[name], return_inverse=True)[1] for name in ("user", "movie")]
        self.ids = torch.from_numpy(np.stack(columns))
        self.values = torch.tensor(table["rating"].to_numpy(), dtype=torch.float32)
        left = table.groupby("user").cumcount(ascending=False)
        count = table.groupby("user")["user"].transform("size")
        self.is_test = torch.tensor((left < count // TEST_SHARE).to_numpy())
        self.sizes = [len(np.unique(column)) for column in columns]
        self.mean = self.values[~self.is_test].mean()

    def counts(self) -> list[Tensor]:
        """Training ratings of each user, of each movie."""
        train = self.ids[:, ~self.is_test]
        return [torch.bincount(ids, minlength=size) for ids, size in zip(train, self.sizes, strict=True)]


class Factors(nn.Module):
    """Users or movies: vectors [B, D] of ids [B]."""

    def __init__(self, counts: Tensor, width: int, config: dict, **options) -> None:
        super().__init__()
        rows = len(counts)
        if config["kind"] == "uniform":
            init = {"init": lambda weight: weight.uniform_(-(rows**-0.5), rows**-0.5)}
            table = rk.EmbeddingBagConfig(rows, config["dim"], name="t", feature_names=["t"], **init)
            self.table = rk.EmbeddingBagCollection([table], **options)
            return
        ranks, sizes = rk.popularity_blocks(counts, config["blocks"])
        dims = rk.mixed_dimensions(sizes, width, config["temperature"], threshold=0)
        self.table = rk.MixedDimensionEmbeddingBag(sizes, dims, width, ranks=ranks, **options)

    def forward(self, ids: Tensor) -> Tensor:
        """[B, D]."""
        each = torch.arange(len(ids) + 1)
        if isinstance(self.table, rk.MixedDimensionEmbeddingBag):
            return self.table(JaggedTensor(ids, offsets=each))
        return self.table(rk.KeyedJaggedTensor(["t"], ids, offsets=each)).values()


class Factorization(nn.Module):
    """Ratings [B] of users and movies [2, B]."""

    def __init__(self, ratings: Ratings, args: argparse.Namespace, config: dict, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.mean = ratings.mean
        options = {"optimizer": rk.RowwiseAdagrad(lr=args.lr, weight_decay=args.weight_decay)}
        numbers = [
            rk.EmbeddingBagConfig(size, 1, name=name, feature_names=[name], init=nn.init.zeros_)
            for name, size in zip(("users", "movies"), ratings.sizes, strict=True)
        ]
        self.numbers = rk.EmbeddingBagCollection(numbers, **options)
        self.factors = nn.ModuleList(Factors(counts, args.width, config, **options) for counts in ratings.counts())

    def forward(self, ids: Tensor) -> Tensor:
        """Ratings [B]."""
        each = torch.arange(ids.numel() + 1)
        alone = self.numbers(rk.KeyedJaggedTensor(["users", "movies"], ids.reshape(-1), offsets=each)).values()
        users, movies = (factors(i) for factors, i in zip(self.factors, ids, strict=True))
        return self.mean + alone.sum(1) + (users * movies).sum(1)


def run(ratings: Ratings, args: argparse.Namespace, config: dict, seed: int) -> dict:
    """Train and test one model."""
    model = Factorization(ratings, args, config, seed)
    dense = rk.dense_parameters(model)
    adam = torch.optim.AdamW(dense, lr=args.dense_lr, weight_decay=args.dense_decay) if dense else None
    ids, values = ratings.ids[:, ~ratings.is_test], ratings.values[~ratings.is_test]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(args.epochs):
        for rows in torch.randperm(len(values), generator=generator).split(args.batch_size):
            loss = (model(ids[:, rows]) - values[rows]).square().mean()
            loss.backward()
            if adam is not None:
                adam.step()
                adam.zero_grad()
    with torch.no_grad():
        error = (model(ratings.ids[:, ratings.is_test]) - ratings.values[ratings.is_test]).square().mean().item()
    parameters = sum(p.numel() for p in model.factors.parameters())
    return config | {"seed": seed, "test_mse": error, "parameters": parameters}


def configurations(args: argparse.Namespace) -> list[dict]:
    """Configurations of all runs, without the seed."""
    uniform = [{"kind": "uniform", "dim": dim} for dim in args.dims]
    blocks = [{"kind": "blocks", "blocks": args.blocks, "temperature": each} for each in args.temperatures]
    return uniform + blocks


def summary(runs: list[dict]) -> str:
    """A markdown table: parameters, the error's mean, and its paired difference to the first configuration's."""
    lines = []
    groups: dict[str, list[dict]] = {}
    for r in runs:
        name = f"uniform {r['dim']}" if r["kind"] == "uniform" else f"blocks, temperature {r['temperature']:g}"
        groups.setdefault(name, []).append(r)
    first = np.array([r["test_mse"] for r in next(iter(groups.values()))])
    for number, (name, members) in enumerate(groups.items()):
        differences = np.array([r["test_mse"] for r in members]) - first
        paired = ""
        if number and len(members) > 1:
            half = t.ppf(0.975, len(members) - 1) * differences.std(ddof=1) / math.sqrt(len(members))
            paired = f"{differences.mean():+.4f} ± {half:.4f}"
        error = first.mean() + differences.mean()
        lines.append((name, f"{members[0]['parameters']:,}", f"{error:.4f}", paired))
    return bench.table(("tables", "parameters", "test MSE", "minus the first's, 95 %"), lines)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", type=Path, required=True, help="folder of a MovieLens data set, or its ratings")
    parser.add_argument("--dims", type=int, nargs="*", default=[32, 16, 4, 2], help="widths of uniform tables")
    parser.add_argument("--width", type=int, default=32, help="of the widest block, and of what blocks are brought to")
    parser.add_argument("--blocks", type=int, default=8, help="blocks of a table")
    parser.add_argument("--temperatures", type=float, nargs="*", default=[0.3, 0.6, 1.0], help="of blocks' widths")
    parser.add_argument("--seeds", type=int, default=8, help="runs of each configuration, with seeds from 0")
    parser.add_argument("--epochs", type=int, default=25, help="times over the training ratings")
    parser.add_argument("--batch-size", type=int, default=1000, help="ratings of a step")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate of the tables (row-wise Adagrad)")
    parser.add_argument("--weight-decay", type=float, default=5e-4, help="of the tables")
    parser.add_argument("--dense-lr", type=float, default=1e-4, help="learning rate of the blocks' matrices (AdamW)")
    parser.add_argument("--dense-decay", type=float, default=10.0, help="weight decay of the matrices (AdamW)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--output", type=Path, help="JSON of all runs")
    return parser.parse_args()


def main() -> None:
    """The command."""
    args = parse()
    torch.set_num_threads(args.threads)
    ratings = Ratings(args.path)
    wanted = [(config, seed) for config in configurations(args) for seed in range(args.seeds)]
    runs = [run(ratings, args, config, seed) for config, seed in tqdm(wanted, unit="run")]
    print(summary(runs))
    if args.output:
        about = machine(args.threads, "python -m bench.studies.collaborative_filtering")
        settings = {name: str(value) if name in ("path", "output") else value for name, value in vars(args).items()}
        bench.save({"machine": about, "settings": settings, "runs": runs}, args.output)


if __name__ == "__main__":
    main()
