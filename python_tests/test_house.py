"""The house rules that a machine can check: sizes of files and functions, one stem per op in every layer."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("bench", "csrc", "docs", "examples", "first_light", "python_tests", "rec_kernels", "wheels")
SOURCES = [
    path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in {".py", ".h", ".cpp", ".cu", ".cuh"}
]
FILE, FUNCTION, KERNEL, PARAMETERS = 450, 60, 120, 12
# Files that every op's stem has; not every op has CUDA and Triton kernels.
LAYERS = (
    "csrc/ops/{}.h",
    "csrc/cpu/{}.cpp",
    "rec_kernels/ops/{}.py",
    "rec_kernels/reference/{}.py",
    "python_tests/test_{}.py",
    "bench/bench_{}.py",
)

pytestmark = pytest.mark.skipif(not (ROOT / "csrc").exists(), reason="the sources are not beside the tests")


def python_functions(text: str) -> Iterator[tuple[str, int, int]]:
    """Name, lines and most lines of every function."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name, node.end_lineno - node.lineno + 1, FUNCTION


def cpp_functions(text: str) -> Iterator[tuple[str, int, int]]:
    """Functions of C++ in clang-format's layout: a function's head and last brace are equally indented."""
    lines = text.splitlines()
    heads: dict[str, int] = {}  # by how far left they are
    for i, line in enumerate(lines):
        if head := re.match(r"( {0,2})\w", line):
            heads[head[1]] = i
        elif (brace := re.fullmatch(r"( {0,2})\}", line)) and brace[1] in heads:
            head = lines[heads[brace[1]]].strip()
            if "(" in head and not re.match(r"(if|for|while|switch|do|else|struct|class|enum)\b", head):
                yield head, i - heads[brace[1]] + 1, KERNEL if head.startswith("__global__") else FUNCTION


def cpp_parameters(text: str) -> Iterator[tuple[str, int]]:
    """Name and number of parameters of every function that C++ defines; those of templates' types count, too."""
    text = re.sub(r"//[^\n]*", "", text)
    for head in re.finditer(r"\b(\w+)\(", text):
        depth, count, end = 1, 1, head.end()
        while end < len(text) and depth:
            depth += (text[end] in "([{") - (text[end] in ")]}")
            count += depth == 1 and text[end] == ","
            end += 1
        if re.match(r"\s*(const)?\s*\{", text[end:]) and text[end - 2] != "(":
            yield head[1], count


def functions(path: Path) -> Iterator[tuple[str, int, int]]:
    """Functions of a file."""
    return (python_functions if path.suffix == ".py" else cpp_functions)(path.read_text())


def test_files_are_short() -> None:
    """Up to 450 lines."""
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in SOURCES}
    assert {name: n for name, n in lines.items() if n > FILE} == {}


def test_functions_are_short() -> None:
    """Up to 60 lines, docstrings among them; kernels up to 120."""
    found = [(path, *function) for path in SOURCES for function in functions(path)]
    assert len(found) > 3000
    assert [f"{path.relative_to(ROOT)}: {name} has {n} lines" for path, name, n, most in found if n > most] == []


def test_functions_have_few_parameters() -> None:
    """Up to 12 in C++, those that ops call among them: an op passes structs on."""
    assert list(cpp_parameters("int f(int a, int b) const {\n  g(1, 2, 3);\n}\nint h() {\n}\n")) == [("f", 2)]
    found = [(p, *function) for p in SOURCES if p.suffix != ".py" for function in cpp_parameters(p.read_text())]
    assert len(found) > 1000
    assert [f"{p.relative_to(ROOT)}: {name} has {n} parameters" for p, name, n in found if n > PARAMETERS] == []


def test_long_functions_are_found() -> None:
    """Long functions are found in both languages, members and kernels, too."""
    body = "  x;\n" * 60
    assert [n for _, n, _ in python_functions("def f():\n" + "    x\n" * 60)] == [61]
    assert [n for _, n, _ in cpp_functions(f"int f(int x) {{\n{body}}}\n")] == [62]
    assert [
        n for _, n, _ in cpp_functions(f"struct S {{\n  int f() const {{\n{body.replace('  x', '    x')}  }}\n}};\n")
    ] == [62]
    assert [most for *_, most in cpp_functions(f"__global__ void f(\n    int x) {{\n{body}}}\n")] == [KERNEL]


def test_the_package_stands_alone() -> None:
    """Nothing in it imports what a wheel does not have: benchmarks, studies and tests import it."""
    outside = re.compile(r"^\s*(?:from|import) (?:bench|examples|first_light|python_tests|wheels)\b", re.MULTILINE)
    assert outside.search("    from bench.studies import compare\n")
    assert [p.name for p in (ROOT / "rec_kernels").rglob("*.py") if outside.search(p.read_text())] == []


def test_one_stem_per_op() -> None:
    """A file of csrc/ops that defines ops has its stem in every layer."""
    stems = [p.stem for p in sorted((ROOT / "csrc/ops").glob("*.cpp")) if "  define(" in p.read_text()]
    assert len(stems) > 10
    expected = [layer.format(stem) for stem in stems for layer in LAYERS]
    assert [name for name in expected if not (ROOT / name).exists()] == []


def test_kernels_are_of_a_stem() -> None:
    """Files that register kernels begin with a stem of csrc/ops."""
    stems = tuple(p.stem for p in (ROOT / "csrc/ops").glob("*.cpp"))
    files = [p for p in (ROOT / "csrc").rglob("*.c*") if "STABLE_TORCH_LIBRARY_IMPL(" in p.read_text()]
    assert [str(p.relative_to(ROOT)) for p in files if not p.stem.startswith((*stems, "library"))] == []


def undefined(header: str, own: str) -> list[str]:
    """Names that a header declares at its left margin and its own file does not define."""
    declared = re.findall(r"^(?:[\w:<>,*&]+ )+[*&]?(\w+)\([^;{}]*\)(?: const)?;", header, re.MULTILINE)
    return [name for name in declared if not re.search(rf"\b{name}\([^;{{}}]*\)(?: const)? \{{", own)]


def test_headers_declare_their_own() -> None:
    """A function that a header of csrc/cpu declares is defined in the file of its stem, which may end with _kernels."""
    assert undefined("int f(int x);\nvoid g();\n", "int f(int x) {\n}\nint h() { return g(); }\n") == ["g"]
    headers = sorted((ROOT / "csrc/cpu").glob("*.h"))
    own = {
        h: "".join(f.read_text() for s in ("", "_kernels") if (f := h.with_name(f"{h.stem}{s}.cpp")).exists())
        for h in headers
    }
    assert {h.name: names for h in headers if (names := undefined(h.read_text(), own[h]))} == {}
