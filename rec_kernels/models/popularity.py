"""Block-wise mixed-dimension embedding table: less popular rows have fewer columns.

Source: "block-wise mixed dimension embeddings" of A. Ginart et al., "Mixed Dimension Embeddings with Application to
Memory-Efficient Recommendation Systems" (arXiv:1909.11810): rows are sorted by popularity and divided into blocks, each
with its own dimension and a projection to the model's dimension.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from rec_kernels.models.one_table import OneTable, without_autocast
from rec_kernels.nn.arguments import positive_integer
from rec_kernels.nn.embedding_bag_collection import EmbeddingBagCollection
from rec_kernels.nn.jagged.bounds import to_offsets
from rec_kernels.nn.jagged.checks import has_data
from rec_kernels.nn.jagged.tensors import KeyedJaggedTensor
from rec_kernels.nn.tables.config import EmbeddingBagConfig
from rec_kernels.nn.tables.optimizers import Optimizer


def popularity_blocks(counts: Tensor, num_blocks: int) -> tuple[Tensor, list[int]]:
    """Partitions ids into blocks with equal numbers of lookups.

    Args:
        counts: [E], number of lookups of each id in the training data, at least 0. Counts beyond 2^53 are rounded.
        num_blocks: maximum number of blocks, at least 1. Each block has at least one id and at least as many ids as the
            previous block, so fewer blocks result if many ids are equally popular or few ids dominate.

    Returns:
        The popularity rank of each id, int64 [E], 0 for the most popular (ties go to the smaller id); and the number of
        ids per block, most popular block first, ascending. Both are arguments of ``rk.mixed_dimensions`` (with
        ``threshold=0``) and ``rk.MixedDimensionEmbeddingBag``.

    Raises:
        ValueError: counts are negative, not finite or not one-dimensional, or num_blocks is below 1.
    """
    counts = counts if isinstance(counts, Tensor) else torch.as_tensor(counts, device="cpu")
    if counts.dim() != 1 or len(counts) < 1:
        raise ValueError(f"counts must be [E] with E at least 1, got shape {list(counts.shape)}")
    exact = counts.double().cpu()
    valid = exact.isfinite() & (exact >= 0)
    if not valid.all():
        first = int((~valid).nonzero()[0])
        raise ValueError(f"counts[{first}] = {counts[first].item()} must be finite and at least 0")
    num_blocks = positive_integer("num_blocks", num_blocks)
    order = torch.argsort(exact, descending=True, stable=True)
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(len(order), device=order.device)
    return ranks.to(counts.device), _block_sizes(exact[order], num_blocks)


def _block_sizes(counts: Tensor, num_blocks: int) -> list[int]:
    """Divides descending ``counts`` into blocks with sums as equal as ascending block sizes allow."""
    cumulative, start = counts.cumsum(0), 0
    sizes: list[int] = []
    if cumulative[-1] == 0:
        return [len(counts)]
    targets = cumulative[-1] * torch.arange(1, num_blocks, dtype=torch.float64, device=cumulative.device) / num_blocks
    # Block k ends at the id whose cumulative share reaches (k + 1) / num_blocks; the last block ends at the last id.
    for end in [*(torch.searchsorted(cumulative, targets) + 1).tolist(), len(counts)]:
        size = max(end - start, sizes[-1] if sizes else 1)
        if start + size > len(counts):
            break
        sizes.append(size)
        start += size
    sizes[-1] += len(counts) - start  # the rest, too few for another block
    return sizes


class MixedDimensionEmbeddingBag(OneTable):
    """Pooled embeddings of one table with block-wise mixed dimensions: each block of rows has its own dimension.

    Ids are popularity ranks, or ``ranks`` maps them to ranks. The first block holds the first ``block_sizes[0]`` ranks
    in a table [block_sizes[0], block_dims[0]], and so on. The pooled sum of a narrow block, one with fewer than
    ``embedding_dim`` columns, is projected by the block's matrix; the output is the sum over blocks.
    ``rk.popularity_blocks`` and ``rk.mixed_dimensions`` compute ranks, sizes and dimensions.

    Args:
        block_sizes: rows of each block, at least 1; their sum is E.
        block_dims: columns of each block, from 1 to ``embedding_dim``.
        embedding_dim: D, columns of the output.
        ranks: int64 [E], a permutation of 0 to E - 1: id i has rank ``ranks[i]``. None: ids are ranks.
        name: prefix of the table names, ``<name>_0``, ``<name>_1`` and so on.
        pooling: "sum" or "mean".
        format: row format of the tables, as in ``rk.EmbeddingBagConfig``.
        device, optimizer, rounding, seed: as in ``rk.EmbeddingBagCollection``.
        bounds_check: handling of ids out of range: "error" (IndexError on the CPU; skipped silently on a GPU and inside
            ``torch.compile``) or "ignore" (skipped).

    ``blocks`` is the ``rk.EmbeddingBagCollection`` with the tables and supports everything that class supports.
    ``projection``, float32 [D, total columns of the narrow blocks], concatenates the matrices of the narrow blocks; it
    is None if no block is narrow. It is a dense parameter, updated by the dense optimizer, and stays float32 even under
    autocast.

    Raises:
        ValueError: sizes, dimensions or ranks are inconsistent; the message names them.
    """

    ranks: Tensor | None

    def __init__(
        self,
        block_sizes: Sequence[int],
        block_dims: Sequence[int],
        embedding_dim: int,
        *,
        ranks: Tensor | None = None,
        name: str = "block",
        pooling: str = "sum",
        format: str = "fp32",
        device: torch.device | str | None = None,
        optimizer: Optimizer | None = None,
        bounds_check: str = "error",
        rounding: str = "stochastic",
        seed: int = 0,
    ) -> None:
        sizes, dims = _checked_blocks(block_sizes, block_dims, embedding_dim)
        super().__init__(sum(sizes), embedding_dim, pooling, bounds_check)
        self.block_dims = dims
        bound = self.num_embeddings**-0.5  # depends on the whole table, not on the block
        init = functools.partial(nn.init.uniform_, a=-bound, b=bound)
        names = [f"{name}_{k}" for k in range(len(sizes))]
        tables = [
            EmbeddingBagConfig(size, dim, name=own, feature_names=[own], format=format, init=init)
            for own, size, dim in zip(names, sizes, dims, strict=True)
        ]
        # "ignore": every block skips the ids of the other blocks.
        self.blocks = EmbeddingBagCollection(
            tables, device=device, optimizer=optimizer, bounds_check="ignore", rounding=rounding, seed=seed
        )
        self._ends = list(itertools.accumulate(sizes))
        self._starts = [0, *self._ends[:-1]]
        self._block_dtype = torch.uint8 if len(sizes) < 255 else torch.int32
        narrow = [dim for dim in dims if dim < embedding_dim]
        empty = [torch.empty(embedding_dim, dim, dtype=torch.float32, device=device) for dim in narrow]
        matrices = [nn.init.xavier_uniform_(matrix) for matrix in empty]
        self.projection = nn.Parameter(torch.cat(matrices, dim=1)) if narrow else None
        if ranks is not None:
            _check_ranks(ranks, self.num_embeddings)
            if ranks.is_meta and not self.blocks._weights.is_meta:
                raise ValueError("ranks must have data, got a meta tensor")
            ranks = ranks.detach().clone().to(self.blocks._weights.device)
        self.register_buffer("ranks", ranks)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: object) -> None:
        ranks = state_dict.get(f"{prefix}ranks")
        if self.ranks is not None and isinstance(ranks, Tensor):
            try:
                _check_ranks(ranks, self.num_embeddings)
            except ValueError as error:
                raise RuntimeError(f"{prefix}{error}; nothing was loaded into this module") from None
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, features) -> Tensor:
        """Looks up and pools a batch.

        Args:
            features: ``rk.JaggedTensor`` or TorchRec's: ids [N] int32 or int64, offsets [B + 1], weights [N] or None.

        Returns:
            [B, D] float32.

        Raises:
            IndexError: an id is out of range. ValueError: wrong shapes, dtypes or offsets.
        """
        values, offsets, weights, bad = self._unpack(features)
        ranks = values.long()
        if self.ranks is not None:
            ranks = self.ranks[ranks.clamp(0, self.num_embeddings - 1)]
        ranks = ranks.masked_fill(bad, self.num_embeddings)  # beyond the last block
        distribute = self._sort_by_block if has_data(values) else self._repeat_per_block
        pooled = self.blocks(distribute(ranks, offsets, weights)).values()
        if self.pooling == "mean":
            pooled = pooled / _valid_counts(offsets, bad).clamp(min=1)[:, None]
        with without_autocast(pooled):
            return self._combine_blocks(pooled)

    def _repeat_per_block(self, ranks: Tensor, offsets: Tensor, weights: Tensor | None) -> KeyedJaggedTensor:
        """Repeat all bags for every block, which skips other blocks' ids: the output size does not depend on data."""
        blocks, count = len(self.block_dims), ranks.shape[0]
        shift = torch.arange(blocks, device=offsets.device, dtype=offsets.dtype)[:, None] * count
        return KeyedJaggedTensor._from_parts(
            self.blocks.feature_names,
            torch.cat([ranks - start for start in self._starts]),
            torch.cat([(offsets[:-1] + shift).view(-1), offsets[-1:] + shift[-1]]),
            None if weights is None else weights.repeat(blocks),
        )

    def _sort_by_block(self, ranks: Tensor, offsets: Tensor, weights: Tensor | None) -> KeyedJaggedTensor:
        """Sends each id to its own block only: the sums of ``_repeat_per_block`` with a fraction of its lookups."""
        blocks, batch = len(self.block_dims), offsets.shape[0] - 1
        # Ids out of range form an extra last block. Sorting uint8 keys is several times as fast as sorting wider ones.
        block = sum((ranks >= end for end in self._ends), torch.zeros_like(ranks, dtype=self._block_dtype))
        order = torch.argsort(block, stable=True)
        bag = torch.repeat_interleave(torch.arange(batch, device=ranks.device), offsets.diff())
        lengths = torch.bincount(block.long() * batch + bag, minlength=(blocks + 1) * batch)[: blocks * batch]
        order = order[: int(lengths.sum())]
        return KeyedJaggedTensor._from_parts(
            self.blocks.feature_names,
            ranks[order] - torch.tensor(self._starts, device=ranks.device)[block[order].long()],
            to_offsets(lengths),
            None if weights is None else weights[order],
        )

    def _combine_blocks(self, pooled: Tensor) -> Tensor:
        """Sums the full-width blocks and the projections of the narrow ones, [B, sum(block_dims)] -> [B, D]."""
        parts = pooled.split(self.block_dims, dim=1)
        wide = [part for part in parts if part.shape[1] == self.embedding_dim]
        output = sum(wide[1:], wide[0]) if wide else None
        if self.projection is None:
            return output
        narrow = parts if output is None else [part for part in parts if part.shape[1] < self.embedding_dim]
        projected = functional.linear(pooled if output is None else torch.cat(narrow, dim=1), self.projection)
        return projected if output is None else output + projected

    def extra_repr(self) -> str:
        """Sizes for ``repr``."""
        return f"{self.num_embeddings} x {self.embedding_dim}, blocks of {self.block_dims} columns, {self.pooling}"


