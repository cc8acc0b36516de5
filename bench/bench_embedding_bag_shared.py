"""embedding_bag of shared bags (`inverse`, `groups`), compared with the same batch with a bag per sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import rec_kernels as rk
from bench.cases import Case
from bench.peers import EPS, LR, fbgemm_ops, fbgemm_tables
from bench.timing import Call

#: Batches that the calls cycle through.
INPUTS = 4
SESSION, ROWS = 9, 100_000  # consecutive samples that share their bags of the group; rows of a table


@dataclass(frozen=True)
class Mixture:
    """B samples of features with D columns each; the first ``grouped`` are a group, of ``bag`` ids, others have one."""

    name: str
    batch: int
    dims: tuple[int, ...]
    grouped: int
    bag: int


MIXTURES = [
    mixture
    for batch in (2043, 16389)  # whole sessions
    for mixture in (
        Mixture(f"8 x 64, half in a group, B = {batch}", batch, (64,) * 8, 4, 20),
        Mixture(f"16 to 128, half in a group, B = {batch}", batch, (16, 32, 64, 128) * 2, 4, 20),
        Mixture(f"26 x 64, one in a group, B = {batch}", batch, (64,) * 26, 1, 50),
    )
]


def _batch(m: Mixture, seed: int) -> rk.KeyedJaggedTensor:
    generator, ids, lengths = torch.Generator().manual_seed(seed), [], []
    for f in range(len(m.dims)):
        samples, bag = (m.batch // SESSION, m.bag) if f < m.grouped else (m.batch, 1)
        drawn = torch.randint(ROWS, (samples, bag), generator=generator)
        ids.append(drawn.repeat_interleave(m.batch // samples, 0).flatten())
        lengths.append(torch.full((m.batch,), bag))
    return rk.KeyedJaggedTensor([f"f{f}" for f in range(len(m.dims))], torch.cat(ids), lengths=torch.cat(lengths))


def _collection(dims: dict[str, int]) -> rk.EmbeddingBagCollection:
    tables = [rk.EmbeddingBagConfig(ROWS, dim, name=key, feature_names=[key]) for key, dim in dims.items()]
    return rk.EmbeddingBagCollection(tables, optimizer=rk.RowwiseAdagrad(lr=LR, eps=EPS))


class Bags:
    """Batches of a mixture, and the lookups of them, which return [B, sum of D]."""

    def __init__(self, mixture: Mixture) -> None:
        keys = [f"f{f}" for f in range(len(mixture.dims))]
        self.dims = dict(zip(keys, mixture.dims, strict=True))
        self.group = keys[: mixture.grouped]
        self.whole = [_batch(mixture, seed) for seed in range(INPUTS)]
        self.few = [rk.InverseKeyedJaggedTensor.from_kjt(batch, [self.group]) for batch in self.whole]
        self.grad = torch.randn(mixture.batch, sum(mixture.dims))
        self.optimizer: torch.optim.Optimizer | None = None

    def lookup(self, name: str) -> Callable[[int], Tensor]:
        """Returns an implementation's lookup, a function of the index of a batch."""
        if name == "ours":
            module = _collection(self.dims)
            return lambda i: module(self.few[i]).values()
        if name == "two collections":
            halves = ({k: d for k, d in self.dims.items() if (k in self.group) == of} for of in (True, False))
            parts = [_collection(half) for half in halves]
            return lambda i: torch.cat([part(self.few[i]).values() for part in parts], dim=1)
        if name == "whole batch":
            module = _collection(self.dims)
            return lambda i: module(self.whole[i]).values()
        if name == "fbgemm, whole batch":
            theirs = fbgemm_tables([(ROWS, d) for d in self.dims.values()])
            return lambda i: theirs(self.whole[i].values(), self.whole[i].offsets())
        tables = {k: torch.nn.EmbeddingBag(ROWS, d, mode="sum", sparse=True) for k, d in self.dims.items()}
        self.optimizer = torch.optim.Adagrad([t.weight for t in tables.values()], lr=LR, eps=EPS)

        def by_table(i: int) -> Tensor:
            bags = {key: self.whole[i][key] for key in tables}
            return torch.cat([table(bags[k].values(), bags[k].offsets()[:-1]) for k, table in tables.items()], dim=1)

        return by_table

    def train(self, name: str) -> Call:
        """Runs lookup, backward and update."""
        self.optimizer = None
        lookup, optimizer = self.lookup(name), self.optimizer

        def step(i: int) -> None:
            lookup(i).backward(self.grad)
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()

        return step


def cases() -> Iterator[Case]:
    """Yields the cases. Bytes are those of the output and, in training, of its gradient."""
    names = ["ours", "two collections", "whole batch", "torch, whole batch"]
    names += ["fbgemm, whole batch"] * (fbgemm_ops() is not None)
    for mixture in MIXTURES:
        bags = Bags(mixture)
        size = 4 * bags.grad.numel()
        yield Case(f"shared bags, {mixture.name}", names, bags.lookup, size, INPUTS)
        yield Case(f"shared bags, trained, {mixture.name}", names, bags.train, 2 * size, INPUTS, gradients=True)
