"""Argument checks shared by several modules."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rec_kernels.ops.layout_records import check_tensor
from rec_kernels.ops.row_formats import FLOAT_FORMATS

#: The largest finite float32.
LARGEST_FLOAT = torch.finfo(torch.float32).max


def positive_integer(name: str, value: Any) -> int:
    """Converts ``value`` to an int.

    Raises:
        ValueError: it is not an integer from 1 to 2^63 - 1, the largest that the kernels take.
    """
    return integer_from(1, name, value)


def integer_from(least: int, name: str, value: Any) -> int:
    """Converts ``value`` to an int.

    Raises:
        ValueError: it is not an integer from ``least`` to 2^63 - 1.
    """
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:  # a float, even an integral one, points to a mistake of the caller
        number = least - 1
    if not least <= number < 2**63:
        raise ValueError(f"{name} must be an integer, at least {least} and below 2^63, got {value!r}")
    return number


def positive_integers(name: str, values: Any) -> tuple[int, ...]:
    """Converts ``values`` to ints.

    Raises:
        ValueError: it is not iterable, or an item is not an integer from 1 to 2^63 - 1.
    """
    try:
        given: tuple = tuple(values)
    except TypeError:
        given = None
    if given is None or isinstance(values, str):
        raise ValueError(f"{name} must be a sequence of integers, each at least 1, got {values!r}")
    return tuple(positive_integer(f"{name}[{i}]", value) for i, value in enumerate(given))


def is_list(given: object) -> bool:
    """True for a list, a tuple and other sequences, except strings."""
    return isinstance(given, Sequence) and not isinstance(given, str)


def number_of(value: Any) -> float:
    """Converts ``value`` to a float; NaN unless it is a number. A boolean is not a number."""
    try:
        number = value.detach() if isinstance(value, Tensor) else value
        return math.nan if isinstance(value, str | bool) else float(number)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # a tensor of several elements, or too large an int
        return math.nan


def check_rate(name: str, value: Any) -> None:
    """Raises ValueError unless ``value`` is a number of at least 0 that is finite in float32."""
    if not 0 <= number_of(value) <= LARGEST_FLOAT:
        raise ValueError(f"{name} = {value!r} must be a number, at least 0, and finite as float32")


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raises ValueError unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        *first, last = (repr(choice) for choice in allowed)
        raise ValueError(f"{name} must be {', '.join(first)} or {last}, got {value!r}")


def check_layer_dtype(name: str, x: Tensor, own: torch.dtype) -> None:
    """Raises an error unless ``x`` has the dtype ``own`` of a layer's parameters or, under autocast, any of three.

    Raises:
        TypeError: ``x`` is not a tensor. ValueError: its dtype is not ``own``, nor, under autocast, float32, float16 or
            bfloat16.
    """
    check_tensor(name, x)
    if x.dtype == own:
        return
    # "meta" has no autocast. torch.amp.is_autocast_available() knows, but breaks graphs of torch 2.10 and 2.11.
    autocast = not x.is_meta and torch.is_autocast_enabled(x.device.type)
    if not (autocast and x.dtype in FLOAT_FORMATS):
        allowed = "float32, float16 or bfloat16 under autocast" if autocast else f"that of the parameters, {own}"
        raise ValueError(f"{name} must be {allowed}, got {x.dtype}")
