"""The default tier has tests of every op, and the tools that check this work."""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path
from types import SimpleNamespace

import op_coverage
import pytest
import torch
from hypothesis import strategies as st
from mutants import MUTANTS
from test_opcheck import registered
from tiers import cross, drawn

ROOT = Path(__file__).resolve().parent.parent
HERE = Path(__file__).parent
#: Tests that call every op: with the CPU's kernels, the emulated CUDA kernels, Triton's interpreter.
EVERY_OP = {
    "test_opcheck": ("test_opcheck",),
    "test_sanitize_cuda": ("test_every_cuda_op_is_called_and_right",),
    "test_triton": ("test_kernels_in_the_interpreter",),
}
#: Files that are in the full tier only.
FULL_FILES = {"test_aarch64", "test_cpp_examples", "test_row_file_memory", "test_sanitized_cpu"}


def marked_full(node: ast.stmt) -> bool:
    """Return whether ``pytest.mark.full`` decorates a function or is among the marks of a file."""
    marks = node.decorator_list if isinstance(node, ast.FunctionDef) else [node]
    return any("pytest.mark.full" in ast.unparse(mark) and "parametrize" not in ast.unparse(mark) for mark in marks)


def test_every_op_is_in_the_default_tier() -> None:
    """Neither tests that call every op nor all tests of a file are in the full tier only."""
    for path in sorted(HERE.glob("test_*.py")):
        body = ast.parse(path.read_text()).body
        tests = {n.name: n for n in body if isinstance(n, ast.FunctionDef) and n.name.startswith("test_")}
        marks = [n for n in body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "pytestmark"]
        is_full = any(map(marked_full, marks)) or (bool(tests) and all(map(marked_full, tests.values())))
        assert is_full == (path.stem in FULL_FILES), path.name
        for name in EVERY_OP.get(path.stem, ()):
            assert not marked_full(tests[name]), name


@pytest.mark.skipif(not (ROOT / "csrc").exists(), reason="the sources are not beside the tests")
def test_mutants_can_be_planted() -> None:
    """Each mutant's text occurs once, and its tests exist."""
    assert len(MUTANTS) >= 30
    for mutant in MUTANTS:
        assert (ROOT / mutant.file).read_text().count(mutant.old) == 1, mutant
        assert all((HERE / f"test_{name.partition('/')[0]}.py").exists() for name in mutant.tests.split()), mutant


def test_pairs_that_are_left_to_the_full_tier() -> None:
    """The default tier has each kind and each case; both tiers together have every pair once."""
    pairs = cross(["a", "b"], [1, 2, 3], 2)
    assert pairs[:4] == [("a", 1), ("a", 2), ("a", 3), ("b", 2)]
    assert [(pair.values, [mark.name for mark in pair.marks]) for pair in pairs[4:]] == [
        (("b", 1), ["full"]),
        (("b", 3), ["full"]),
    ]


def test_examples_that_are_left_to_the_full_tier() -> None:
    """The default tier has a third of the examples; a failing example fails the test; parameters combine with them."""
    seen: list[tuple[int, str]] = []

    @drawn(60, st.integers())
    def test(name: str, number: int) -> None:
        seen.append((number, name))
        assert number != 12345

    (mark,) = test.pytestmark
    found = [(given.values, [m.name for m in given.marks]) for given in mark.args[1]]
    assert found == [((20,), ["fewer"]), ((60,), ["full"])]
    assert list(inspect.signature(test).parameters) == ["name", "examples"]
    for examples in (20, 60):
        seen.clear()
        test(examples=examples, name="x")
        assert len(set(seen)) > examples / 2
        assert len(seen) <= examples
        assert {name for _, name in seen} == {"x"}

    @drawn(3, st.just(7))
    def wrong(number: int) -> None:
        assert number == 8

    with pytest.raises(AssertionError):
        wrong(examples=1)


def test_calls_of_ops_have_a_backend() -> None:
    """The plugin distinguishes the CPU, the emulator and tensors without data."""
    x = torch.ones(2)
    assert op_coverage.backend_of("rec_kernels", ((x,), {})) == "cpu"
    assert op_coverage.backend_of("rec_kernels_emulated", ((x,), {})) == "cuda_emulated"
    assert op_coverage.backend_of("rec_kernels", (([x.to("meta")],), {})) == "fake"
    error = ValueError("rows = -1 must be 0 or more, got 2.5e-3\nand more")
    assert op_coverage.normalized(error) == "ValueError: rows = N must be N or more, got N"


def test_calls_and_their_errors_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A raising op is recorded with its backend and error."""
    for name in ("_calls", "_raised"):
        monkeypatch.setattr(op_coverage, name, set())
    monkeypatch.setattr(op_coverage, "_test", "test_a::test_b")
    call = op_coverage._recording(lambda op, x: op.function(x), lambda op: op.name)
    op = SimpleNamespace(name="rec_kernels::expand.out", function=lambda x: x + 1)
    assert call(op, 1) == 2
    op.function = lambda x: 1 / x
    with pytest.raises(ZeroDivisionError):
        call(op, 0)
    call(SimpleNamespace(name="aten::add", function=abs), 1)
    assert op_coverage._calls == {("expand", "cpu", "test_a::test_b")}
    assert op_coverage._raised == {("expand", "cpu", "ZeroDivisionError: division by zero")}


def test_kernels_are_known() -> None:
    """Every op has a kernel for the CPU, or none at all, and a fake one."""
    kernels = op_coverage.registered_kernels()
    assert {(op.partition(".")[0], backend) for op in registered() for backend in ("cpu", "fake")} <= kernels


def test_what_a_tier_lacks_is_said(tmp_path: Path) -> None:
    """An op with a backend, or an error, that only the first folder has; a kernel and an op without any test."""
    calls = [["expand", "cpu", "test_a::test_b"], ["expand", "triton", "test_a::test_c"], ["expand", "cpu", "test_d"]]
    raised = [["expand", "cpu", "ValueError: x"], ["expand", "triton", "ValueError: x"]]
    errors = [["ValueError: x", "test_a::test_b"], ["ValueError: y", "test_a::test_b"]]
    kernels = [["expand", "cpu"], ["expand", "fake"], ["row_dot", "cpu"]]
    part = tmp_path / "part"
    for folder, *found in ((tmp_path, calls, raised, errors), (part, calls[:1], raised[:1], errors[:1])):
        folder.mkdir(exist_ok=True)
        found = dict(zip(("calls", "raised", "errors"), found, strict=True)) | {"kernels": kernels}
        (folder / "1.json").write_text(json.dumps(found))
    whole, some = map(op_coverage.Coverage.read, (tmp_path, part))
    lines, is_whole = op_coverage.compare(whole, some)
    assert not is_whole
    assert lines == [
        "expand: cpu 1 (1 errors)",
        "no test: expand with fake",
        "no test: row_dot with cpu",
        "no error: row_dot",
        "no call: expand with triton",
        "not raised: expand with triton: ValueError: x",
        "not expected: ValueError: y",
        "not in test_d: expand with cpu",
        "not in test_a::test_c: expand with triton",
        "3 calls of an op with a backend in a test function, 2 lacking; 2 errors of an op with a backend and 2 that "
        "tests expect, 3 of these and of backends lacking; 3 without any test",
    ]
    whole.kernels.clear()
    assert op_coverage.compare(whole, whole)[1]
