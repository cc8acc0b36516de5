"""Sequence lookups: from a batch to one row per id."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rec_kernels.nn.jagged.bounds import read_at
from rec_kernels.nn.jagged.checks import check_offsets
from rec_kernels.nn.jagged.inverse import InverseKeyedJaggedTensor
from rec_kernels.nn.jagged.jagged_tensor import JaggedTensor
from rec_kernels.nn.jagged.select_features import SelectedKeys, as_batch, select_keys
from rec_kernels.nn.served import LookupModule
from rec_kernels.nn.tables.feature_map import FeatureMap


def look_up(tables: LookupModule, features) -> dict[str, JaggedTensor]:
    """Implements ``forward`` of ``rk.EmbeddingCollection``."""
    feature_map = tables._features
    features = as_batch(features, feature_map.feature_names)
    given = _select(feature_map.feature_names, features)
    rows = tables._lookup(*_each_id(given, len(feature_map.feature_names)))
    bags = given.bag_starts(len(feature_map.feature_names))
    bounds = _bounds(features, feature_map.feature_names, given, bags)
    return by_feature(feature_map, rows, given.offsets, bags, bounds)


def by_feature(
    feature_map: FeatureMap, rows: Tensor, offsets: Tensor, bags: list[int], bounds: list[int]
) -> dict[str, JaggedTensor]:
    """Splits the rows of all features into one jagged tensor per feature.

    Args:
        rows: [N, largest D]. offsets: offsets of the batch. bags, bounds: [F + 1] first bag and first id of each
            feature.
    """
    blocks = rows.split([stop - start for start, stop in itertools.pairwise(bounds)]) if bags[1:] else ()
    columns, output = rows.shape[1], {}
    each = zip(feature_map.output_keys, feature_map.output_dims, blocks, _own_offsets(offsets, bags), strict=True)
    for key, dim, block, own in each:
        output[key] = JaggedTensor._from_parts(block if dim == columns else block[:, :dim], own)
    return output


def _own_offsets(offsets: Tensor, bags: list[int]) -> Sequence[Tensor]:
    """[bags of the feature + 1] per feature: its offsets, shifted to start at 0."""
    # Compiled code uses views: code for equal sizes would be recompiled for each size.
    sizes = set() if torch.compiler.is_compiling() else {stop - start for start, stop in itertools.pairwise(bags)}
    if len(sizes) == 1 and bags[1]:
        own = offsets.unfold(0, bags[1] + 1, bags[1])
        return (own - own[:, :1]).unbind()
    views = [offsets[start : stop + 1] for start, stop in itertools.pairwise(bags)]
    return [own - own[0] for own in views]


def look_up_rows(tables: LookupModule, features) -> Tensor:
    """Implements ``rows`` of ``rk.EmbeddingCollection``."""
    return tables._lookup(*bags_of(tables, features))


def bags_of(tables: LookupModule, features) -> tuple[SelectedKeys, Tensor]:
    """Every id of a batch as a bag of its own, and [F + 1] feature starts among them."""
    names = tables._features.feature_names
    return _each_id(_select(names, as_batch(features, names)), len(names))


def _select(names: list[str], features) -> SelectedKeys:
    if isinstance(features, InverseKeyedJaggedTensor):
        raise TypeError(
            "lookups without pooling do not accept an rk.InverseKeyedJaggedTensor: pass features.to_kjt(), or "
            "wrap the module in rk.deduplicated if its features are in one group"
        )
    given = select_keys(features, names, exact=True)
    check_offsets(features.offsets(), features.values().shape[0])
    return given


def _each_id(given: SelectedKeys, features: int) -> tuple[SelectedKeys, Tensor]:
    count, offsets = given.values.shape[0], given.offsets
    each = torch.arange(count + 1, device=offsets.device)
    batch = (offsets.shape[0] - 1) // max(features, 1)
    starts: Any
    if given.strides:
        starts = given.own_starts()
    elif torch.compiler.is_compiling() or not batch:  # a data-dependent batch size must not be tested
        starts = torch.arange(features + 1, device=offsets.device) * batch
    else:  # a view: launches no kernel
        starts = slice(None, None, batch)
    return given._replace(offsets=each), offsets[starts].long().contiguous()


def _bounds(features, keys: list[str], given: SelectedKeys, bags: list[int]) -> list[int]:
    """[F + 1]: start of each feature's ids."""
    if list(features.keys()) == keys and hasattr(features, "offset_per_key"):
        return features.offset_per_key()
    return read_at(given.offsets, bags)
