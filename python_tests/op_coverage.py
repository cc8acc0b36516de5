"""A pytest plugin that notes which test calls which op with which backend, and which errors tests expect; a comparison.

    PYTEST_ADDOPTS="-p op_coverage" OP_COVERAGE=runs/default PYTHONPATH=.:python_tests pytest -n 2 -m "not full"
    python python_tests/op_coverage.py runs/all runs/default

Every process, of pytest-xdist and of tests that start pytest, writes a file into the folder. The command prints each op
with its backends, and what the first folder has and the second lacks: ops with a backend, ops with a backend in a test
function, errors. It ends with status 1 where an op or an error is lacking.
"""

from __future__ import annotations

import collections
import functools
import json
import os
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

#: (op, backend, test function); (error, test function).
_calls: set[tuple[str, str, str]] = set()
_errors: set[tuple[str, str]] = set()
_test = ""


def backend_of(namespace: str, arguments: tuple) -> str:
    """Where a call of an op runs; "fake" on tensors without numbers."""
    if namespace == "rec_kernels_emulated":
        return "cuda_emulated"
    tensors = [t for t in torch.utils._pytree.tree_leaves(arguments) if isinstance(t, torch.Tensor)]
    if any(t.is_meta or type(t).__name__ == "FakeTensor" for t in tensors):
        return "fake"
    return "cuda" if any(t.is_cuda for t in tensors) else "cpu"


def note(qualified: str, arguments: tuple) -> None:
    """Notes a call of an op: "rec_kernels::expand", its arguments."""
    namespace, _, name = qualified.partition("::")
    if namespace in ("rec_kernels", "rec_kernels_emulated") and not name.startswith("_"):
        _calls.add((name.split(".")[0], backend_of(namespace, arguments), _test))


def _noted(call: Callable, name: Callable[[object], str]) -> Callable:
    def noting(self, /, *args, **kwargs):
        note(name(self), (args, kwargs))
        return call(self, *args, **kwargs)

    return noting


def _noted_function(function: Callable, op: str, backend: str) -> Callable:
    def noting(*args, **kwargs):
        _calls.add((op, backend, _test))
        return function(*args, **kwargs)

    return functools.update_wrapper(noting, function)


def _packages(ops: set[str]) -> Iterator[tuple[object, str, Callable, str]]:
    """(module, name, function, backend): the functions of rec_kernels.triton and rec_kernels.reference named as ops."""
    for backend in ("triton", "reference"):
        package = f"rec_kernels.{backend}"
        modules = [m for n, m in list(sys.modules.items()) if n == package or n.startswith(package + ".")]
        for module in modules:
            for name, value in list(vars(module).items()):
                if name in ops and callable(value) and getattr(value, "__module__", "").startswith(package):
                    yield module, name, value, backend


def normalised(error: BaseException) -> str:
    """The type and first line of an error without its numbers."""
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {re.sub(r'-?[0-9]+(?:[.][0-9]+)?(?:e[-+]?[0-9]+)?', 'N', first)[:120]}"


def pytest_configure(config: pytest.Config) -> None:
    """Calls of ops and pytest.raises are noted from here on."""
    for kind, name in (
        (torch._ops.OpOverload, lambda op: op.name()),
        (torch._ops.OpOverloadPacket, lambda op: op._qualified_op_name),
    ):
        kind.__call__ = _noted(kind.__call__, name)
    leave = pytest.RaisesExc.__exit__

    def noting(self, kind, error, trace):
        if error is not None:
            _errors.add((normalised(error), _test))
        return leave(self, kind, error, trace)

    pytest.RaisesExc.__exit__ = noting


def pytest_collection_finish(session: pytest.Session) -> None:
    """Replaces functions of Triton and the reference, where they are defined and where tests have imported them."""
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("rec_kernels::")]
    ops = {name.split("::")[1].split(".")[0] for name in names}
    noted = {}
    for module, name, function, backend in _packages(ops):
        noted[function] = noted.get(function) or _noted_function(function, name, backend)
        setattr(module, name, noted[function])
    for module in {item.module for item in session.items}:
        for name, value in list(vars(module).items()):
            if isinstance(value, types.FunctionType) and value in noted:
                setattr(module, name, noted[value])


def pytest_runtest_setup(item: pytest.Item) -> None:
    """The test function, whatever its parameters."""
    global _test
    _test = f"{item.path.stem}::{item.originalname}"


def pytest_sessionfinish() -> None:
    """Writes this process's file."""
    folder = Path(os.environ["OP_COVERAGE"])
    folder.mkdir(parents=True, exist_ok=True)
    found = {"calls": sorted(_calls), "errors": sorted(_errors)}
    (folder / f"{os.getpid()}.json").write_text(json.dumps(found))


def read(folder: Path) -> tuple[set[tuple[str, str, str]], set[tuple[str, str]]]:
    """All calls and errors of a folder's files."""
    files = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return tuple({tuple(entry) for found in files for entry in found[what]} for what in ("calls", "errors"))


def compare(whole: Path, part: Path) -> tuple[list[str], bool]:
    """The lines that the command prints, and whether ``part`` has every op with every backend, and every error."""
    (calls, errors), (some_calls, some_errors) = read(whole), read(part)
    backends = collections.defaultdict(collections.Counter)
    for op, backend, _ in some_calls:
        backends[op][backend] += 1
    lines = [f"{op}: " + ", ".join(f"{b} {n}" for b, n in sorted(backends[op].items())) for op in sorted(backends)]
    lacking = sorted({c[:2] for c in calls} - {c[:2] for c in some_calls})
    lines += [f"no call: {op} with {backend}" for op, backend in lacking]
    unexpected = sorted({e for e, _ in errors} - {e for e, _ in some_errors})
    lines += [f"no test: {error}" for error in unexpected]
    fewer = sorted(calls - some_calls)
    lines += [f"not in {test}: {op} with {backend}" for op, backend, test in fewer]
    lines.append(
        f"{len(calls)} calls of an op with a backend in a test function, {len(fewer)} lacking; "
        f"{len(lacking)} ops with a backend lacking; {len({e for e, _ in errors})} errors, {len(unexpected)} lacking"
    )
    return lines, not lacking and not unexpected


if __name__ == "__main__":
    printed, is_whole = compare(*map(Path, sys.argv[1:3]))
    print(*printed, sep="\n")
    sys.exit(not is_whole)
