"""One table whose rows are the narrower the less popular they are.

Source: "block-wise mixed dimension embeddings" of A. Ginart et al., "Mixed Dimension Embeddings with Application to
Memory-Efficient Recommendation Systems" (arXiv:1909.11810): rows in the order of their popularity, in blocks, each with
a dimension of its own and a projection to the model's.
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
    """Cuts ids into blocks that are looked up equally often.

    Args:
        counts: [E], how often each id is looked up, at least 0: of the training data. Those beyond 2^53 are rounded.
        num_blocks: the most blocks, at least 1. Each has an id at least, and no fewer than the one before it: where
            many ids are equally popular, or few ids have it all, there are fewer blocks.

    Returns:
        The rank of every id, int64 [E], 0 for the most popular one (of equal ones, the smaller id first); and how many
        ids the blocks have, from the most popular block to the least, ascending. What ``rk.mixed_dimensions`` (with
        ``threshold=0``) and ``rk.MixedDimensionEmbeddingBag`` take.

    Raises:
        ValueError: counts that are negative, not finite or not one row, or fewer than one block.
    """
    counts = counts if isinstance(counts, Tensor) else torch.as_tensor(counts, device="cpu")
    if counts.dim() != 1 or len(counts) < 1:
        raise ValueError(f"counts must be one row of at least one number, got shape {list(counts.shape)}")
    exact = counts.double().cpu()
    good = exact.isfinite() & (exact >= 0)
    if not good.all():
        place = int((~good).nonzero()[0])
        raise ValueError(f"counts[{place}] = {counts[place].item()} must be finite and at least 0")
    num_blocks = positive_integer("num_blocks", num_blocks)
    order = torch.argsort(exact, descending=True, stable=True)
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(len(order), device=order.device)
    return ranks.to(counts.device), _block_sizes(exact[order], num_blocks)


def _block_sizes(counts: Tensor, num_blocks: int) -> list[int]:
    """Sizes of blocks of descending ``counts`` with equal sums, as far as ascending sizes allow it."""
    shares, start = counts.cumsum(0), 0
    sizes: list[int] = []
    if shares[-1] == 0:
        return [len(counts)]
    wanted = shares[-1] * torch.arange(1, num_blocks, dtype=torch.float64, device=shares.device) / num_blocks
    # Block k ends with the id whose share reaches (k + 1) / num_blocks; the last one with the last id.
    for end in [*(torch.searchsorted(shares, wanted) + 1).tolist(), len(counts)]:
        size = max(end - start, sizes[-1] if sizes else 1)
        if start + size > len(counts):
            break
        sizes.append(size)
        start += size
    sizes[-1] += len(counts) - start  # too few for a block of their own
    return sizes


class MixedDimensionEmbeddingBag(OneTable):
    """Bags of one table in blocks of rows, each block with a dimension of its own: block-wise mixed dimensions.

    Ids are ranks by popularity, or become such by ``ranks``. The first block has the first ``block_sizes[0]`` ranks, in
    a table [block_sizes[0], block_dims[0]], and so on. A bag's sum over a block of fewer than ``embedding_dim`` columns
    is multiplied by the block's matrix; the blocks' results are added. ``rk.popularity_blocks`` and
    ``rk.mixed_dimensions`` find ranks, sizes and dimensions.

    Args:
        block_sizes: rows of each block, at least 1; E together.
        block_dims: columns of each, from 1 to ``embedding_dim``.
        embedding_dim: D, columns of the output.
        ranks: int64 [E]: a permutation of 0 to E - 1, id i has rank ``ranks[i]``. None: ids are ranks.
        name: of the blocks' tables, ``<name>_0``, ``<name>_1`` and so on.
        pooling: "sum" or "mean".
        format: of the rows, as in ``rk.EmbeddingBagConfig``.
        device, optimizer, rounding, seed: as ``rk.EmbeddingBagCollection``'s.
        bounds_check: what an id out of range does: "error" (IndexError on the CPU; left out on a GPU and inside
            ``torch.compile``, where nobody is told) or "ignore" (left out).

    ``blocks`` is the ``rk.EmbeddingBagCollection`` of the tables, with all that this one can do. ``projection``,
    float32 [D, columns of all narrow blocks], are the narrow blocks' matrices side by side, a parameter for the
    optimizer of the dense parameters, or None. It stays float32, also under autocast.

    Raises:
        ValueError: sizes, dimensions or ranks that do not fit; the message names them.
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
        bound = self.num_embeddings**-0.5  # of the whole table, not of a block
        init = functools.partial(nn.init.uniform_, a=-bound, b=bound)
        tables = [
            EmbeddingBagConfig(
                size,
                dim,
                name=f"{name}_{k}",
                feature_names=[f"{name}_{k}"],
                format=format,
                init=init,
            )
            for k, (size, dim) in enumerate(zip(sizes, dims, strict=True))
        ]
        # Ids of other blocks are left out by every block.
        self.blocks = EmbeddingBagCollection(
            tables, device=device, optimizer=optimizer, bounds_check="ignore", rounding=rounding, seed=seed
        )
        self._ends = list(itertools.accumulate(sizes))
        self._starts = [0, *self._ends[:-1]]
        self._sorts_by = torch.uint8 if len(sizes) < 255 else torch.int32
        narrow = [dim for dim in dims if dim < embedding_dim]
        memory = [torch.empty(embedding_dim, dim, dtype=torch.float32, device=device) for dim in narrow]
        matrices = [nn.init.xavier_uniform_(matrix) for matrix in memory]
        self.projection = nn.Parameter(torch.cat(matrices, dim=1)) if narrow else None
        if ranks is not None:
            _check_ranks(ranks, self.num_embeddings)
            if ranks.is_meta and not self.blocks._weights.is_meta:
                raise ValueError("ranks must have numbers, got a meta tensor")
            ranks = ranks.detach().clone().to(self.blocks._weights.device)
        self.register_buffer("ranks", ranks)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: object) -> None:
        given = state_dict.get(f"{prefix}ranks")
        if self.ranks is not None and isinstance(given, Tensor):
            try:
                _check_ranks(given, self.num_embeddings)
            except ValueError as error:
                raise RuntimeError(f"{prefix}{error}; nothing was loaded into this module") from None
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, features) -> Tensor:
        """Looks up a batch.

        Args:
            features: ``rk.JaggedTensor`` or TorchRec's: ids [N] int32 or int64, offsets [B + 1], weights [N] or None.

        Returns:
            [B, D] float32.

        Raises:
            IndexError: an id is out of range. ValueError: wrong shapes, dtypes or offsets.
        """
        values, offsets, weights, bad = self._read(features)
        ranks = values.long()
        if self.ranks is not None:
            ranks = self.ranks[ranks.clamp(0, self.num_embeddings - 1)]
        ranks = ranks.masked_fill(bad, self.num_embeddings)  # in no block
        chosen = self._sorted if has_data(values) else self._repeated
        pooled = self.blocks(chosen(ranks, offsets, weights)).values()
        if self.pooling == "mean":
            pooled = pooled / _counted(offsets, bad).clamp(min=1)[:, None]
        with without_autocast(pooled):
            return self._sum_of_blocks(pooled)

    def _repeated(self, ranks: Tensor, offsets: Tensor, weights: Tensor | None) -> KeyedJaggedTensor:
        """Every bag for every block, which leaves out the ids of the others: of a size that no data decide."""
        blocks, count = len(self.block_dims), ranks.shape[0]
        behind = torch.arange(blocks, device=offsets.device, dtype=offsets.dtype)[:, None] * count
        return KeyedJaggedTensor._from_parts(
            self.blocks.feature_names,
            torch.cat([ranks - start for start in self._starts]),
            torch.cat([(offsets[:-1] + behind).view(-1), offsets[-1:] + behind[-1]]),
            None if weights is None else weights.repeat(blocks),
        )

    def _sorted(self, ranks: Tensor, offsets: Tensor, weights: Tensor | None) -> KeyedJaggedTensor:
        """Every id for its own block only: the same sums for a fraction of the ids."""
        blocks, batch = len(self.block_dims), offsets.shape[0] - 1
        # Ids out of range make a block behind the others. Bytes sort several times as fast as larger numbers.
        block = sum((ranks >= end for end in self._ends), torch.zeros_like(ranks, dtype=self._sorts_by))
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

    def _sum_of_blocks(self, pooled: Tensor) -> Tensor:
        parts = pooled.split(self.block_dims, dim=1)
        wide = [part for part in parts if part.shape[1] == self.embedding_dim]
        output = sum(wide[1:], wide[0]) if wide else None
        if self.projection is None:
            return output
        narrow = parts if output is None else [part for part in parts if part.shape[1] < self.embedding_dim]
        projected = functional.linear(pooled if output is None else torch.cat(narrow, dim=1), self.projection)
        return projected if output is None else output + projected

    def extra_repr(self) -> str:
        """Sizes, for printing."""
        return f"{self.num_embeddings} x {self.embedding_dim}, blocks of {self.block_dims} columns, {self.pooling}"


