"""Checks of a rank's batch before its input dist: what another rank would refuse, its own rank refuses."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rec_kernels.distributed.routes import Routes
from rec_kernels.nn.jagged.checks import check_bounds, check_integers, check_weights, describe_bag
from rec_kernels.nn.jagged.distinct_bags import select_distinct
from rec_kernels.nn.jagged.select_features import SelectedKeys, as_batch, select_keys
from rec_kernels.nn.jagged.shared_bags import SharedBags
from rec_kernels.ops.bad_ids import advice_on


class CheckedBatch(NamedTuple):
    """A rank's batch after checks; the default is an empty one, for a batch that was refused.

    Args:
        bags: of the features in the collection's order, with int64 ids, each in a bag.
        samples: B; if features have batch sizes of their own, the batch's ``stride()``.
        shared: the bag of each sample if samples share bags, or None.
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
    """Checks everything in a batch that lookups on other ranks would refuse.

    Args:
        names, limits: F features and their numbers of ids, None: any integer is an id.
        bounds_check, is_weighted: ``rk.EmbeddingBagCollection``'s.
        pooled: whether features have a row per bag, which samples may share, instead of per id.
        by_feature: whether pooled features may have batch sizes of their own without inverse indices.

    Raises:
        IndexError: an id is out of range, and ``bounds_check`` is "error"; or an inverse index is out of range.
        ValueError: pooled features have batch sizes of their own and no inverse indices; offsets, dtypes or shapes are
        bad; weights are missing. KeyError: a feature is missing. TypeError: the batch is of another type.
    """
    features = as_batch(features, names)
    if pooled and not by_feature:
        given, shared = select_distinct(features, names)
    else:
        given, shared = select_keys(features, names, exact=not pooled), None
    _check_tensors(given, names)
    given = given.weighted(is_weighted)
    offsets = given.offsets.long()
    first, last = (0, 0) if len(offsets) == 0 else (int(offsets[0]), int(offsets[-1]))
    values, weights = (None if t is None else t[first:last] for t in (given.values, given.weights))
    given = SelectedKeys(values.long(), offsets - first, weights, given.strides)  # drops ids that are in no bag
    if bounds_check == "error":
        _check_ids(given, names, limits)
    samples = (len(offsets) - 1) // max(len(names), 1) if given.strides is None else features.stride()
    return CheckedBatch(given, samples, shared)


def _check_tensors(given: SelectedKeys, names: list[str]) -> None:
    """Raises ValueError if lookups on another rank would refuse ids, offsets or weights."""
    values, weights = given.values, given.weights
    check_integers("values", values, values)
    if values.is_meta or given.offsets.is_meta:
        raise ValueError("the batch must have data, got tensors on the meta device")
    check_integers("offsets", given.offsets, values)
    bags, features = given.offsets.shape[0] - 1, len(names)
    if given.strides is None and (bags < 0 or bags % max(features, 1)):
        raise ValueError(
            f"offsets must have one element more than there are bags, one per sample of each of {features} "
            f"features, got {given.offsets.shape[0]} elements"
        )
    strides = given.strides or [bags // max(features, 1)] * features
    check_bounds(given.offsets.cpu(), values.shape[0], lambda bag: describe_bag(bag, names, strides))
    if weights is not None:
        check_weights(weights, values)


def _check_ids(given: SelectedKeys, names: list[str], limits: list[int | None]) -> None:
    values, offsets, starts = given.values, given.offsets, given.bag_starts(len(names))
    bounds = offsets[starts].tolist()
    limited = [f for f in range(len(names)) if limits[f] is not None and bounds[f] < bounds[f + 1]]
    if not limited:
        return
    spans = [t for f in limited for t in values[bounds[f] : bounds[f + 1]].aminmax()]
    extremes = torch.stack(spans).tolist()  # one sync of a GPU
    for f, low, high in zip(limited, extremes[::2], extremes[1::2], strict=True):
        if low < 0 or high >= limits[f]:
            ids = values[bounds[f] : bounds[f + 1]]
            at = bounds[f] + int(((ids < 0) | (ids >= limits[f])).nonzero()[0])
            bag = int(torch.searchsorted(offsets, at, right=True)) - 1 - starts[f]
            text = f"feature {names[f]!r}, bag {bag}: id {int(values[at])} must be in [0, {limits[f]})"
            raise IndexError(f"{text}; nothing was looked up{advice_on(int(values[at]))}")


def count_valid_ids(given: SelectedKeys, routes: Routes) -> Tensor | None:
    """[F, B] valid ids of each bag, [bags] if batch sizes differ, or None if no gradient is divided by them."""
    if not routes.mean_features:
        return None
    starts = given.offsets[given.bag_starts(routes.num_features)]
    # A lookup without a limit is in a whole table: no gradient is divided by its counts.
    known = [limit or 0 for limit in routes.limits]
    limits_and_padding = torch.tensor([known, routes.padding], device=starts.device)
    limits, padding = limits_and_padding.repeat_interleave(starts.diff(), dim=1)
    valid = (given.values >= 0) & (given.values < limits) & (given.values != padding)
    before = torch.nn.functional.pad(valid.cumsum(0), (1, 0))
    counts = before[given.offsets].diff()
    return counts.view(routes.num_features, -1) if given.strides is None else counts
