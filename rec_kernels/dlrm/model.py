"""DLRM (Naumov et al., arXiv:1906.00091), and DCN V2 and Wukong, which replace its interaction."""

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

#: Dtypes of the dense side and of pooled embeddings, by precision.
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
#: Formats of activations; the mx formats have blocks of 16 columns.
ACTIVATIONS = ("fp32", "mx9", "mx6", "mx4")
_SKIP_CHUNK = 1 << 22  # elements: 16 MiB of float32


class DotInteraction(nn.Module):
    """DLRM's interaction: the dense vector and all pairwise dot products.

    An interaction maps dense [B, D] and sparse [B, F, D] to [B, ``out_features``].
    """

    def __init__(self, num_features: int, embedding_dim: int):
        super().__init__()
        self.out_features = embedding_dim + num_pairs(num_features)

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        """Computes the interaction."""
        return rk.dot_interaction(dense, sparse)


class CrossInteraction(nn.Module):
    """DCN V2's low-rank cross layers over the dense vector and the pooled embeddings, its stacked structure.

    Source: R. Wang et al. (arXiv:2008.13535); after DLRM's bottom MLP, as in MLPerf's DLRM-DCNv2.
    """

    def __init__(self, num_features: int, embedding_dim: int, num_layers: int, low_rank: int):
        super().__init__()
        self.out_features = (num_features + 1) * embedding_dim
        self.cross = rk.LowRankCrossNet(self.out_features, num_layers, low_rank)

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        """Computes the interaction."""
        return self.cross(torch.cat((dense, sparse.flatten(1)), dim=1))


class WukongInteraction(nn.Module):
    """Wukong's interaction stack over the dense vector and the pooled embeddings (B. Zhang et al., arXiv:2403.02545).

    ``features`` is the number of output vectors of each block (FM and linear) of a layer.
    """

    def __init__(
        self, num_features: int, embedding_dim: int, num_layers: int, features: int, factors: int, hidden: Sequence[int]
    ):
        super().__init__()
        options: dict[str, Any] = {"fm_features": features, "linear_features": features, "factors": factors}
        self.stack = rk.Wukong(num_features + 1, embedding_dim, num_layers, **options, hidden=hidden)
        self.out_features = self.stack.out_features * embedding_dim

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        """Computes the interaction."""
        return self.stack(torch.cat((dense.unsqueeze(1), sparse), dim=1)).flatten(1)


class DLRM(nn.Module):
    """Click-through-rate model: a logit per row.

    Tables of shared features (``Feature.shared``) come first, so that an ``rk.InverseKeyedJaggedTensor`` looks up each
    of their distinct bags once.

    Args:
        features: the categorical features; each has a table.
        num_dense: dense columns.
        embedding_dim: columns D of every table and of the bottom MLP's output.
        bottom, top: hidden layer widths of the MLPs.
        interaction: called with the number of features and D, returns a module like ``DotInteraction``; its initial
            weights may use torch's default generator, which is seeded.
        format: row format of the tables, as in ``rk.EmbeddingBagConfig``; all other state is float32.
        rounding: of updated rows that are not fp32, "stochastic" or "nearest".
        compressions: of compressed tables, by feature name (``rk.EmbeddingBagConfig``).
        optimizer: fused optimizer of the tables, by default row-wise Adagrad with lr 0.05. The caller's optimizer
            updates ``dense_parameters()``.
        seed: of the initial weights and of stochastic rounding. Weights are equal in all formats except for rounding.
            Uncompressed tables are uniform(-1/sqrt(E), 1/sqrt(E)); they and the MLPs do not depend on which tables are
            compressed.
        cache: row cache of the tables.
        sharded: create the tables on the meta device, to be sharded.
        precision: "fp32", or "bf16" for torch.autocast of MLPs and interaction, with pooled embeddings rounded by the
            lookup. Parameters and logits are float32.
        activations: format, one of ``rk.ROW_FORMATS``, to which inputs of the interaction and of linear layers are
            rounded by ``rk.fake_quantize``; "fp32": not rounded.
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
        self.precision, self._dense_side = precision, DLRM.dense_side  # unbound: a copy of the model passes itself
        ordered = sorted(features, key=lambda f: not f.shared)  # the order of Batch.joined()
        tables, skipped = _tables(ordered, embedding_dim, format, compressions, None if sharded else generator)
        noise = seed % 2**63
        options: dict[str, Any] = {"optimizer": optimizer or rk.RowwiseAdagrad(lr=0.05, eps=1e-8), "rounding": rounding}
        options["output_dtype"] = dtype_of(precision)
        # Compressed tables and the interaction use the default generator. Its seed is ~seed, because seed would repeat
        # the values of ``generator``. torch.manual_seed would also reseed GPUs.
        with torch.random.fork_rng(devices=()):
            torch.default_generator.manual_seed(~noise % 2**32)
            options["device"] = "meta" if sharded else None
            self.embeddings = rk.EmbeddingBagCollection(tables, **options, seed=noise, cache=cache)
            torch.default_generator.manual_seed((~noise ^ 1 << 31) % 2**32)  # independent of what the tables drew
            self.interaction = interaction(len(features), embedding_dim)
        _skip(generator, skipped)
        self.bottom = _mlp([num_dense, *bottom, embedding_dim], generator, final_relu=True)
        width: Any = self.interaction.out_features
        self.top = _mlp([width, *top, 1], generator, final_relu=False)
        if activations != "fp32":
            rk.row_bytes(activations, 1)  # raises for an unknown format now, not in the first step
            for module in self.modules():
                if module is self.interaction or isinstance(module, nn.Linear):
                    module.register_forward_pre_hook(functools.partial(_quantize, activations))

    def forward(self, batch: Batch) -> torch.Tensor:
        """Computes logits, float32 [B]."""
        return self.logits(batch.dense, self.pooled(batch))

    def logits(self, dense: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        """Computes logits, float32 [B], from dense columns [B, num_dense] and the result of ``pooled``."""
        return self._dense_side(self, dense, pooled.unflatten(1, (self.num_features, self.embedding_dim)))

    def dense_side(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        """Computes logits, float32 [B], from dense columns [B, num_dense] and pooled embeddings [B, F, D]."""
        dtype = dtype_of(self.precision)
        with contextlib.nullcontext() if dtype == torch.float32 else torch.autocast(self.device.type, dtype):
            logits = self.top(self.interaction(self.bottom(dense), sparse))
        return logits.squeeze(1).float()

    def compile_dense_side(self, mode: str) -> None:
        """Runs MLPs and interaction by ``torch.compile`` with this ``mode``.

        Shapes are static: graphs that depended on earlier batch sizes would change the bits of a resumed run. Compiled
        code of this process is dropped, because torch limits the graphs per function.
        """
        torch._dynamo.reset()
        self._dense_side = torch.compile(DLRM.dense_side, mode=mode, fullgraph=True, dynamic=False)

    def pooled(self, batch: Batch) -> torch.Tensor:
        """Looks up the features, shared ones first: [B, F D] of the dtype of ``precision``."""
        return self.embeddings(batch.joined().features).values()

    def prefetch(self, batch: Batch) -> None:
        """Prefetches the next batch's rows of tables on disk or in host memory."""
        self.embeddings.prefetch(batch.joined().features)

    @property
    def local_tables(self) -> rk.EmbeddingBagCollection:
        """The collection of this process's tables, or of its shards."""
        return getattr(self.embeddings, "shards", self.embeddings)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.top.parameters()).device

    def dense_parameters(self) -> list[nn.Parameter]:
        """The parameters of MLPs, interaction and the tables' projections, for the caller's optimizer."""
        parts = (self.bottom, self.interaction, self.top)
        return [*(p for part in parts for p in part.parameters()), *rk.dense_parameters(self.embeddings)]