def _valid_counts(offsets: Tensor, bad: Tensor) -> Tensor:
    """Counts the ids in range of each bag."""
    before = functional.pad((~bad).long().cumsum(0), (1, 0))
    return before[offsets.long().clamp(0, bad.shape[0])].diff()  # off the CPU, offsets are unchecked


def _checked_blocks(sizes: Sequence[int], dims: Sequence[int], embedding_dim: int) -> tuple[list[int], list[int]]:
    sizes = [positive_integer(f"block_sizes[{k}]", size) for k, size in enumerate(sizes)]
    dims = [positive_integer(f"block_dims[{k}]", dim) for k, dim in enumerate(dims)]
    if not sizes or len(sizes) != len(dims):
        raise ValueError(
            f"block_sizes and block_dims must have the same length, at least 1, got {len(sizes)} and {len(dims)}"
        )
    embedding_dim = positive_integer("embedding_dim", embedding_dim)
    for k, dim in enumerate(dims):
        if dim > embedding_dim:
            raise ValueError(f"block_dims[{k}] = {dim} must be at most {embedding_dim}, embedding_dim")
    return sizes, dims


def _check_ranks(ranks: Tensor, count: int) -> None:
    if not isinstance(ranks, Tensor) or ranks.dtype != torch.int64 or list(ranks.shape) != [count]:
        actual = f"{ranks.dtype} {list(ranks.shape)}" if isinstance(ranks, Tensor) else type(ranks).__name__
        raise ValueError(f"ranks must be int64 [{count}], one per row of the blocks, got {actual}")
    if ranks.is_meta:  # no data yet; load_state_dict provides it
        return
    outside = (ranks < 0) | (ranks >= count)
    if outside.any():
        first = int(outside.nonzero()[0])
        raise ValueError(f"ranks[{first}] = {int(ranks[first])} must be in [0, {count})")
    occurrences = torch.bincount(ranks, minlength=count)
    if (occurrences != 1).any():
        raise ValueError(f"ranks must be distinct, got {int(occurrences.argmax())} more than once")
