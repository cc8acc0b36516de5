"""Argument checks of the jagged containers, and their messages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rec_kernels.nn.jagged.shared_bags import SharedBags
from rec_kernels.ops.layout_records import ID_DTYPES, check_tensor, integers
from rec_kernels.ops.tracing import cannot_read

_ops = torch.ops.rec_kernels
T = TypeVar("T")


@torch.library.register_fake("rec_kernels::_offsets_rise")
def _(offsets: Tensor, values: int) -> bool:
    return True  # a tracer's offsets have no data to check


def has_data(t: Tensor) -> bool:
    """True if a tensor can be read without waiting for a GPU."""
    return t.is_cpu and is_readable(t)


def is_readable(t: Tensor) -> bool:
    """True if a tensor has data that can be read now: it is neither a tracer's nor inside a graph capture."""
    if type(t) not in (Tensor, nn.Parameter) or cannot_read(t) or t.is_meta or torch.jit.is_tracing():
        return False
    # Wrapper tensors of torch.func's transforms have no data.
    return not (torch._C._functorch.is_functorch_wrapped_tensor(t) or torch._is_functional_tensor(t))


def check_values(values: Tensor) -> None:
    """Raises an error unless ``values`` are [N, ...]."""
    check_tensor("values", values)
    if not values.dim():
        raise ValueError("values must have at least 1 dimension, got a 0-dim tensor")


def check_integers(name: str, t: Tensor, values: Tensor) -> None:
    """Raises an error unless ``name`` is [M] int32 or int64 on the device of ``values``. Never waits for a GPU."""
    check_tensor(name, t)
    if t.dim() != 1 or t.dtype not in ID_DTYPES:
        raise ValueError(f"{name} must be int32 or int64 with one dimension, got {t.dtype} {list(t.shape)}")
    if t.device != values.device:
        raise ValueError(f"{name} must be on values' device, {values.device}, got {t.device}")


def integers_of(given: Sequence[int], name: str) -> list[int]:
    """Converts integers to a list, or raises ValueError. Symbolic sizes of compiled code are kept."""
    try:
        numbers = list(given)
        total: object = sum(numbers)
    except TypeError:
        return integers(given, name)
    known = isinstance(total, (int, torch.SymInt)) and not any(isinstance(number, bool) for number in numbers)
    return numbers if known else integers(given, name)


def check_weights(weights: Tensor, values: Tensor) -> None:
    """Raises an error unless ``weights`` has one floating-point value per item of ``values``."""
    check_tensor("weights", weights)
    if weights.shape != values.shape[:1]:
        raise ValueError(f"weights must have values' shape {list(values.shape[:1])}, got {list(weights.shape)}")
    if not weights.is_floating_point():
        raise ValueError(f"weights must be floating-point numbers, got {weights.dtype}")
    if weights.device != values.device:
        raise ValueError(f"weights must be on values' device, {values.device}, got {weights.device}")


def require(name: str, found: T | None) -> T:
    """Returns ``found``; raises ValueError if it is None."""
    if found is None:
        raise ValueError(f"there are no {name}; {name}_or_none() returns None instead of raising")
    return found


def index_of_key(key: str, keys: list[str]) -> int:
    """Index of a key; raises KeyError if it is unknown."""
    if key not in keys:
        raise KeyError(f"{key!r} is not among the keys {keys}")
    return keys.index(key)


def check_keys_differ(keys: Sequence[str]) -> None:
    """Raises an error unless ``keys`` is a list of distinct names."""
    if isinstance(keys, str) or not isinstance(keys, Collection):
        raise ValueError(f"keys must be a list of feature names, got {keys!r}")
    for i, key in enumerate(keys):
        if not isinstance(key, str):
            raise TypeError(f"keys[{i}] must be a feature's name, a str, got {key!r}")
    if len(set(keys)) != len(keys):
        raise ValueError(f"keys must be unique, got {list(keys)}")


def check_bags(keys: list[str], strides: list[int] | None, bags: int, which: str) -> None:
    """Raises an error unless ``keys`` are distinct and have ``bags`` bags in total.

    Args:
        strides: F batch sizes, or None if all are equal. which: the argument that determined ``bags``.
    """
    check_keys_differ(keys)
    if strides is None:
        if bags < 0 or (bags % len(keys) if keys else bags):
            raise ValueError(f"{which} describe {bags} bags, which is not a multiple of the {len(keys)} keys")
        return
    if len(strides) != len(keys) or any(s < 0 for s in strides):
        raise ValueError(f"stride_per_key must have a batch size for each of the {len(keys)} keys, got {strides}")
    if sum(strides) != bags:
        raise ValueError(f"{which} describe {bags} bags, but stride_per_key adds up to {sum(strides)}")


def check_offsets(offsets: Tensor, count: int) -> None:
    """Raises ValueError unless offsets are non-decreasing from 0 to ``count``."""
    # The CPU checks here; on a GPU the kernels report features that start in the wrong place.
    if not has_data(offsets):
        return
    ends = offsets.numpy()
    if ends[0] != 0 or ends[-1] != count:
        raise ValueError(
            f"offsets must start at 0 and end at {count}, the number of values, got {ends[0]} and {ends[-1]}"
        )
    check_bounds(offsets, count)


