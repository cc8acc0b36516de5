"""Batches on their way to the ranks that look them up: what is checked, agreed upon and sent."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from rec_kernels.distributed.routes import Routes
from rec_kernels.nn.jagged.checks import check_bounds, check_integers, check_weights, describe_bag
from rec_kernels.nn.jagged.distinct_bags import select_distinct
from rec_kernels.nn.jagged.select_features import SelectedKeys, as_batch, batch_size_error, select_keys
from rec_kernels.nn.jagged.shared_bags import SharedBags
from rec_kernels.ops.bad_ids import advice_on

_Part = tuple[Tensor, Tensor, Tensor | None, Tensor]  # ids, lengths of bags, weights, places among the feature's ids


class CheckedBatch(NamedTuple):
    """A rank's batch; without arguments, one that was refused.

    Args:
        bags: of the features in the collection's order, with int64 ids; none are in no bag.
        samples: B; where features have batch sizes of their own, the batch's ``stride()``.
        shared: which of the bags samples have, where they share bags, or None.
    """

    bags: SelectedKeys = SelectedKeys(torch.empty(0), torch.zeros(1), None, None)
    samples: int = 0
    shared: SharedBags | None = None


def checked_batch(
    features: Any,
    names: list[str],
    limits: list[int | None],
    bounds_check: str,
    *,
    pooled: bool = True,
    by_feature: bool = False,
    is_weighted: bool | None = None,
) -> CheckedBatch:
    """Looks at everything in a batch that lookups on other ranks would refuse.

    Args:
        names, limits: F features and numbers of ids, None: every integer is one.
        bounds_check, is_weighted: ``rk.EmbeddingBagCollection``'s.
        pooled: whether samples have rows of bags, which they may share, and not of ids. by_feature: whether pooled
            features may have batch sizes of their own whatever the samples have.

    Raises:
        IndexError: an id is out of range, and ``bounds_check`` is "error"; an inverse index is. ValueError: features
            of pooled lookups have batch sizes of their own, and no inverse indices; bad offsets, dtypes or shapes;
            weights are missing.
            KeyError: a feature is missing. TypeError: another kind of batch.
    """
    features = as_batch(features, names)
    if pooled and not by_feature:
        given, shared = select_distinct(features, names)
        if given.strides is not None and shared is None:
            raise batch_size_error(names, given.strides)
    else:
        given, shared = select_keys(features, names, exact=not pooled), None
    _check_tensors(given, names)
    given = given.weighted(is_weighted)
    offsets = given.offsets.long()
    first, last = (0, 0) if len(offsets) == 0 else (int(offsets[0]), int(offsets[-1]))
    values, weights = (None if t is None else t[first:last] for t in (given.values, given.weights))
    given = SelectedKeys(values.long(), offsets - first, weights, given.strides)  # without ids in no bag
    if bounds_check == "error":
        _check_ids(given, names, limits)
    samples = (len(offsets) - 1) // max(len(names), 1) if given.strides is None else features.stride()
    return CheckedBatch(given, samples, shared)


def _check_tensors(given: SelectedKeys, names: list[str]) -> None:
    """Raises ValueError unless ids, offsets and weights are what lookups take: another rank would be told in vain."""
    values, weights = given.values, given.weights
    check_integers("values", values, values)
    if values.is_meta or given.offsets.is_meta:
        raise ValueError("the batch must have numbers, got tensors on the meta device")
    check_integers("offsets", given.offsets, values)
    bags, features = given.offsets.shape[0] - 1, len(names)
    if given.strides is None and (bags < 0 or bags % max(features, 1)):
        raise ValueError(
            f"offsets must have a bag for each of {features} features and each sample, and one more element, got "
            f"{given.offsets.shape[0]} elements"
        )
    strides = given.strides or [bags // max(features, 1)] * features
    check_bounds(given.offsets.cpu(), values.shape[0], lambda bag: describe_bag(bag, names, strides))
    if weights is not None:
        check_weights(weights, values)


def _check_ids(given: SelectedKeys, names: list[str], limits: list[int | None]) -> None:
    values, offsets, starts = given.values, given.offsets, given.bag_starts(len(names))
    bounds = offsets[starts].tolist()
    held = [f for f in range(len(names)) if limits[f] is not None and bounds[f] < bounds[f + 1]]
    if not held:
        return
    spans = [t for f in held for t in values[bounds[f] : bounds[f + 1]].aminmax()]
    numbers = torch.stack(spans).tolist()  # one wait for a GPU
    for f, low, high in zip(held, numbers[::2], numbers[1::2], strict=True):
        if low < 0 or high >= limits[f]:
            ids = values[bounds[f] : bounds[f + 1]]
            at = bounds[f] + int(((ids < 0) | (ids >= limits[f])).nonzero()[0])
            bag = int(torch.searchsorted(offsets, at, right=True)) - 1 - starts[f]
            told = f"feature {names[f]!r}, bag {bag}: id {int(values[at])} must be in [0, {limits[f]})"
            raise IndexError(f"{told}; nothing was looked up{advice_on(int(values[at]))}")


def counts_of(given: SelectedKeys, routes: Routes) -> Tensor | None:
    """[F, B] ids of each bag that count, or None where no gradient is divided by them; [bags] if sizes differ."""
    if not routes.means:
        return None
    starts = given.offsets[given.bag_starts(routes.num_features)]
    # A lookup without a limit is in a whole table: nothing divides by its counts.
    known = [limit or 0 for limit in routes.limits]
    numbers = torch.tensor([known, routes.padding], device=starts.device)
    limits, padding = numbers.repeat_interleave(starts.diff(), dim=1)
    good = (given.values >= 0) & (given.values < limits) & (given.values != padding)
    before = torch.nn.functional.pad(good.cumsum(0), (1, 0))
    counts = before[given.offsets].diff()
    return counts.view(routes.num_features, -1) if given.strides is None else counts


class SortedIds(NamedTuple):
    """A batch as it is sent, with a key for each entry of each rank, in this order.

    Args:
        ids, lengths, weights: of each key. places: which ids of the batch they are. device: of all.
    """

    ids: list[Tensor]
    lengths: list[Tensor]
    weights: list[Tensor] | None
    places: list[Tensor]
    device: torch.device

    def to_kjt(self, *, weighted: bool, own_sizes: bool) -> KeyedJaggedTensor:
        """The batch in TorchRec's container.

        Args:
            weighted: whether any rank's has weights. own_sizes: whether keys of any have batch sizes of their own.
        """
        empty, weights = torch.zeros(0, dtype=torch.int64, device=self.device), None
        if weighted:
            given = self.weights or [empty.new_ones(len(own), dtype=torch.float32) for own in self.ids]
            weights = torch.cat([empty.float(), *given])
        return KeyedJaggedTensor(
            keys=[str(i) for i in range(len(self.ids))],
            values=torch.cat([empty, *self.ids]),
            lengths=torch.cat([empty, *self.lengths]),
            weights=weights,
            stride=None if own_sizes else len(self.lengths[0]) if self.lengths else 0,
            stride_per_key_per_rank=[[len(own)] for own in self.lengths] if own_sizes else None,
        )


def sort_ids(given: SelectedKeys, routes: Routes) -> SortedIds:
    """Sorts the ids of a batch by who looks them up.

    Ids of a table that is split by rows, or of a part of one, go to the shard that has their row, as rows of it. Others
    are in no bag of it. Each id of ``routes.by_id`` is a bag of its own.
    """
    starts = given.bag_starts(routes.num_features)
    bounds = given.offsets[starts].tolist()
    lengths = given.offsets.diff().split([stop - start for start, stop in itertools.pairwise(starts)])
    weights = given.weights
    every = torch.arange(len(given.values), device=given.values.device)
    found: list[_Part] = []
    sorted_out: dict[tuple[int, tuple[int, ...]], dict[int, _Part]] = {}
    for entry in itertools.chain(*routes.entries):
        f, shard = entry.feature, entry.shard
        place = slice(bounds[f], bounds[f + 1])
        values, counts, at = given.values[place], lengths[f], every[place]
        own = None if weights is None else weights[place]
        if entry.takes_some:
            key = f, entry.bounds
            if key not in sorted_out:
                sorted_out[key] = _by_rows(values, counts, own, entry.bounds)
            values, counts, own, order = sorted_out[key][shard.first_row]
            at = at[order]
        if f in routes.by_id:
            counts = torch.ones_like(values)
        found.append((values, counts, own, at))
    ids, sizes, factors, places = ([part[k] for part in found] for k in range(4))
    return SortedIds(ids, sizes, None if weights is None else factors, places, given.values.device)


def _by_rows(values: Tensor, lengths: Tensor, weights: Tensor | None, bounds: tuple[int, ...]) -> dict[int, _Part]:
    """A feature's ids, lengths of bags, weights and places for each row shard, by the shard's first row.

    Args:
        values: [N] ids; lengths: [B]; weights: [N] or None.
        bounds: first rows of the shards, and the end of the last.
    """
    batch, shards = len(lengths), len(bounds) - 1
    # Part 0 has ids below the first row, and the last part those behind the last.
    part = torch.searchsorted(torch.tensor(bounds, device=values.device), values, right=True)
    order = part.argsort(stable=True)
    bag = torch.arange(batch, device=values.device).repeat_interleave(lengths)
    counts = torch.bincount(part * batch + bag, minlength=(shards + 2) * batch).view(shards + 2, batch)
    sizes = counts.sum(1).tolist()
    ids, places, factors = values[order].split(sizes), order.split(sizes), [None] * (shards + 2)
    if weights is not None:
        factors = list(weights[order].split(sizes))
    return {first: (ids[i] - first, counts[i], factors[i], places[i]) for i, first in enumerate(bounds[:-1], 1)}


def looked_up(kjt: KeyedJaggedTensor, num_entries: int) -> SelectedKeys:
    """Returns the ids that a rank was sent, for its own collection of ``num_entries`` features."""
    if not num_entries:
        empty = torch.zeros(0, dtype=torch.int64, device=kjt.values().device)
        return SelectedKeys(empty, torch.zeros(1, dtype=torch.int64, device=empty.device), None, None)
    offsets = torch.nn.functional.pad(kjt.lengths().long().cumsum(0), (1, 0))
    return SelectedKeys(kjt.values(), offsets, kjt.weights_or_none(), None)
