"""Builds jagged batches from dicts of tensors, lists, padded tensors, or values and offsets per feature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rec_kernels.nn.arguments import is_list
from rec_kernels.nn.jagged.checks import check_integers, check_keys_differ, has_data
from rec_kernels.ops.layout_records import ID_DTYPES, check_tensor, integer

#: The arguments of ``rk.KeyedJaggedTensor`` by name.
Arguments = dict[str, Any]


class _Feature(NamedTuple):
    """One feature's ids [N], lengths [B], and weights [N] or None."""

    values: Tensor
    lengths: Tensor
    weights: Tensor | None = None


def from_dict(features: Mapping[str, Any], padding_value: int | None) -> Arguments:
    """``rk.KeyedJaggedTensor.from_dict``."""
    _check_dict("features", features)
    _check_padding(padding_value)
    return _concat({name: _feature(f"features[{name!r}]", x, padding_value) for name, x in features.items()})


def from_lists(features: Mapping[str, Any], weights: Mapping[str, Any] | None) -> Arguments:
    """``rk.KeyedJaggedTensor.from_lists``."""
    _check_dict("features", features)
    found = {name: _from_lists(f"features[{name!r}]", bags, torch.int64) for name, bags in features.items()}
    if weights is not None:
        _check_dict("weights", weights)
        if sorted(weights) != sorted(features):
            raise ValueError(f"weights must have the features {sorted(features)}, got {sorted(weights)}")
        for name, bags in weights.items():
            given = _from_lists(f"weights[{name!r}]", bags, torch.float32)
            if not torch.equal(given.lengths, found[name].lengths):
                raise ValueError(f"weights[{name!r}] must have one weight for each id of features[{name!r}]")
            found[name] = found[name]._replace(weights=given.values)
    return _concat(found)


def from_padded(keys: Sequence[str], padded: Tensor, padding_value: int) -> Arguments:
    """``rk.KeyedJaggedTensor.from_padded``."""
    check_keys_differ(keys)
    check_tensor("padded", padded)
    _check_padding(padding_value)
    if padded.dim() != 3 or padded.shape[0] != len(keys):
        raise ValueError(f"padded must be [F, B, L] of {len(keys)} keys, got {list(padded.shape)}")
    found = {key: _from_tensor(f"padded[{f}]", padded[f], padding_value) for f, key in enumerate(keys)}
    return _concat(found)


def from_offsets_list(
    keys: Sequence[str], values: Sequence[Tensor], offsets: Sequence[Tensor], weights: Sequence[Tensor] | None
) -> Arguments:
    """``rk.KeyedJaggedTensor.from_offsets_list``."""
    check_keys_differ(keys)
    for name, given in (("values", values), ("offsets", offsets), ("weights", weights)):
        if given is None and name == "weights":
            continue
        count = len(given) if isinstance(given, Sequence | Tensor) else repr(given)
        if count != len(keys):
            raise ValueError(f"{name} must have a tensor for each of {len(keys)} keys, got {count}")
    found = {}
    for f, key in enumerate(keys):
        ids, starts = values[f], offsets[f]
        check_integers(f"values[{f}]", ids, ids)
        check_integers(f"offsets[{f}]", starts, ids)
        if weights is not None:
            check_tensor(f"weights[{f}]", weights[f])
            if weights[f].shape != ids.shape:
                raise ValueError(
                    f"weights[{f}] must have values[{f}]'s shape, {list(ids.shape)}, got {list(weights[f].shape)}"
                )
        ends = torch.cat([starts, starts.new_tensor([ids.shape[0]])])
        _check_offsets(f, ends)
        found[key] = _Feature(ids, ends.diff(), None if weights is None else weights[f])
    return _concat(found)


def _check_dict(name: str, given: Any) -> None:
    if not isinstance(given, Mapping):
        raise TypeError(f"{name} must be a dict with the names of features, got {type(given).__name__}")


def _check_padding(padding_value: int | None) -> None:
    if padding_value is not None:
        integer(padding_value, "padding_value")


