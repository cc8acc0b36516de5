"""embedding_bag of bags that samples share (`inverse`, `groups`), beside the same batch with a bag for each sample."""

from __future__ import annotations

import contextlib
import functools
import io
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import rec_kernels as rk
from bench.peers import EPS, LR, fbgemm_ops, fill
from bench.timing import time_calls

#: Batches that the calls take in turn.
INPUTS = 4
SESSION, ROWS = 9, 100_000  # samples that have their bags of the group in common, one after the other; rows of a table


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
IMPLEMENTATIONS = ["ours", "two collections", "whole batch", "torch, whole batch"]
IMPLEMENTATIONS += ["fbgemm, whole batch"] * (fbgemm_ops() is not None)


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


class Subject:
    """Batches of a mixture, and what looks them up: functions of the number of a batch, [B, sum of D] each."""

    def __init__(self, mixture: Mixture) -> None:
        self.mixture = mixture
        keys = [f"f{f}" for f in range(len(mixture.dims))]
        self.dims = dict(zip(keys, mixture.dims, strict=True))
        self.group = keys[: mixture.grouped]
        self.whole = [_batch(mixture, seed) for seed in range(INPUTS)]
        self.few = [rk.InverseKeyedJaggedTensor.from_kjt(batch, [self.group]) for batch in self.whole]
        self.grad = torch.randn(mixture.batch, sum(mixture.dims))

    @functools.cached_property
    def module(self) -> rk.EmbeddingBagCollection:
        """One collection of all features."""
        return _collection(self.dims)

    @functools.cached_property
    def parts(self) -> list[rk.EmbeddingBagCollection]:
        """The group's, and the others'."""
        return [_collection({k: d for k, d in self.dims.items() if (k in self.group) == of}) for of in (True, False)]

    @functools.cached_property
    def torch_tables(self) -> tuple[list[torch.nn.EmbeddingBag], torch.optim.Optimizer]:
        """A module of torch for each table."""
        tables = [torch.nn.EmbeddingBag(ROWS, d, mode="sum", sparse=True) for d in self.mixture.dims]
        return tables, torch.optim.Adagrad([t.weight for t in tables], lr=LR, eps=EPS)

    @functools.cached_property
    def fbgemm(self) -> torch.nn.Module:
        """FBGEMM's tables."""
        with contextlib.redirect_stdout(io.StringIO()):
            from fbgemm_gpu.split_embedding_configs import EmbOptimType
            from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
                ComputeDevice,
                EmbeddingLocation,
                SplitTableBatchedEmbeddingBagsCodegen,
            )
        specs = [(ROWS, d, EmbeddingLocation.HOST, ComputeDevice.CPU) for d in self.mixture.dims]
        tables = SplitTableBatchedEmbeddingBagsCodegen(
            specs, optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=LR, eps=EPS
        )
        fill(tables)
        return tables

    def forward(self, name: str, i: int) -> Tensor:
        """One lookup."""
        whole = self.whole[i]
        if name == "ours":
            return self.module(self.few[i]).values()
        if name == "two collections":
            return torch.cat([part(self.few[i]).values() for part in self.parts], dim=1)
        if name == "whole batch":
            return self.module(whole).values()
        if name == "fbgemm, whole batch":
            return self.fbgemm(whole.values(), whole.offsets())
        tables = zip(self.dims, self.torch_tables[0], strict=True)
        return torch.cat([table(whole[key].values(), whole[key].offsets()[:-1]) for key, table in tables], dim=1)

    def train(self, name: str, i: int) -> None:
        """Lookup, backward and update."""
        self.forward(name, i).backward(self.grad)
        if name.startswith("torch"):
            self.torch_tables[1].step()
            self.torch_tables[1].zero_grad()


@pytest.fixture(scope="module", params=MIXTURES, ids=lambda m: m.name)
def subject(request: pytest.FixtureRequest) -> Subject:
    """The mixture under test."""
    return Subject(request.param)


def test_forward(benchmark, subject: Subject, name: str, rounds: int) -> None:
    """Under no_grad. Bytes: what is written."""
    benchmark.group = f"shared bags, {subject.mixture.name}"
    with torch.no_grad():
        time_calls(benchmark, functools.partial(subject.forward, name), INPUTS, rounds, 4 * subject.grad.numel())


def test_train(benchmark, subject: Subject, name: str, rounds: int) -> None:
    """Times forward, backward and update. Bytes counted: the output and its gradient."""
    benchmark.group = f"shared bags, trained, {subject.mixture.name}"
    time_calls(benchmark, functools.partial(subject.train, name), INPUTS, rounds, 8 * subject.grad.numel())
