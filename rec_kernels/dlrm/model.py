"""DLRM: bottom MLP, pooled embeddings, pairwise dot products, top MLP (Naumov et al., arXiv:1906.00091)."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import nn

import rec_kernels as rk
from rec_kernels.dlrm.data import Batch, Feature
from rec_kernels.nn.compression import Compression
from rec_kernels.ops.dot_interaction import num_pairs

_SKIPPED_AT_ONCE = 1 << 22  # float32 numbers: 16 MiB


class DLRM(nn.Module):
    """Logit of a row.

    Features whose bags neighbouring rows share (``Feature.shared``) have a collection of their own: from an
    ``rk.InverseKeyedJaggedTensor`` a bag is looked up once, not once per row.

    Args:
        features: the categorical features, a table each.
        num_dense: dense columns.
        embedding_dim: columns D of every table and of the bottom MLP's output.
        bottom: widths of the hidden layers between the dense columns and D.
        top: widths of the hidden layers between the interaction and the logit.
        format: of the tables' rows, as in ``rk.EmbeddingBagConfig``; outputs, MLPs and optimizer state are float32.
        rounding: of updated rows of formats other than fp32, "stochastic" or "nearest".
        compressions: of tables that are kept in fewer numbers, by feature (``rk.EmbeddingBagConfig``).
        optimizer: fused optimizer of the tables, row-wise Adagrad with lr 0.05 by default; the MLPs are
            the business of the caller's optimizer (``dense_parameters``).
        seed: fixes every initial weight, which is the same in every format but for rounding to it, and the noise of
            stochastic rounding: 2 seed is the collections' one of the features that are not shared, 2 seed + 1 of those
            that are. Tables that are not compressed, and the MLPs, start with the same numbers whichever others are.
        init: applied to each table's float32 weight [E, D]; uniform(-1/sqrt(E), 1/sqrt(E)) by default. Not to those of
            ``compressions``, which start as ``rk.EmbeddingBagConfig`` says.
        caches: row caches of the collections "embeddings" and "shared", by these names.
    """

    def __init__(
        self,
        features: Sequence[Feature],
        num_dense: int,
        embedding_dim: int = 16,
        *,
        bottom: Sequence[int] = (64,),
        top: Sequence[int] = (64, 32),
        format: str = "fp32",
        rounding: str = "stochastic",
        compressions: Mapping[str, Compression] = MappingProxyType({}),
        optimizer=None,
        seed: int = 0,
        init: Callable[[torch.Tensor], object] | None = None,
        caches: Mapping[str, rk.RowCache] = MappingProxyType({}),
    ):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        optimizer = optimizer or rk.RowwiseAdagrad(lr=0.05, eps=1e-8)

        def collection(name: str, chosen: list[Feature], noise: int) -> rk.EmbeddingBagCollection | None:
            tables, skipped = [], 0
            for f in chosen:
                given, size = compressions.get(f.name), f.num_embeddings * embedding_dim
                start = None if given else init or _UniformInit(generator, skipped, f.num_embeddings)
                names = {"name": f.name, "feature_names": [f.name]}
                more = {"pooling": f.pooling, "format": format, "compression": given, "init": start}
                tables.append(rk.EmbeddingBagConfig(f.num_embeddings, embedding_dim, **names, **more))
                skipped = skipped + size if given else 0
            options = {"optimizer": optimizer, "rounding": rounding, "seed": noise % 2**63}
            options["cache"] = caches.get(name)
            with torch.random.fork_rng(devices=()):
                # Of tables without an init. Not torch.manual_seed, which reseeds GPUs, too; counted down, because
                # counted up it would be the generator's stream for some seeds.
                torch.default_generator.manual_seed(~noise % 2**32)
                made = rk.EmbeddingBagCollection(tables, **options) if tables else None
            if init is None:
                _skip(generator, skipped)
            return made

        self.embedding_dim, self.format, self.num_features = embedding_dim, format, len(features)
        self.embeddings = collection("embeddings", [f for f in features if not f.shared], 2 * seed)
        self.shared = collection("shared", [f for f in features if f.shared], 2 * seed + 1)
        self.bottom = _mlp([num_dense, *bottom, embedding_dim], generator, final_relu=True)
        self.top = _mlp([embedding_dim + num_pairs(len(features)), *top, 1], generator, final_relu=False)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits, float32 [B]."""
        dense = self.bottom(batch.dense)
        sparse = self.pooled(batch).unflatten(1, (self.num_features, self.embedding_dim))
        return self.top(rk.dot_interaction(dense, sparse)).squeeze(1)

    def pooled(self, batch: Batch) -> torch.Tensor:
        """Embeddings of the features, float32 [B, F D]: the shared ones last."""
        parts = []
        if self.embeddings is not None:
            parts.append(self.embeddings(batch.features).values())
        if self.shared is not None:
            parts.append(self.shared(batch.shared).values())
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def prefetch(self, batch: Batch) -> None:
        """Begins to read what the next batch needs of tables on disk or in host memory."""
        for collection, features in ((self.embeddings, batch.features), (self.shared, batch.shared)):
            if collection is not None:
                collection.prefetch(features)

    def close(self) -> None:
        """Closes the files of tables on disk, without which the model cannot be used; others go on."""
        for collection in self.collections():
            collection.close()

    def collections(self) -> list[rk.EmbeddingBagCollection]:
        """The collections that there are."""
        return [c for c in (self.embeddings, self.shared) if c is not None]

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return self.top[0].weight.device

    def check(self) -> None:
        """Raise IndexError or ValueError if a batch before had bad ids or offsets: a GPU does not tell at once."""
        for module in self.modules():
            if isinstance(module, rk.EmbeddingBagCollection):
                module.check()

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Within it, backwards leave the tables alone; at its end they are updated once, with all the gradients."""
        with contextlib.ExitStack() as stack:
            for collection in self.collections():
                stack.enter_context(collection.accumulate())
            yield

    def dense_parameters(self) -> list[nn.Parameter]:
        """Parameters of the two MLPs and of projections: all that the caller's optimizer has to update."""
        projections = [p for c in self.collections() for p in c.parameters() if p.requires_grad]
        return [*self.bottom.parameters(), *self.top.parameters(), *projections]

    def memory_report(self) -> list[dict]:
        """One dict per table, as ``rk.EmbeddingBagCollection.memory_report``."""
        return [table for c in self.collections() for table in c.memory_report()]

    def tier_report(self) -> dict[str, int]:
        """Bytes of the tables where they are, and bytes moved, as ``rk.EmbeddingBagCollection.tier_report``."""
        reports = [c.tier_report() for c in self.collections()]
        return {name: sum(report[name] for report in reports) for name in (reports[0] if reports else ())}


def _mlp(widths: Sequence[int], generator: torch.Generator, *, final_relu: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        linear = nn.Linear(inputs, outputs)
        nn.init.normal_(linear.weight, std=(2 / (inputs + outputs)) ** 0.5, generator=generator)
        nn.init.normal_(linear.bias, std=(1 / outputs) ** 0.5, generator=generator)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*(layers if final_relu else layers[:-1]))


class _UniformInit:
    """Fills a table of so many rows with the numbers that come after the next ``skipped`` ones, row by row."""

    in_chunks = True

    def __init__(self, generator: torch.Generator, skipped: int, rows: int) -> None:
        self.generator, self.skipped, self.bound = generator, skipped, rows**-0.5

    def __call__(self, weight: torch.Tensor) -> None:
        _skip(self.generator, self.skipped)
        self.skipped = 0
        with torch.no_grad():
            weight.uniform_(-self.bound, self.bound, generator=self.generator)


def _skip(generator: torch.Generator, count: int) -> None:
    """Draws what tables that are compressed would have started with, so that all others start as beside full ones."""
    numbers = torch.empty(min(count, _SKIPPED_AT_ONCE))
    for done in range(0, count, _SKIPPED_AT_ONCE):
        numbers[: count - done].uniform_(generator=generator)