def _check_offsets(f: int, ends: Tensor) -> None:
    if not has_data(ends):
        return
    if len(ends) > 1 and ends[0]:
        raise ValueError(f"offsets[{f}][0] must be 0, got {int(ends[0])}")
    falls = (ends.diff() < 0).nonzero()
    if len(falls):
        i, count = int(falls[0]), int(ends[-1])
        which = f"offsets[{f}][{i + 1}] = {int(ends[i + 1])} must be at least the one before, {int(ends[i])}"
        if i + 2 == len(ends):
            which = f"offsets[{f}][{i}] = {int(ends[i])} must be at most the number of values, {count}"
        raise ValueError(which)


def _feature(name: str, x: Any, padding_value: int | None) -> _Feature:
    if isinstance(x, Tensor):
        return _from_tensor(name, x, padding_value)
    if hasattr(x, "values") and hasattr(x, "offsets"):
        return _from_jagged(x)
    return _from_lists(name, x, torch.int64)


def _from_jagged(x: Any) -> _Feature:
    """Ids of a jagged tensor that are in its bags; others would shift the ids of later features.

    Compiled code cannot drop other ids and sets a negative length instead, which a lookup refuses.
    """
    values, offsets, weights = x.values(), x.offsets(), x.weights_or_none()
    lengths = offsets.diff()
    if torch.compiler.is_compiling():
        has_others = (offsets[:1] != 0) | (offsets[-1:] != values.shape[0])
        lengths = torch.cat([lengths[:1].masked_fill(has_others, -1), lengths[1:]])
    elif not offsets.is_meta:
        first, last = int(offsets[0]), int(offsets[-1])
        values, weights = values[first:last], None if weights is None else weights[first:last]
    return _Feature(values, lengths, weights)


def _from_tensor(name: str, x: Tensor, padding_value: int | None) -> _Feature:
    is_dense = x.layout == torch.strided and not x.is_nested
    if not is_dense or x.dim() not in (1, 2) or x.dtype not in ID_DTYPES:
        found = f"{x.dtype} {list(x.shape)}" if is_dense else f"a tensor of layout {x.layout}"
        raise ValueError(f"{name} must be ids, int32 or int64 [B] or [B, L], got {found}")
    bags = x[:, None] if x.dim() == 1 else x
    if padding_value is None:
        return _Feature(x.reshape(-1), torch.full((bags.shape[0],), bags.shape[1], dtype=torch.int64, device=x.device))
    is_id = bags != padding_value
    return _Feature(bags[is_id], is_id.sum(1))


def _from_lists(name: str, bags: Any, dtype: torch.dtype) -> _Feature:
    if not isinstance(bags, Sequence) or not all(map(is_list, bags)):
        raise TypeError(f"{name} must be a list of lists, one for each sample, got {bags!r}"[:200])
    flat = [number for bag in bags for number in bag]
    kinds = (int,) if dtype == torch.int64 else (int, float)
    for number in flat:
        if not isinstance(number, kinds) or isinstance(number, bool):
            raise TypeError(f"{name} must have {'ids' if len(kinds) == 1 else 'numbers'}, got {number!r}")
        if len(kinds) == 1 and not -(2**63) <= number < 2**63:
            raise ValueError(f"{name} must have ids in [-2^63, 2^63), got {number}")
    return _Feature(
        torch.tensor(flat, dtype=dtype, device="cpu"),
        torch.tensor([len(bag) for bag in bags], dtype=torch.int64, device="cpu"),
    )


def _concat(features: dict[str, _Feature]) -> Arguments:
    keys, found = list(features), list(features.values())
    if not found:
        empty = torch.zeros(0, dtype=torch.int64)
        return {"keys": [], "values": empty, "lengths": empty}
    without = [key for key, x in features.items() if x.weights is None]
    if without and len(without) < len(keys):
        raise ValueError(f"features {without} have no weights, but others do: give weights for all features or none")
    for key, x in features.items():
        if x.values.device != found[0].values.device:
            first = f"feature {keys[0]!r} is on {found[0].values.device}"
            raise ValueError(f"features must be on one device: {first}, and {key!r} on {x.values.device}")
    sizes = [x.lengths.shape[0] for x in found]
    # Compare pairwise: a set would specialize compiled code to these sizes.
    is_uniform = all(size == sizes[0] for size in sizes)
    return {
        "keys": keys,
        "values": torch.cat([x.values for x in found]),
        "lengths": torch.cat([x.lengths for x in found]),
        "weights": None if without else torch.cat([x.weights for x in found]),
        "stride_per_key": None if is_uniform else sizes,
    }
