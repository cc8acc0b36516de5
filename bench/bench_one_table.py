"""Modules of one table (popularity blocks, paths) compared with the same in plain torch and with a plain table."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

import rec_kernels as rk
from bench.cases import Case
from bench.peers import EPS, LR
from bench.shapes import BATCHES, Workload
from bench.subject import DIRECTIONS
from bench.timing import Call

WORKLOAD = Workload("one d64-zipf", 1, 2048, 1_000_000, 64, 20, zipf=1.05)
KINDS = ("blocks", "matrices", "perceptrons")
BLOCKS, TEMPERATURE = 8, 0.3
COLLISIONS, HIDDEN = 16, 64


class TorchBlocks(nn.Module):
    """The recipe that a user would write: per block, look up the rows, apply a linear layer, scatter the results."""

    def __init__(self, sizes: list[int], dims: list[int], width: int, ranks: Tensor) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(*size, sparse=True) for size in zip(sizes, dims, strict=True))
        self.matrices = nn.ModuleList(
            nn.Identity() if dim == width else nn.Linear(dim, width, bias=False) for dim in dims
        )
        self.starts, self.ranks, self.width = [sum(sizes[:k]) for k in range(len(sizes) + 1)], ranks, width

    def forward(self, bags: rk.JaggedTensor) -> Tensor:
        """[B, D]."""
        ranks = self.ranks[bags.values()]
        rows = torch.zeros(len(ranks), self.width)
        for k, (table, matrix) in enumerate(zip(self.tables, self.matrices, strict=True)):
            places = ((ranks >= self.starts[k]) & (ranks < self.starts[k + 1])).nonzero()[:, 0]
            rows = rows.index_add(0, places, matrix(table(ranks[places] - self.starts[k])))
        return torch.segment_reduce(rows, "sum", offsets=bags.offsets(), axis=0)


class TorchPath(nn.Module):
    """The recipe that a user would write: look up rows by remainder, then apply each quotient's function to its ids'
    rows."""

    def __init__(self, rows: int, dim: int, collisions: int, hidden: int | None) -> None:
        super().__init__()
        self.buckets = -(-rows // collisions)
        self.table = nn.Embedding(self.buckets, dim, sparse=True)

        def function() -> nn.Module:
            if hidden is None:
                return nn.Linear(dim, dim, bias=False)
            return nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, dim))

        self.functions = nn.ModuleList(function() for _ in range(collisions))

    def forward(self, bags: rk.JaggedTensor) -> Tensor:
        """[B, D]."""
        ids = bags.values()
        base, quotients = self.table(ids % self.buckets), ids // self.buckets
        rows = torch.zeros_like(base)
        for k, function in enumerate(self.functions):
            places = (quotients == k).nonzero()[:, 0]
            rows = rows.index_add(0, places, function(base[places]))
        return torch.segment_reduce(rows, "sum", offsets=bags.offsets(), axis=0)


class Trained:
    """A module with the optimizers of its sparse and its dense parameters."""

    def __init__(self, module: nn.Module, read: Callable[[rk.JaggedTensor], Tensor] | None = None) -> None:
        self.read = read or module
        tables = [m.weight for m in module.modules() if isinstance(m, nn.Embedding)]
        dense = [p for p in rk.dense_parameters(module) if all(p is not t for t in tables)]
        self.optimizers = [torch.optim.Adagrad(tables, lr=LR, eps=EPS)] if tables else []
        self.optimizers += [torch.optim.SGD(dense, lr=LR)] if dense else []

    def train(self, bags: rk.JaggedTensor, grad: Tensor) -> None:
        """Runs one training step."""
        self.read(bags).backward(grad)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


@functools.lru_cache(maxsize=1)
def _batches() -> list[rk.JaggedTensor]:
    return [rk.JaggedTensor(WORKLOAD.ids(seed), offsets=WORKLOAD.offsets()) for seed in range(BATCHES)]


@functools.lru_cache(maxsize=3)
def _built(kind: str, name: str) -> Trained:
    rows, dim, optimizer = WORKLOAD.rows, WORKLOAD.dim, rk.RowwiseAdagrad(lr=LR, eps=EPS)
    if name == "plain table":
        plain = rk.EmbeddingBagConfig(rows, dim, name="t", feature_names=["f"])
        collection = rk.EmbeddingBagCollection([plain], optimizer=optimizer)
        return Trained(
            collection, lambda b: collection(rk.KeyedJaggedTensor(["f"], b.values(), offsets=b.offsets())).values()
        )
    if kind == "blocks":
        counts = torch.bincount(torch.cat([b.values() for b in _batches()]), minlength=rows)
        ranks, sizes = rk.popularity_blocks(counts, BLOCKS)
        dims = rk.mixed_dimensions(sizes, dim, TEMPERATURE, threshold=0)
        if name == "torch":
            return Trained(TorchBlocks(sizes, dims, dim, ranks))
        return Trained(rk.MixedDimensionEmbeddingBag(sizes, dims, dim, ranks=ranks, optimizer=optimizer))
    hidden = HIDDEN if kind == "perceptrons" else None
    if name == "torch":
        return Trained(TorchPath(rows, dim, COLLISIONS, hidden))
    return Trained(rk.PathEmbeddingBag(rows, dim, COLLISIONS, hidden=hidden, optimizer=optimizer))


def _call(kind: str, direction: str, name: str) -> Call:
    made, grad = _built(kind, name), torch.randn(WORKLOAD.batch, WORKLOAD.dim)
    if direction == "forward":
        return lambda i: made.read(_batches()[i])
    return lambda i: made.train(_batches()[i], grad)


def cases() -> Iterator[Case]:
    """Yields the cases. Bytes: those of a plain table. Row-wise Adagrad (torch: Adagrad) trains tables, SGD others."""
    for kind, direction in itertools.product(KINDS, DIRECTIONS):
        call, trains = functools.partial(_call, kind, direction), direction == "train"
        names, moved = ["ours", "torch", "plain table"], WORKLOAD.forward_bytes()
        yield Case(f"{direction} {kind}", names, call, moved, BATCHES, gradients=trains, slow=["torch"] * trains)
