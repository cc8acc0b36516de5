"""Pooled lookups: from a batch to one row per bag; combines parts and projects narrow columns."""

from __future__ import annotations

import torch
from torch import Tensor

from rec_kernels import _library
from rec_kernels.nn import late_errors
from rec_kernels.nn.jagged.distinct_bags import select_distinct
from rec_kernels.nn.jagged.inverse import InverseKeyedJaggedTensor
from rec_kernels.nn.jagged.keyed_tensor import KeyedTensor
from rec_kernels.nn.jagged.select_features import SelectedKeys, as_batch, select_keys
from rec_kernels.nn.jagged.shared_bags import SharedBags
from rec_kernels.nn.served import LookupModule
from rec_kernels.nn.tables.feature_map import FeatureLookup
from rec_kernels.ops.autograd import call
from rec_kernels.ops.grouped_projection import grouped_projection

_ops = torch.ops.rec_kernels


def look_up(tables: LookupModule, features) -> KeyedTensor:
    """Implements ``forward`` of ``rk.EmbeddingBagCollection``."""
    feature_map = tables._features
    features = as_batch(features, feature_map.feature_names)
    given, shared = select_distinct(features, feature_map.feature_names)
    if shared is None:
        pooled = look_up_bags(tables, given)
    else:
        pooled = _look_up_shared(tables, given, shared).to(tables.output_dtype)
    return KeyedTensor._from_parts(feature_map.output_keys, feature_map.output_dims, pooled)


def look_up_bags(tables: LookupModule, given: SelectedKeys) -> Tensor:
    """[B, sum of D] of ``output_dtype``, for features with the same number of bags."""
    pooled = tables._lookup(given)
    return finish(tables, pooled).to(tables.output_dtype) if tables._features.finishes_later else pooled


def look_up_by_feature(tables: LookupModule, features) -> dict[str, Tensor]:
    """Implements ``by_feature`` of ``rk.EmbeddingBagCollection``."""
    if isinstance(features, InverseKeyedJaggedTensor):
        return look_up(tables, features).to_dict()
    feature_map = tables._features
    given, starts = bags_of(tables, features)
    if starts is None:
        each = look_up_bags(tables, given).split(feature_map.output_dims, dim=1)
    else:
        blocks = finish_each(tables, tables._lookup(given, starts), given.strides)
        each = tuple(block.to(tables.output_dtype) for block in blocks)
    return dict(zip(feature_map.output_keys, each, strict=True))


def bags_of(tables: LookupModule, features) -> tuple[SelectedKeys, Tensor | None]:
    """Selects the bags of a batch to look up, and feature starts if each bag has its own output row."""
    names = tables._features.feature_names
    features = as_batch(features, names)
    if isinstance(features, InverseKeyedJaggedTensor):
        return _with_starts(tables, select_distinct(features, names)[0])
    return _with_starts(tables, select_keys(features, names))


def _with_starts(tables: LookupModule, given: SelectedKeys) -> tuple[SelectedKeys, Tensor | None]:
    """Adds feature starts if batch sizes differ and the lookup must know them."""
    strides = given.strides
    if strides is None or (_expands_later(tables, given.offsets) and all(size == strides[0] for size in strides)):
        return given, None
    return given, given.own_starts()


def _expands_later(tables: LookupModule, offsets: Tensor) -> bool:
    """True if distinct bags must be expanded to samples after the lookup.

    Bags are combined or projected first, or the Triton kernels run, which support neither shared bags nor batch sizes
    that differ.
    """
    return tables._features.finishes_later or (offsets.is_cuda and _library.cuda_unavailable is not None)


