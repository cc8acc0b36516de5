"""What a batch of distinct bags has a collection look up, and how the rows of the whole batch come from it."""

from __future__ import annotations

from rec_kernels.nn.bounds import Expansion
from rec_kernels.nn.inverse_jagged import InverseKeyedJaggedTensor
from rec_kernels.nn.jagged import SelectedKeys, check_keys, has_data, select_keys


def select_distinct(features, keys: list[str]) -> tuple[SelectedKeys, Expansion | None]:
    """``keys`` in that order, as ``select_keys`` has them, from bags that may be kept once.

    Args:
        features: any of ``rk.KeyedJaggedTensor``, TorchRec's and ``rk.InverseKeyedJaggedTensor``.

    Returns:
        The bags. What makes the whole batch of their rows: for the rows of whole samples, if all features are in one
        group (the bags have no ``strides`` then); for those of bags otherwise. None where they are the batch's already,
        or features have batch sizes of their own and nothing says which bags the batch has.

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
    expansion = Expansion(places.to(given.offsets.device), given.strides, keys, list(range(len(keys))))
    if has_data(expansion.places) and not (good := expansion.is_good()).all():
        raise IndexError(expansion.message(*(~good).nonzero()[0].tolist()))
    return given, expansion


def _of_groups(features: InverseKeyedJaggedTensor, keys: list[str]) -> tuple[SelectedKeys, Expansion | None]:
    check_keys(keys, features.keys())
    groups = features.group_of_keys()
    used = {groups[key] for key in keys}
    if used <= {None}:
        return select_keys(features.rest() if used else features.bags(), keys), None
    if len(used) > 1:
        given = select_keys(features.bags(), keys, features.known_offset_per_key())
        return given, Expansion(features.places(keys), given.strides, keys, [groups[key] for key in keys])
    group = used.pop()
    unique = features.unique(group)
    return select_keys(unique, keys), Expansion(features.inverse(group)[None], [unique.stride()], keys[:1], [group])
