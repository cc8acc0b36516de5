"""A pytest plugin that records tests' calls of ops, backends and errors; prints a matrix and a comparison.

    make coverage                                                  # both tiers, into runs/coverage, and the comparison
    PYTEST_ADDOPTS="-p op_coverage" OP_COVERAGE=runs/some PYTHONPATH=.:python_tests pytest python_tests/test_expand.py
    python python_tests/op_coverage.py runs/coverage runs/coverage/default

Every process, of pytest-xdist and of tests that start pytest, writes a file into the folder. The command prints a line
per op for the second folder: for each backend, the number of test functions that call the op, and of errors it raises.
It lists ops with a kernel that no test of the second folder calls, ops that raise no error there, and what only the
first folder has: ops with a backend, their errors, errors that tests expect, ops with a backend in a test function. The
exit status is 1 if anything but the last is missing.
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
from typing import NamedTuple

# Set before torch loads OpenMP, as in conftest.py, which pytest loads after this plugin.
os.environ["OMP_WAIT_POLICY"] = "passive"

import pytest
import torch

#: (op, backend, test function); (op, backend, raised error); (expected error, test function).
_calls: set[tuple[str, str, str]] = set()
_raised: set[tuple[str, str, str]] = set()
_errors: set[tuple[str, str]] = set()
_test, _imported = "", 0


#: Namespaces of ops, and the backends of their kernels.
NAMESPACES = {"rec_kernels": "cpu", "rec_kernels_emulated": "cuda_emulated"}


def registered_kernels() -> set[tuple[str, str]]:
    """(op, backend) of the kernels in this process. Every op has a fake kernel."""
    found = set()
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, _, name = qualified.partition("::")
        op, backend = name.split(".")[0], NAMESPACES.get(namespace)
        if backend and not op.startswith("_") and torch._C._dispatch_has_kernel_for_dispatch_key(qualified, "CPU"):
            found |= {(op, backend), (op, "fake")}
    return found | {(f.op, f.backend) for f in _packages({op for op, _ in found})}


def backend_of(namespace: str, arguments: tuple) -> str:
    """The backend of an op's call; "fake" for tensors without data."""
    if namespace == "rec_kernels_emulated":
        return "cuda_emulated"
    tensors = [t for t in torch.utils._pytree.tree_leaves(arguments) if isinstance(t, torch.Tensor)]
    if any(t.is_meta or type(t).__name__ == "FakeTensor" for t in tensors):
        return "fake"
    return "cuda" if any(t.is_cuda for t in tensors) else "cpu"


def record_call(op: str, backend: str, call: Callable, *args, **kwargs) -> object:
    """Calls an op, and records the call and its error."""
    _calls.add((op, backend, _test))
    try:
        return call(*args, **kwargs)
    except Exception as error:
        _raised.add((op, backend, normalized(error)))
        raise


def _recording(call: Callable, name: Callable[[object], str]) -> Callable:
    def recording(self, /, *args, **kwargs):
        namespace, _, op = name(self).partition("::")
        if namespace not in NAMESPACES or op.startswith("_"):
            return call(self, *args, **kwargs)
        return record_call(op.split(".")[0], backend_of(namespace, (args, kwargs)), call, self, *args, **kwargs)

    return recording


def _recording_function(function: Callable, op: str, backend: str) -> Callable:
    return functools.update_wrapper(functools.partial(record_call, op, backend, function), function)


class _Function(NamedTuple):
    """A function of a package, or an overload of one, and its names."""

    space: dict[str, Callable]
    key: str
    op: str
    backend: str


def _packages(ops: set[str]) -> Iterator[_Function]:
    """The functions of rec_kernels.triton and rec_kernels.reference with names of ops."""
    for backend in ("triton", "reference"):
        package = f"rec_kernels.{backend}"
        modules = [m for n, m in list(sys.modules.items()) if n == package or n.startswith(package + ".")]
        for module in modules:
            for name, value in list(vars(module).items()):
                if name not in ops or not getattr(value, "__module__", "").startswith(package):
                    continue
                overloads = vars(value).get("all")  # rec_kernels.triton.embedding_bag.Overloads
                if overloads:
                    yield from (_Function(overloads, key, name, backend) for key in overloads)
                elif callable(value):
                    yield _Function(vars(module), name, name, backend)


def normalized(error: BaseException) -> str:
    """The type and first line of an error, with N for numbers."""
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {re.sub(r'-?[0-9]+(?:[.][0-9]+)?(?:e[-+]?[0-9]+)?', 'N', first)[:120]}"


