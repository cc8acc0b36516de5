"""DLRM: bottom MLP, pooled embeddings, pairwise dot products, top MLP (Naumov et al., arXiv:1906.00091).

DCN V2 and Wukong are the same with another interaction.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import rec_kernels as rk
from rec_kernels.dlrm.data import Batch, Feature
from rec_kernels.nn.tables.compression import Compression
from rec_kernels.ops.dot_interaction import num_pairs

#: Dtypes of the dense side, and of what the tables give it, by the name of a precision.
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
#: Formats of activations; those of mx are of blocks of 16 columns of a row.
ACTIVATIONS = ("fp32", "mx9", "mx6", "mx4")
_SKIPPED_AT_ONCE = 1 << 22  # float32 numbers: 16 MiB


class DotInteraction(nn.Module):
    """The dense vector, and the dot product of each pair among it and the pooled embeddings.

    An interaction is made from the number of features F and the columns D. It gives [B, ``out_features``] of dense
    [B, D] and sparse [B, F, D].
    """

    def __init__(self, num_features: int, embedding_dim: int):
        super().__init__()
        self.out_features = embedding_dim + num_pairs(num_features)

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        """Computes the interaction."""
        return rk.dot_interaction(dense, sparse)


class CrossInteraction(nn.Module):
    """DCN V2's low-rank cross layers over the dense vector and the pooled embeddings: its stacked structure.

    Source: R. Wang et al. (arXiv:2008.13535); with DLRM's bottom MLP in front, as MLPerf's DLRM-DCNv2 has it.
    ``num_layers`` and ``low_rank`` are those of ``rk.LowRankCrossNet``.
    """

    def __init__(self, num_features: int, embedding_dim: int, num_layers: int, low_rank: int):
        super().__init__()
        self.out_features = (num_features + 1) * embedding_dim
        self.cross = rk.LowRankCrossNet(self.out_features, num_layers, low_rank)

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        """Computes the interaction; arguments as of ``DotInteraction``."""
        return self.cross(torch.cat((dense, sparse.flatten(1)), dim=1))


class WukongInteraction(nn.Module):
    """Wukong's interaction stack over the dense vector and the pooled embeddings (B. Zhang et al., arXiv:2403.02545).

    ``features`` are the vectors that either block of a layer makes; ``factors`` and ``hidden`` those of
    ``rk.WukongLayer``.
    """

    def __init__(
        self, num_features: int, embedding_dim: int, num_layers: int, features: int, factors: int, hidden: Sequence[int]
    ):
        super().__init__()
        options: dict[str, Any] = {"fm_features": features, "linear_features": features, "factors": factors}
        self.stack = rk.Wukong(num_features + 1, embedding_dim, num_layers, **options, hidden=hidden)
        self.out_features = self.stack.out_features * embedding_dim

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        """Computes the interaction; arguments as of ``DotInteraction``."""
        return self.stack(torch.cat((dense.unsqueeze(1), sparse), dim=1)).flatten(1)


class DLRM(nn.Module):
    """Logit of a row.

    All tables are one collection, with those of features whose bags neighbouring rows share (``Feature.shared``) first:
    from an ``rk.InverseKeyedJaggedTensor`` such a bag is looked up once, not once per row.

    Args:
        features: the categorical features, a table each.
        num_dense: dense columns.
        embedding_dim: columns D of every table and of the bottom MLP's output.
        bottom: widths of the hidden layers between the dense columns and D.
        top: widths of the hidden layers between the interaction and the logit.
        interaction: makes the module between, as ``DotInteraction``, from the number of features and D. It draws what
            it starts with from torch's generator, which is seeded for it.
        format: of the tables' rows, as in ``rk.EmbeddingBagConfig``; optimizer state and the MLPs' parameters are
            float32.
        rounding: of updated rows of formats other than fp32, "stochastic" or "nearest".
        compressions: of tables that are kept in fewer numbers, by feature (``rk.EmbeddingBagConfig``).
        optimizer: fused optimizer of the tables, row-wise Adagrad with lr 0.05 by default; the rest of the model is
            the business of the caller's optimizer (``dense_parameters``).
        seed: fixes every initial weight, which is the same in every format but for rounding to it, and the noise of
            stochastic rounding. Tables that are not compressed are uniform(-1/sqrt(E), 1/sqrt(E)); they, and the MLPs,
            start with the same numbers whichever others are compressed.
        cache: row cache of the tables.
        sharded: the tables are on the meta device, where another process may have their rows; the MLPs are as ever.
        precision: what MLPs and interaction compute in, "fp32" or "bf16": under torch.autocast, from pooled embeddings
            that the tables' kernels round to bfloat16. Parameters and logits are float32.
        activations: format in which the interaction and every linear layer get their inputs, one of
            ``rk.ROW_FORMATS``: each row is rounded by ``rk.fake_quantize``, with the gradient of the identity. "fp32":
            nothing is rounded.
    """

    def __init__(
        self,
        features: Sequence[Feature],
        num_dense: int,
        embedding_dim: int = 16,
        *,
        bottom: Sequence[int] = (64,),
        top: Sequence[int] = (64, 32),
        interaction: Callable[[int, int], nn.Module] = DotInteraction,
        format: str = "fp32",
        rounding: str = "stochastic",
        compressions: Mapping[str, Compression] = MappingProxyType({}),
        optimizer=None,
        seed: int = 0,
        cache: rk.RowCache | None = None,
        precision: str = "fp32",
        activations: str = "fp32",
        sharded: bool = False,
    ):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embedding_dim, self.num_features = embedding_dim, len(features)
        self.precision, self._dense_side = precision, DLRM.dense_side  # takes the model: copies of it have their own
        ordered = sorted(features, key=lambda f: not f.shared)  # as Batch.joined() has them
        tables, skipped = _tables(ordered, embedding_dim, format, compressions, None if sharded else generator)
        noise = seed % 2**63
        options: dict[str, Any] = {"optimizer": optimizer or rk.RowwiseAdagrad(lr=0.05, eps=1e-8), "rounding": rounding}
        options["output_dtype"] = dtype_of(precision)
        # Seed for compressed tables and the interaction. torch.manual_seed would reseed GPUs, too; it counts down,
        # because counted up it would be the generator's stream.
        with torch.random.fork_rng(devices=()):
            torch.default_generator.manual_seed(~noise % 2**32)
            options["device"] = "meta" if sharded else None
            self.embeddings = rk.EmbeddingBagCollection(tables, **options, seed=noise, cache=cache)
            torch.default_generator.manual_seed((~noise ^ 1 << 31) % 2**32)  # another stream, whatever the tables drew
            self.interaction = interaction(len(features), embedding_dim)
        _skip(generator, skipped)
        self.bottom = _mlp([num_dense, *bottom, embedding_dim], generator, final_relu=True)
        width: Any = self.interaction.out_features
        self.top = _mlp([width, *top, 1], generator, final_relu=False)
        if activations != "fp32":
            rk.row_bytes(activations, 1)  # raises now, not in the first step
            for module in self.modules():
                if module is self.interaction or isinstance(module, nn.Linear):
                    module.register_forward_pre_hook(functools.partial(_quantize, activations))

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits, float32 [B]."""
        return self.logits(batch.dense, self.pooled(batch))

    def logits(self, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        """Logits, float32 [B], of dense columns [B, num_dense] and what ``pooled`` gives."""
        return self._dense_side(self, dense, pooled.unflatten(1, (self.num_features, self.embedding_dim)))

    def dense_side(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        """Logits, float32 [B], of dense columns [B, num_dense] and pooled embeddings [B, F, D]."""
        dtype = dtype_of(self.precision)
        with contextlib.nullcontext() if dtype == torch.float32 else torch.autocast(self.device.type, dtype):
            logits = self.top(self.interaction(self.bottom(dense), sparse))
        return logits.squeeze(1).float()

    def compile_dense_side(self, mode: str) -> None:
        """Makes ``forward`` run MLPs and interaction by ``torch.compile`` with this ``mode``.

        Every size of a batch has a graph, which is the same whichever came before: a resumed run has the bits of one
        that was not stopped. What was compiled before in this process is forgotten: graphs of a function are few.
        """
        torch._dynamo.reset()
        self._dense_side = torch.compile(DLRM.dense_side, mode=mode, fullgraph=True, dynamic=False)

    def pooled(self, batch: Batch) -> torch.Tensor:
        """Embeddings of the features, [B, F D] of the dtype of ``precision``: the shared ones first."""
        return self.embeddings(batch.joined().features).values()

    def prefetch(self, batch: Batch) -> None:
        """Begins to read what the next batch needs of tables on disk or in host memory."""
        self.embeddings.prefetch(batch.joined().features)

    @property
    def own_tables(self) -> rk.EmbeddingBagCollection:
        """The tables that this process has: all, or the shards of several processes' tables."""
        return getattr(self.embeddings, "shards", self.embeddings)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.top.parameters()).device

    def dense_parameters(self) -> list[nn.Parameter]:
        """Parameters of MLPs, interaction and projections: all that the caller's optimizer has to update."""
        projections = rk.dense_parameters(self.embeddings)
        parts = (self.bottom, self.interaction, self.top)
        return [*(p for part in parts for p in part.parameters()), *projections]


def _tables(
    features: Sequence[Feature],
    embedding_dim: int,
    format: str,
    compressions: Mapping[str, Compression],
    generator: torch.Generator | None,
) -> tuple[list[rk.EmbeddingBagConfig], int]:
    """A table each; how many numbers of the generator are to be skipped after the last. None: tables begin without."""
    tables, skipped = [], 0
    for f in features:
        given, size = compressions.get(f.name), f.num_embeddings * embedding_dim
        start = None if given or generator is None else _UniformInit(generator, skipped, f.num_embeddings)
        names: dict[str, Any] = {"name": f.name, "feature_names": [f.name]}
        more: dict[str, Any] = {"pooling": f.pooling, "format": format, "compression": given, "init": start}
        tables.append(rk.EmbeddingBagConfig(f.num_embeddings, embedding_dim, **names, **more))
        skipped = skipped + size if start is None else 0
    return tables, skipped


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


def dtype_of(precision: str) -> torch.dtype:
    """dtype of a precision's name; ValueError if it is none of ``PRECISIONS``."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}, allowed is {' or '.join(PRECISIONS)}")
    return PRECISIONS[precision]


def _quantize(format: str, _: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    # A data set may have no dense columns; fake_quantize needs one.
    return tuple(rk.fake_quantize(x, format) if x.shape[-1] else x for x in inputs)


def flops_per_example(model: DLRM, features: Sequence[Feature], num_dense: int) -> int:
    """Operations of a forward's matrix products, two for a multiplication with its addition, as ``FlopCounterMode``.

    Counted on ``model``, of a row without ids: what a lookup adds up is not counted, and no counter of a cache moves.
    """
    keys = [feature.name for feature in sorted(features, key=lambda f: not f.shared)]  # as Batch.joined() has them
    bags = rk.KeyedJaggedTensor(keys, torch.empty(0, dtype=torch.int64), lengths=torch.zeros(len(keys)).long())
    row = Batch(torch.zeros(1, num_dense), bags, torch.zeros(1)).to(model.device)
    eager = torch.compiler.set_stance("force_eager")  # what is compiled is not counted
    with torch.no_grad(), eager, FlopCounterMode(display=False) as counter:
        model(row)
    return counter.get_total_flops()
