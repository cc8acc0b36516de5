"""Checks of values read from a file: types and bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Check(NamedTuple):
    """A check of one value.

    Args:
        allowed: the same as text.
        fits: whether a value is that.
    """

    allowed: str
    fits: Callable[[Any], bool]


class Maybe(NamedTuple):
    """None, or a value of this shape."""

    shape: Any


class Each(NamedTuple):
    """A list, or the values of a dict, of this shape each."""

    shape: Any


def whole(least: int = 0, most: int = 2**63 - 1) -> Check:
    """An int, which is not a bool."""
    allowed = f"a whole number from {least} to {most}"
    return Check(allowed, lambda value: type(value) is int and least <= value <= most)


def number(least: float = -1e300, most: float = 1e300) -> Check:
    """A float or an int; not NaN."""
    allowed = f"a number from {least:g} to {most:g}"
    return Check(allowed, lambda value: type(value) in (int, float) and least <= value <= most)


TEXT = Check("a text", lambda value: isinstance(value, str))
FLAG = Check("true or false", lambda value: isinstance(value, bool))


def mismatch(value: Any, shape: Any, name: str) -> str | None:
    """Describes what is wrong with a value, as "step is -1, allowed is a whole number from 0 to 8"; None: it fits.

    Args:
        value: as read.
        shape: a ``Check``, ``Maybe`` or ``Each``, or a dict of the keys that a dict must have, and their shapes. A key
            that ends with "?" may be missing; others are not looked at.
        name: of the value, for the message; "" of the whole of a file.
    """
    if isinstance(shape, Maybe):
        return None if value is None else mismatch(value, shape.shape, name)
    if isinstance(shape, Check):
        return None if shape.fits(value) else f"{name} is {shown(value)}, allowed is {shape.allowed}"
    if isinstance(shape, Each):
        if not isinstance(value, (list, tuple, dict)):
            return f"{name} is {shown(value)}, allowed is a list or an object"
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        return next(filter(None, (mismatch(part, shape.shape, f"{name}[{key!r}]") for key, part in parts)), None)
    if not isinstance(value, dict):
        return f"{name or 'it'} is {shown(value)}, allowed is an object"
    for key, part in shape.items():
        inner = key.removesuffix("?")
        if inner not in value and inner == key:
            return f"{name or 'it'} has no {key!r}"
        label = f"{name}[{inner!r}]" if name else inner
        if inner in value and (wrong := mismatch(value[inner], part, label)):
            return wrong
    return None


def shown(value: Any, most: int = 80) -> str:
    """The value in one line, shortened to so many characters."""
    try:
        text = " ".join(repr(value).split())
    except (ValueError, RecursionError):  # an int of thousands of digits; lists in lists
        text = f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= most else f"{text[: most - 3]}..."
