"""Every public name has a docstring with its arguments and errors, and is on a page of docs/."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import rec_kernels as rk

PAGES = "\n".join(page.read_text() for page in sorted((Path(__file__).parents[1] / "docs").glob("*.md")))
NAMES = [name for name in rk.__all__ if not name.startswith("__")]
FUNCTIONS = [name for name in NAMES if inspect.isfunction(getattr(rk, name))]
CLASSES = [name for name in NAMES if inspect.isclass(getattr(rk, name))]


def own_docstring(thing: object) -> str:
    """The object's own docstring, without inherited ones and signatures of dataclasses."""
    text = (vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__) or ""
    is_signature = dataclasses.is_dataclass(thing) and text.startswith(f"{getattr(thing, '__name__', '')}(")
    return "" if is_signature else text


def docstrings(thing: object) -> str:
    """Docstrings of an object, of its base classes in the package, and of the names that it refers to."""
    kinds = inspect.getmro(thing) if inspect.isclass(thing) else [thing]
    text = "\n".join(own_docstring(kind) for kind in kinds if kind.__module__.startswith("rec_kernels"))
    found = re.findall(r"(?<=see )``(?:rk\.)?(\w+)``|``(?:rk\.)?(\w+)``'", text)
    others = [getattr(rk, name or other, None) for name, other in found]
    return text + "".join(own_docstring(other) for other in others if other not in (None, thing))


@pytest.mark.parametrize("name", NAMES)
def test_on_a_page(name: str) -> None:
    """`name` or rk.name, in text or code."""
    assert re.search(rf"\brk\.{name}\b|`{name}\b", PAGES)


@pytest.mark.parametrize("name", FUNCTIONS + CLASSES)
def test_arguments_are_in_the_docstring(name: str) -> None:
    thing = getattr(rk, name)
    assert own_docstring(thing)
    missing = [a for a in inspect.signature(thing).parameters if not re.search(rf"\b{a}\b", docstrings(thing))]
    assert missing == []


@pytest.mark.parametrize("name", FUNCTIONS + CLASSES)
def test_errors_are_in_the_docstring(name: str) -> None:
    """Every public function and class documents its errors."""
    thing = getattr(rk, name)
    makers = [getattr(thing, m, None) for m in ("__init__", "__post_init__")] if inspect.isclass(thing) else [thing]
    # A dataclass's __init__ has no file.
    written = [f for f in makers if inspect.isfunction(f) and "rec_kernels" in f.__code__.co_filename]
    checks = r"\braise \w+|\b_?check_\w+\(|positive_integer\(|_ops\.|torch\.ops\."
    source = "".join(map(inspect.getsource, written))
    if inspect.signature(thing).parameters and re.search(checks, source):
        assert "Raises:" in docstrings(thing)


@pytest.mark.parametrize("name", CLASSES)
def test_methods_have_docstrings(name: str) -> None:
    """Public methods and properties that a class defines have docstrings, or override documented ones."""
    kind = getattr(rk, name)
    own = [m for m, value in vars(kind).items() if inspect.isfunction(value) or isinstance(value, property)]
    assert [m for m in own if not m.startswith("_") and not inspect.getdoc(getattr(kind, m))] == []