def _tables(
    features: Sequence[Feature],
    embedding_dim: int,
    format: str,
    compressions: Mapping[str, Compression],
    generator: torch.Generator | None,
) -> tuple[list[rk.EmbeddingBagConfig], int]:
    """The tables' configs, and the number of generator values to skip after initializing them."""
    tables, skipped = [], 0
    for f in features:
        compression = compressions.get(f.name)
        init = None if compression or generator is None else _UniformInit(generator, skipped, f.num_embeddings)
        options: dict[str, Any] = {"pooling": f.pooling, "format": format, "compression": compression, "init": init}
        options |= {"name": f.name, "feature_names": [f.name]}
        tables.append(rk.EmbeddingBagConfig(f.num_embeddings, embedding_dim, **options))
        skipped = skipped + f.num_embeddings * embedding_dim if init is None else 0
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
    """Initializer of a table, by chunks of rows, after skipping ``skipped`` values of the generator."""

    in_chunks = True

    def __init__(self, generator: torch.Generator, skipped: int, rows: int) -> None:
        self.generator, self.skipped, self.bound = generator, skipped, rows**-0.5

    def __call__(self, weight: torch.Tensor) -> None:
        _skip(self.generator, self.skipped)
        self.skipped = 0
        with torch.no_grad():
            weight.uniform_(-self.bound, self.bound, generator=self.generator)


def _skip(generator: torch.Generator, count: int) -> None:
    """Draws the values of tables that are compressed, so that other weights do not depend on the compression."""
    values = torch.empty(min(count, _SKIP_CHUNK))
    for done in range(0, count, _SKIP_CHUNK):
        values[: count - done].uniform_(generator=generator)


def dtype_of(precision: str) -> torch.dtype:
    """The dtype of a precision; ValueError if it is not in ``PRECISIONS``."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}, allowed is {' or '.join(PRECISIONS)}")
    return PRECISIONS[precision]


def _quantize(format: str, _: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    # fake_quantize needs at least one column; a data set may have no dense columns.
    return tuple(rk.fake_quantize(x, format) if x.shape[-1] else x for x in inputs)


def flops_per_example(model: DLRM, features: Sequence[Feature], num_dense: int) -> int:
    """FLOPs of the matrix products in the forward of a row, counted by ``FlopCounterMode``; lookups do not count.

    The row has no ids, so counters of a row cache do not change.
    """
    keys = [feature.name for feature in sorted(features, key=lambda f: not f.shared)]  # the order of Batch.joined()
    bags = rk.KeyedJaggedTensor(keys, torch.empty(0, dtype=torch.int64), lengths=torch.zeros(len(keys)).long())
    row = Batch(torch.zeros(1, num_dense), bags, torch.zeros(1)).to(model.device)
    eager = torch.compiler.set_stance("force_eager")  # compiled code is not counted
    with torch.no_grad(), eager, FlopCounterMode(display=False) as counter:
        model(row)
    return counter.get_total_flops()