def _counted(offsets: Tensor, bad: Tensor) -> Tensor:
    """Number of ids in range, for each bag."""
    before = functional.pad((~bad).long().cumsum(0), (1, 0))
    return before[offsets.long().clamp(0, bad.shape[0])].diff()  # elsewhere than on the CPU, offsets may be anything


def _checked_blocks(sizes: Sequence[int], dims: Sequence[int], embedding_dim: int) -> tuple[list[int], list[int]]:
    sizes = [positive_integer(f"block_sizes[{k}]", size) for k, size in enumerate(sizes)]
    dims = [positive_integer(f"block_dims[{k}]", dim) for k, dim in enumerate(dims)]
    if not sizes or len(sizes) != len(dims):
        raise ValueError(
            f"block_sizes and block_dims must be of one length, at least 1, got {len(sizes)} and {len(dims)}"
        )
    for k, dim in enumerate(dims):
        if dim > positive_integer("embedding_dim", embedding_dim):
            raise ValueError(f"block_dims[{k}] = {dim} must be at most {embedding_dim}, embedding_dim")
    return sizes, dims


def _check_ranks(ranks: Tensor, count: int) -> None:
    if not isinstance(ranks, Tensor) or ranks.dtype != torch.int64 or list(ranks.shape) != [count]:
        found = f"{ranks.dtype} {list(ranks.shape)}" if isinstance(ranks, Tensor) else type(ranks).__name__
        raise ValueError(f"ranks must be int64 [{count}], one for each row of the blocks, got {found}")
    if ranks.is_meta:  # it has no numbers; a state brings them
        return
    outside = (ranks < 0) | (ranks >= count)
    if outside.any():
        place = int(outside.nonzero()[0])
        raise ValueError(f"ranks[{place}] = {int(ranks[place])} must be in [0, {count})")
    times = torch.bincount(ranks, minlength=count)
    if (times != 1).any():
        raise ValueError(f"ranks must differ, got {int(times.argmax())} more than once")