def check_bounds(
    offsets: Tensor, count: int, place: Callable[[int], str] | None = None, lengths: Tensor | None = None
) -> None:
    """Raises ValueError unless offsets are non-decreasing in [0, ``count``]. Skipped unless ``has_data(offsets)``.

    Args:
        place: describes the bag with a given index; None: messages do not describe it.
        lengths: the lengths that the offsets were computed from, named in messages; None: offsets were given.
    """
    if not has_data(offsets):
        return
    if not offsets.shape[0]:
        raise ValueError("offsets must have one element more than there are bags, got none")
    if _ops._offsets_rise(offsets, count):
        return
    if lengths is None:
        raise ValueError(describe_bad_offset(offsets.tolist(), count, place))
    sums = list(itertools.accumulate(lengths.tolist(), initial=0))
    text = describe_bad_offset(sums, count, place, from_lengths=True)
    raise ValueError(text or f"lengths add up to {sums[-1]}, more than {lengths.dtype} can hold: they must be int64")


def describe_bad_offset(
    offsets: list[int], count: int, place: Callable[[int], str] | None = None, *, from_lengths: bool = False
) -> str | None:
    """Describes the first bad offset as lookups do; None if all are non-decreasing in [0, ``count``].

    Args:
        place: as for ``check_bounds``. from_lengths: whether messages name lengths.
    """
    for i, (before, offset) in enumerate(itertools.pairwise([0, *offsets])):
        if (text := describe_bad_step(i, before, offset, count, from_lengths)) is not None:
            where = "" if place is None else f" ({place(max(i - 1, 0))})"
            return text.format(where)
    return None


def describe_bad_step(i: int, before: int, offset: int, count: int, from_lengths: bool) -> str | None:
    """Describes what is wrong with ``offsets[i]`` after the offset ``before``; None if it is valid.

    The text has {} where the description of the bag belongs.
    """
    if before <= offset <= count:
        return None
    if from_lengths and i:
        length = f"lengths[{i - 1}] = {offset - before}{{}}"
        if offset < before:
            return f"{length} is below 0: a bag has 0 values or more"
        return f"{length} makes {offset} values up to there: there are {count}"
    if i and offset < before:
        return f"offsets[{i}] = {offset}{{}} is below the offset before it, {before}"
    return f"offsets[{i}] = {offset}{{}} must be in [0, {count}], the number of values"


def describe_bag(bag: int, keys: list[str], strides: list[int]) -> str:
    """The feature of a bag, and the bag's index within it; ``strides``: [F] batch sizes."""
    bounds = list(itertools.accumulate(strides, initial=0))
    f = next((f for f, stop in enumerate(bounds[1:]) if bag < stop), None)
    return "in no feature" if f is None else f"feature {keys[f]!r}, bag {bag - bounds[f]}"


def check_batch(name: str, given: Any) -> None:
    """Raises TypeError unless ``given`` is an ``rk.KeyedJaggedTensor`` or TorchRec's."""
    if not (hasattr(given, "keys") and hasattr(given, "offsets")):
        raise TypeError(f"{name} must be an rk.KeyedJaggedTensor or TorchRec's, got {type(given).__name__}")


def check_inverse(inverse: tuple[list[str], Tensor], keys: list[str], strides: list[int] | None) -> None:
    """Raises an error unless ``inverse`` maps to existing bags of all ``keys``; ``strides``: bags per key."""
    if not isinstance(inverse, Sequence) or len(inverse) != 2:
        raise TypeError(f"inverse_indices must be names and their bags, (list, int64 [F, B]), got {inverse!r}"[:300])
    names, places = inverse
    if strides is None:
        raise ValueError("inverse_indices require a batch size per key: give stride_per_key")
    check_tensor("inverse_indices[1]", places)
    if places.dim() != 2 or places.shape[0] != len(names) or places.dtype != torch.int64:
        raise ValueError(
            f"inverse_indices must be int64 [{len(names)}, B] for its {len(names)} names, got {places.dtype} "
            f"{list(places.shape)}"
        )
    missing = [k for k in keys if k not in names]
    if missing:
        raise ValueError(f"inverse_indices are missing the keys {missing}")
    if not keys or not has_data(places):
        return
    shared = SharedBags(places[[names.index(key) for key in keys]], list(range(len(keys))), strides, keys)
    if (bad := shared.first_bad()) is not None:
        raise IndexError(shared.message(*bad))


def checked_widths(keys: list[str], widths: Sequence[int], values: Tensor) -> list[int]:
    """``widths`` as a list; raises an error unless they match ``keys`` and the columns of ``values``."""
    check_tensor("values", values)
    check_keys_differ(keys)
    widths = integers_of(widths, "length_per_key")
    if len(widths) != len(keys) or any(width < 0 for width in widths):
        raise ValueError(f"length_per_key must have a width for each of the {len(keys)} keys, got {widths}")
    if values.dim() != 2 or values.shape[1] != sum(widths):
        raise ValueError(f"values must be [B, {sum(widths)}], the sum of length_per_key, got {list(values.shape)}")
    return widths


def check_each(name: str, values: Sequence[object], kind: type) -> None:
    """Raises ValueError for an empty list, TypeError for an item that is not a ``kind``."""
    if not values:
        raise ValueError(f"{name} must have at least one rk.{kind.__name__}, got none")
    for i, value in enumerate(values):
        if not isinstance(value, kind):
            raise TypeError(f"{name}[{i}] must be an rk.{kind.__name__}, got {type(value).__name__}")
