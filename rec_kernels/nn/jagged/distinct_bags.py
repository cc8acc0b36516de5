"""Lookups of distinct bags, and the whole batch's rows made from them."""

from __future__ import annotations

from rec_kernels.nn.jagged.checks import has_data
from rec_kernels.nn.jagged.inverse import InverseKeyedJaggedTensor
from rec_kernels.nn.jagged.select_features import SelectedKeys, check_keys, select_keys
from rec_kernels.nn.jagged.shared_bags import SharedBags


def select_distinct(features, keys: list[str]) -> tuple[SelectedKeys, SharedBags | None]:
    """``keys`` in that order, as ``select_keys`` has them, from bags that may be kept once.

    Args:
        features: any of ``rk.KeyedJaggedTensor``, TorchRec's and ``rk.InverseKeyedJaggedTensor``.

    Returns:
        The bags, with ``strides`` if features have batch sizes of their own or samples share bags. Which of them the
        samples have; None where they are the batch's already, or features have batch sizes of their own and nothing
        says which bags the batch has.

    Raises:
        KeyError: a feature is missing. IndexError: inverse indices are out of range (on the CPU).
    """
    if isinstance(features, InverseKeyedJaggedTensor):
        return _of_groups(features, keys)
    given = select_keys(features, keys)
    inverse = None if given.strides is None else features.inverse_indices_or_none()
    if inverse is None:
        return given, None
    names, places = inverse
    order = [names.index(key) for key in keys]
    if order != list(range(len(names))):
        places = places[order]
    shared = SharedBags(places.to(given.offsets.device), list(range(len(keys))), given.strides, keys)
    if has_data(places) and (bad := shared.first_bad()) is not None:
        raise IndexError(shared.message(*bad))
    return given, shared


def _of_groups(features: InverseKeyedJaggedTensor, keys: list[str]) -> tuple[SelectedKeys, SharedBags | None]:
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
    if given.strides is None:  # all have as many
        given = given._replace(strides=[bags.stride()] * len(keys))
    return given, SharedBags.of_named(features.inverse_of_groups(), groups, given.strides, keys)