def pytest_configure(config: pytest.Config) -> None:
    """Starts recording calls of ops and pytest.raises."""
    for kind, name in (
        (torch._ops.OpOverload, lambda op: op.name()),
        (torch._ops.OpOverloadPacket, lambda op: op._qualified_op_name),
    ):
        kind.__call__ = _recording(kind.__call__, name)
    leave = pytest.RaisesExc.__exit__

    def recording_exit(self, kind, error, trace):
        if error is not None:
            _errors.add((normalized(error), _test))
        return leave(self, kind, error, trace)

    pytest.RaisesExc.__exit__ = recording_exit


#: Functions of Triton and the reference, and their recording replacements.
_functions: dict[Callable, Callable] = {}


def record_packages() -> None:
    """Replaces functions of Triton and the reference in their modules, as far as these are imported."""
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("rec_kernels::")]
    ops = {name.split("::")[1].split(".")[0] for name in names}
    for space, key, op, backend in list(_packages(ops)):
        function = space[key]
        if function not in _functions.values():
            _functions[function] = _functions.get(function) or _recording_function(function, op, backend)
            space[key] = _functions[function]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Also replaces the functions that tests have imported."""
    record_packages()
    for module in {item.module for item in session.items}:
        for name, value in list(vars(module).items()):
            if isinstance(value, types.FunctionType) and value in _functions:
                setattr(module, name, _functions[value])


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Sets the current test function, and replaces functions that the previous test has imported."""
    global _test, _imported
    _test = f"{item.path.stem}::{item.originalname}"
    if len(sys.modules) != _imported:
        record_packages()
        _imported = len(sys.modules)


def pytest_sessionfinish() -> None:
    """Writes this process's file."""
    folder = Path(os.environ["OP_COVERAGE"])
    folder.mkdir(parents=True, exist_ok=True)
    found = Coverage(_calls, _raised, _errors, registered_kernels())
    (folder / f"{os.getpid()}.json").write_text(json.dumps({k: sorted(v) for k, v in found._asdict().items()}))


class Coverage(NamedTuple):
    """The recorded calls, raised errors, expected errors and kernels."""

    calls: set[tuple[str, str, str]]
    raised: set[tuple[str, str, str]]
    errors: set[tuple[str, str]]
    kernels: set[tuple[str, str]]

    @classmethod
    def read(cls, folder: Path) -> Coverage:
        """Reads all files of a folder, recursively."""
        files = [json.loads(path.read_text()) for path in folder.rglob("*.json")]
        return cls(*({tuple(entry) for found in files for entry in found[name]} for name in cls._fields))


def matrix(found: Coverage) -> list[str]:
    """A line per op: "expand: cpu 12 (3 errors), fake 2", with numbers of test functions and of different errors."""
    tests = collections.Counter(call[:2] for call in found.calls)
    errors = collections.Counter(error[:2] for error in found.raised)
    lines = []
    for op in sorted({op for op, _ in tests}):
        cells = []
        for backend in sorted({b for o, b in tests if o == op}):
            count = errors[op, backend]
            cells.append(f"{backend} {tests[op, backend]}" + (f" ({count} errors)" if count else ""))
        lines.append(f"{op}: {', '.join(cells)}")
    return lines


def uncovered(found: Coverage) -> list[str]:
    """Kernels that no test calls, and ops without an error on the CPU."""
    untested = found.kernels - {call[:2] for call in found.calls}
    silent = {op for op, _ in found.kernels} - {op for op, backend, _ in found.raised if backend == "cpu"}
    return [f"no test: {op} with {b}" for op, b in sorted(untested)] + [f"no error: {op}" for op in sorted(silent)]


def compare(whole: Coverage, part: Coverage) -> tuple[list[str], bool]:
    """The lines that the command prints, and whether ``part`` has every op with every backend, and every error."""
    missing = [
        f"no call: {op} with {b}" for op, b in sorted({c[:2] for c in whole.calls} - {c[:2] for c in part.calls})
    ]
    missing += [
        f"not raised: {op} with {backend}: {error}" for op, backend, error in sorted(whole.raised - part.raised)
    ]
    errors = {e for e, _ in whole.errors}
    missing += [f"not expected: {error}" for error in sorted(errors - {e for e, _ in part.errors})]
    fewer = [f"not in {test}: {op} with {backend}" for op, backend, test in sorted(whole.calls - part.calls)]
    without = uncovered(part)
    counts = (
        f"{len(whole.calls)} calls of an op with a backend in a test function, {len(fewer)} lacking; "
        f"{len(whole.raised)} errors of an op with a backend and {len(errors)} that tests expect, "
        f"{len(missing)} of these and of backends lacking; {len(without)} without any test"
    )
    return [*matrix(part), *without, *missing, *fewer, counts], not missing and not without


if __name__ == "__main__":
    printed, is_whole = compare(*(Coverage.read(Path(folder)) for folder in sys.argv[1:3]))
    print(*printed, sep="\n")
    sys.exit(not is_whole)