def finish(tables: LookupModule, pooled: Tensor) -> Tensor:
    """[B, sum of D]: combines adjacent pooled parts and projects narrow columns."""
    feature_map = tables._features
    if not feature_map.finishes_later:
        return pooled
    if feature_map.combines_later:
        blocks = zip(feature_map.features, pooled.split(feature_map.widths, dim=1), strict=True)
        pooled = torch.cat([feature.combined(block) for feature, block in blocks], dim=1)
    if not feature_map.projected:
        return pooled
    flat = torch.cat([tables._projection(table).reshape(-1) for table in feature_map.projected])
    return grouped_projection(pooled, flat, feature_map.combined_dims, feature_map.output_dims)


def finish_each(tables: LookupModule, rows: Tensor, strides: list[int]) -> list[Tensor]:
    """``finish`` for the concatenated bags of all features: [bags, D] per feature."""
    blocks = zip(tables._features.features, rows.split(strides), strict=True)
    return [_finish_feature(tables, feature, block) for feature, block in blocks]


def _finish_feature(tables: LookupModule, feature: FeatureLookup, block: Tensor) -> Tensor:
    """``finish`` for the columns of one feature."""
    block = feature.combined(block[:, : feature.width])
    if not feature.table.projection:
        return block
    matrix = tables._projection(feature.table)
    dims = list(matrix.shape)
    return grouped_projection(block.float(), matrix.reshape(-1), dims[1:], dims[:1])


def _look_up_shared(tables: LookupModule, given: SelectedKeys, shared: SharedBags) -> Tensor:
    """[B, sum of D], for bags that samples share; rows that are expanded after the lookup are float32 until then."""
    if not _expands_later(tables, given.offsets) and shared.fits_ops():
        return tables._lookup(given, given.own_starts(), shared)
    given, starts = _with_starts(tables, given)
    pooled = tables._lookup(given, starts, dtype=torch.float32)
    if starts is not None:
        return _expand_groups(tables, finish_each(tables, pooled, shared.sizes), shared)
    pooled = finish(tables, pooled)
    if shared.is_one_group():
        return _expand(tables, pooled, shared.select_group(shared.groups[0]))
    return _expand_groups(tables, list(pooled.split(tables._features.output_dims, dim=1)), shared)


def _expand_groups(tables: LookupModule, blocks: list[Tensor], shared: SharedBags) -> Tensor:
    """Expands [bags, D] of each feature to [B, sum of D]."""
    dims = tables._features.output_dims
    for group, members in shared.features_by_group().items():
        distinct = torch.cat([blocks[f] for f in members], dim=1)
        wide = _expand(tables, distinct, shared.select_group(group))
        for f, block in zip(members, wide.split([dims[f] for f in members], dim=1), strict=True):
            blocks[f] = block
    return torch.cat(blocks, dim=1)


def _expand(tables: LookupModule, rows: Tensor, shared: SharedBags) -> Tensor:
    """[B, C]: expands the rows [bags, C] of a group to the samples."""
    wide, status = call(_ops.expand.default, rows, shared.inverse[0])
    if late_errors.reports_late(status):
        tables._note(status, None, None, shared)
    return wide


def argmax_rows(rows: Tensor, offsets: Tensor, is_padding: Tensor | None) -> Tensor:
    """[B, D] int64: per bag and column, the index of the first of rows [N, D] with the maximum, NaN if any; N if empty.

    Args:
        offsets: [B + 1] int64. is_padding: [N] bool, rows that belong to no bag; or None.
    """
    count, bags = rows.shape[0], offsets.shape[0] + 1  # the first and the last collect rows in no bag
    numbers = torch.arange(count, device=rows.device)
    bag = torch.searchsorted(offsets, numbers, right=True)
    if is_padding is not None:
        bag = bag.masked_fill(is_padding, bags - 1)
    bag = bag[:, None].expand_as(rows)
    largest = rows.new_full((bags, rows.shape[1]), -torch.inf).scatter_reduce(0, bag, rows, "amax")
    found = torch.where((rows == largest.gather(0, bag)) | rows.isnan(), numbers[:, None], count)
    return found.new_full(largest.shape, count).scatter_reduce(0, bag, found, "amin")[1:-1]
