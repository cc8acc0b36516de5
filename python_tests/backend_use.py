"""Finds the tests of a file that use a kind of backend, from the source; `--backends` deselects the others.

A test uses a kind if one of its names is in ``SEEDS``, or is defined by code that does, in the test's file or in an
imported file of this folder. Fixtures and words of strings count as names: some tests run code in a subprocess.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

#: Names that select a backend other than the CPU.
SEEDS = {
    "cuda_emulated": {"every_backend", "device_backends", "host_backends", "emulated"},
    "cuda": {"every_backend", "device_backends", "OnCuda", "is_available"},
}
#: Modules that the search does not enter: the one that defines the seeds.
NOT_SEARCHED = {"backends"}
#: Names that apply to every test of their file.
ALWAYS_USED = "pytestmark"


class Source:
    """Top-level names of a file, and the names that each definition uses."""

    def __init__(self, path: Path) -> None:
        self.path = path
        #: Name -> names in its definition; imported name -> file in this folder and name there (None: the module).
        self.uses: dict[str, set[str]] = {}
        self.imports: dict[str, tuple[Path, str | None]] = {}
        self.stars: list[Path] = []
        for statement in ast.parse(path.read_text()).body:
            if isinstance(statement, ast.ImportFrom):
                self._add_import(statement)
            elif isinstance(statement, ast.Import):
                for each in statement.names:
                    if sibling := self._sibling(each.name):
                        self.imports[each.asname or each.name] = sibling, None
            else:
                for name in _defined(statement):
                    self.uses.setdefault(name, set()).update(_names(statement))

    @property
    def tests(self) -> list[str]:
        """Names of test functions and test classes."""
        return [name for name in self.uses if name.lower().startswith("test")]

    def _sibling(self, module: str) -> Path | None:
        path = self.path.parent / f"{module}.py"
        return path if module not in NOT_SEARCHED and path.exists() else None

    def _add_import(self, statement: ast.ImportFrom) -> None:
        sibling = self._sibling(statement.module or "") if statement.level == 0 else None
        for each in statement.names if sibling else ():
            if each.name == "*":
                self.stars.append(sibling)
            else:
                self.imports[each.asname or each.name] = sibling, each.name


@functools.cache
def read(path: Path) -> Source:
    """Returns the parsed file."""
    return Source(path)


@functools.cache
def uses_backend(path: Path, test: str, kinds: frozenset[str]) -> bool:
    """Returns True if a test, given by its function's name, uses one of the kinds."""
    seeds = set().union(*(SEEDS.get(kind, set()) for kind in kinds))
    seen: set[tuple[Path, str]] = set()
    todo = [(path, test), (path, ALWAYS_USED)]
    while todo:
        where, name = todo.pop()
        if (where, name) in seen:
            continue
        seen.add((where, name))
        used = read(where).uses.get(name, set())
        if used & seeds:
            return True
        todo += _followed(where, name, used)
    return False


def _followed(path: Path, name: str, used: set[str]) -> Iterator[tuple[Path, str]]:
    """Yields the definitions of ``name`` and of the names that it uses."""
    source = read(path)
    for each in used | {name}:
        if each in source.uses:
            yield path, each
        if each in source.imports:
            sibling, original = source.imports[each]
            # A module's names appear as attributes, hence in ``used``.
            yield from ((sibling, n) for n in (used if original is None else {original}))
        yield from ((sibling, each) for sibling in source.stars)


def _defined(statement: ast.stmt) -> list[str]:
    """Returns the top-level names that a statement defines."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [statement.name]
    stored = (n for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    return [name.id for name in stored]


def _names(statement: ast.stmt) -> set[str]:
    """Returns names, attributes, arguments and words of strings in a statement, without docstrings."""
    found: set[str] = set()
    docstrings = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node, clean=False) is not None:
            docstrings.add(node.body[0].value)
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            found.update(re.findall(r"\w+", node.value))
    return found
