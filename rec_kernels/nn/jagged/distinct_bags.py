"""Selects distinct bags for a lookup, and how to expand them to the whole batch."""

from __future__ import annotations

from collections.abc import Sequence

from rec_kernels.nn.jagged.checks import has_data
from rec_kernels.nn.jagged.inverse import InverseKeyedJaggedTensor
from rec_kernels.nn.jagged.select_features import SelectedKeys, check_keys, select_keys
from rec_kernels.nn.jagged.shared_bags import SharedBags


def select_distinct(features, keys: list[str]) -> tuple[SelectedKeys, SharedBags | None]:
    """Selects ``keys`` in that order, as ``select_keys``, from bags that may be stored once.

    Args:
        features: an ``rk.KeyedJaggedTensor``, TorchRec's, or an ``rk.InverseKeyedJaggedTensor``.

    Returns:
        The selected bags, with ``strides`` if batch sizes differ or samples share bags; and which bags the samples
        share. The latter is None if every bag is a sample's own.

    Raises:
        KeyError: a feature is missing. IndexError: inverse indices are out of range (on the CPU). ValueError: batch
        sizes differ, and the batch has no inverse indices.
    """
    if isinstance(features, InverseKeyedJaggedTensor):
        return _select_groups(features, keys)
    given = select_keys(features, keys)
    if given.strides is None:
        return given, None
    if (inverse := features.inverse_indices_or_none()) is None:
        raise _batch_size_error(keys, given.strides)
    names, places = inverse
    order = [names.index(key) for key in keys]
    if order != list(range(len(names))):
        places = places[order]
    shared = SharedBags(places.to(given.offsets.device), list(range(len(keys))), given.strides, keys)
    if has_data(places) and (bad := shared.first_bad()) is not None:
        raise IndexError(shared.message(*bad))
    return given, shared


def _select_groups(features: InverseKeyedJaggedTensor, keys: list[str]) -> tuple[SelectedKeys, SharedBags | None]:
    check_keys(keys, features.keys())
    number = features.group_of_keys()
    groups = [number[key] for key in keys]
    used = set(groups)
    if used <= {None}:
        return select_keys(features.rest() if used else features.bags(), keys), None
    bags = features.bags()
    known = None
    if bags.keys() != keys:
        if len(used) == 1:
            bags = features.unique(groups[0])
        else:
            known = features.known_offset_per_key()
    given = select_keys(bags, keys, known)
    if given.strides is None:  # all features have one batch size
        given = given._replace(strides=[bags.stride()] * len(keys))
    return given, SharedBags.from_rows(features.inverse_of_groups(), groups, given.strides, keys)


def _batch_size_error(names: Sequence[str], strides: Sequence[int]) -> ValueError:
    odd = next((f for f, size in enumerate(strides) if size != strides[0]), 0)
    which = f": {names[0]!r} has {strides[0]} samples, {names[odd]!r} has {strides[odd]}" if odd else ""
    return ValueError(
        f"the features have batch sizes of their own and no inverse indices{which}, so there is no batch that their "
        "outputs could be rows of: give all as many samples, or inverse_indices, or use by_feature()"
    )
