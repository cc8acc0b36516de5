"""Imports among the package's modules follow the layers, without cycles; collections have flat class hierarchies."""

from __future__ import annotations

import ast
import graphlib
import inspect
import re
from pathlib import Path

import pytest

import rec_kernels as rk

ROOT = Path(__file__).resolve().parent.parent
#: Layers from lowest to highest; a module belongs to the longest name that it begins with.
LAYERS = (
    "rec_kernels.reference",
    "rec_kernels._library",
    "rec_kernels.ops",
    "rec_kernels.triton",
    "rec_kernels.nn.arguments",
    "rec_kernels.nn.jagged",
    "rec_kernels.nn.tables",
    "rec_kernels.nn.training",
    "rec_kernels.nn",
    "rec_kernels.convert",
    "rec_kernels.models",
    "rec_kernels.distributed",
    "rec_kernels.dlrm",
)

pytestmark = pytest.mark.skipif(not (ROOT / "csrc").exists(), reason="the sources are not beside the tests")


def module_name(path: Path) -> str:
    """The import name of ``path``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(text: str, modules: set[str]) -> set[str]:
    """Those of ``modules`` that a file imports at import time: not within functions or for type checking."""
    found: set[str] = set()
    waiting: list[ast.stmt] = list(ast.parse(text).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
        elif isinstance(node, (ast.If, ast.Try)):
            waiting += [n for n in ast.iter_child_nodes(node) if isinstance(n, ast.stmt)]
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names} & modules
            found |= inner or ({node.module} & modules)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & modules
    return found


def graph() -> dict[str, set[str]]:
    """Module -> modules of the package that it imports."""
    files = {module_name(path): path.read_text() for path in (ROOT / "rec_kernels").rglob("*.py")}
    return {name: imports(text, set(files)) - {name} for name, text in files.items()}


def layer(module: str) -> int:
    """The number of a module's layer; -1: below all."""
    names = [name for name in LAYERS if module == name or module.startswith(f"{name}.")]
    return LAYERS.index(max(names, key=len)) if names else -1


def test_imports_are_seen() -> None:
    """Only imports that run at import time are found."""
    text = "from a import b\nimport c\nif TYPE_CHECKING:\n    import d\ntry:\n    import e\nexcept OSError:\n    pass\n"
    assert imports(text + "def f():\n    import g\n", set("cdeg") | {"a", "a.b"}) == {"a.b", "c", "e"}


def test_no_circles() -> None:
    """Every module can be imported first."""
    order = list(graphlib.TopologicalSorter(graph()).static_order())
    assert len(order) > 100
    with pytest.raises(graphlib.CycleError):
        list(graphlib.TopologicalSorter({"a": {"b"}, "b": {"a"}}).static_order())


def test_imports_go_down() -> None:
    """No module imports one of a higher layer; the package itself and its test helpers are above all."""
    inside = {name: found for name, found in graph().items() if name not in ("rec_kernels", "rec_kernels.testing")}
    up = [(a, b) for a, found in inside.items() for b in found if layer(b) > layer(a) >= 0]
    assert up == []


@pytest.mark.parametrize("kind", [rk.EmbeddingBagCollection, rk.EmbeddingCollection])
def test_collections_are_flat(kind: type) -> None:
    """Collections inherit from their common base class and torch's module only."""
    assert len([c for c in inspect.getmro(kind) if c.__module__.startswith("rec_kernels")]) == 2


def test_no_stubs() -> None:
    """Abstract methods are marked as such; NotImplementedError tells users what is unsupported, and why."""
    stub = re.compile(r"raise NotImplementedError$", re.MULTILINE)
    assert stub.search("def f():\n    raise NotImplementedError\n")
    assert [str(p) for p in (ROOT / "rec_kernels").rglob("*.py") if stub.search(p.read_text())] == []
