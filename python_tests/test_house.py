"""House rules that are checked: sizes of files and functions, complete sentences, one stem per op in every layer."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Collection, Iterator
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
# A comment or docstring that begins so lacks a subject and a verb: "Of the flat tensor.", "What the host knows."
FRAGMENT = re.compile(r"(Of|The same|Which|Whose|Whether|What)\b")
# Files that every op's stem has; CUDA and Triton kernels are optional.
LAYERS = ("rec_kernels/ops/{}.py", "rec_kernels/reference/{}.py", "python_tests/test_{}.py", "bench/bench_{}.py")
CSRC = ROOT / "csrc"
# The folders of csrc with ops: each may include the folders before it.
OP_FOLDERS = ("core", "rows", "embedding_bag", "row_cache", "jagged", "dense")
# Exceptions, (folder, header): launches of the test-only build are the emulator's.
EXCEPTIONS = {("core/cuda", "emulator/launch.h")}

pytestmark = pytest.mark.skipif(not (ROOT / "csrc").exists(), reason="the sources are not beside the tests")


@functools.cache
def parsed(text: str) -> ast.Module:
    """The syntax tree of a Python file, cached for several tests."""
    return ast.parse(text)


def python_functions(text: str) -> Iterator[tuple[str, int, int]]:
    """Name, number of lines, and line limit of every function."""
    for node in ast.walk(parsed(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name, node.end_lineno - node.lineno + 1, FUNCTION


def cpp_functions(text: str) -> Iterator[tuple[str, int, int]]:
    """Functions of C++ in clang-format's layout: a function's head and last brace are equally indented."""
    lines = text.splitlines()
    heads: dict[str, int] = {}  # by indentation
    for i, line in enumerate(lines):
        if head := re.match(r"( {0,2})\w", line):
            heads[head[1]] = i
        elif (brace := re.fullmatch(r"( {0,2})\}", line)) and brace[1] in heads:
            head = lines[heads[brace[1]]].strip()
            if "(" in head and not re.match(r"(if|for|while|switch|do|else|struct|class|enum)\b", head):
                yield head, i - heads[brace[1]] + 1, KERNEL if head.startswith("__global__") else FUNCTION


def cpp_parameters(text: str) -> Iterator[tuple[str, int]]:
    """Name and number of parameters of every C++ function definition, including parameters with template types."""
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


def docstring_lines(text: str) -> int:
    """Number of docstring lines of a Python file."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    first = [node.body[0] for node in ast.walk(parsed(text)) if isinstance(node, kinds) and ast.get_docstring(node)]
    return sum(node.end_lineno - node.lineno + 1 for node in first)


def file_lines(path: Path) -> int:
    """Number of lines of a file, without docstrings: limiting these would penalize documentation."""
    text = path.read_text()
    return len(text.splitlines()) - (docstring_lines(text) if path.suffix == ".py" else 0)


def assert_none(found: Collection[str], what: str) -> None:
    """Fails with a sentence and the complete findings, which pytest would shorten."""
    assert not found, f"{what}: {found}"


def test_files_are_short() -> None:
    """Files have up to 450 lines."""
    assert docstring_lines('"""One."""\ndef f():\n    """Two\n    three."""\n    return """none"""\n') == 3
    lines = {str(path.relative_to(ROOT)): file_lines(path) for path in SOURCES}
    assert_none(
        {name: n for name, n in lines.items() if n > FILE}, f"files have more than {FILE} lines beside docstrings"
    )


def test_functions_are_short() -> None:
    """Functions have up to 60 lines including docstrings; kernels up to 120."""
    found = [(path, *function) for path in SOURCES for function in functions(path)]
    assert len(found) > 3000
    long = [f"{path.relative_to(ROOT)}: {name} has {n} lines" for path, name, n, most in found if n > most]
    assert_none(long, f"functions have more than {FUNCTION} lines, or kernels more than {KERNEL}")


def test_functions_have_few_parameters() -> None:
    """C++ functions have up to 12 parameters, including ops, which pass structs on."""
    assert list(cpp_parameters("int f(int a, int b) const {\n  g(1, 2, 3);\n}\nint h() {\n}\n")) == [("f", 2)]
    found = [(p, *function) for p in SOURCES if p.suffix != ".py" for function in cpp_parameters(p.read_text())]
    assert len(found) > 1000
    many = [f"{p.relative_to(ROOT)}: {name} has {n} parameters" for p, name, n in found if n > PARAMETERS]
    assert_none(many, f"functions have more than {PARAMETERS} parameters: make a struct of them")


def test_long_functions_are_found() -> None:
    """Long functions are found in both languages, including members and kernels."""
    body = "  x;\n" * 60
    assert [n for _, n, _ in python_functions("def f():\n" + "    x\n" * 60)] == [61]
    assert [n for _, n, _ in cpp_functions(f"int f(int x) {{\n{body}}}\n")] == [62]
    assert [
        n for _, n, _ in cpp_functions(f"struct S {{\n  int f() const {{\n{body.replace('  x', '    x')}  }}\n}};\n")
    ] == [62]
    assert [most for *_, most in cpp_functions(f"__global__ void f(\n    int x) {{\n{body}}}\n")] == [KERNEL]


def comments(text: str, mark: str) -> Iterator[str]:
    """First lines of comments."""
    lines = [line.partition(mark) for line in text.splitlines()]
    for before, line in zip([("", "", ""), *lines], lines, strict=False):
        if line[1] and not (before[1] and not before[0].strip()):
            yield line[2].lstrip(" :/<!")


def fragments(text: str, is_python: bool) -> list[str]:
    """First lines of comments and docstrings that begin as no sentence does."""
    docstrings = re.findall(r'^\s*r?"""([^"\n]+)', text, re.MULTILINE) if is_python else []
    return [line for line in [*comments(text, "#" if is_python else "//"), *docstrings] if FRAGMENT.match(line)]


def test_comments_are_sentences() -> None:
    """No comment or docstring begins with a word that leaves it without a subject and a verb."""
    it = "Of it."
    assert fragments(f"int x;  // {it}\n// {it}\n// {it}\nint y;  // of it\n", False) == [it, it]
    assert fragments(f'def f():\n    """{it}"""\n    x = 1  #: {it}\n', True) == [it, it]
    found = {str(p.relative_to(ROOT)): fragments(p.read_text(), p.suffix == ".py") for p in SOURCES}
    wrong = {name: lines for name, lines in found.items() if lines}
    assert_none(
        wrong, "comments or docstrings begin with a word that no sentence of ours begins with (CONTRIBUTING.md)"
    )


def test_the_package_stands_alone() -> None:
    """The package imports nothing that a wheel lacks, such as benchmarks, studies and tests."""
    outside = re.compile(r"^\s*(?:from|import) (?:bench|examples|first_light|python_tests|wheels)\b", re.MULTILINE)
    assert outside.search("    from bench.studies import compare\n")
    found = [p.name for p in (ROOT / "rec_kernels").rglob("*.py") if outside.search(p.read_text())]
    assert_none(found, "files of the package import what a wheel does not have")


def contracts() -> list[Path]:
    """Files that define ops: schemas and checks, in the folder of the header."""
    return [
        p for op_folder in OP_FOLDERS for p in sorted((CSRC / op_folder).glob("*.cpp")) if " define(m," in p.read_text()
    ]


def attributes(text: str) -> set[str]:
    """Attribute names in a Python file."""
    return {node.attr for node in ast.walk(parsed(text)) if isinstance(node, ast.Attribute)}


def test_older_compilers_trace_the_package() -> None:
    """The package avoids two functions that the Dynamo of torch 2.10 and 2.11 traces wrongly.

    There torch.compiler.is_exporting() is True in every torch.compile, and torch.amp.is_autocast_available() breaks
    graphs. rec_kernels/ops/tracing.py replaces the first.
    """
    wrong = {"is_exporting", "is_autocast_available"}
    assert attributes("import torch\nif torch.compiler.is_exporting():\n    f()\n") == {"compiler", "is_exporting"}
    found = [p for p in (ROOT / "rec_kernels").rglob("*.py") if wrong & attributes(p.read_text())]
    names = {path.relative_to(ROOT).as_posix() for path in found}
    assert_none(names - {"rec_kernels/ops/tracing.py"}, "files ask torch what older torch's compilers get wrong")


def test_one_stem_per_op() -> None:
    """A file of csrc that defines ops has its stem in every layer; on the CPU, its folder may have the stem."""
    files = contracts()
    assert len(files) > 10
    expected = [ROOT / layer.format(p.stem) for p in files for layer in LAYERS] + [p.with_suffix(".h") for p in files]
    expected += [p.parent / "cpu" / p.name for p in files if p.stem != p.parent.name]
    missing = [str(path.relative_to(ROOT)) for path in expected if not path.exists()]
    assert_none(missing, "files are missing: a file of csrc that calls define(m, ...) has its stem in each layer")


def test_kernels_are_of_a_stem() -> None:
    """Files that register kernels are in cpu or cuda, and begin with an op's stem unless their folder is an op's."""
    stems = tuple(p.stem for p in contracts())
    folders = [
        CSRC / op_folder for op_folder in OP_FOLDERS if op_folder != "core"
    ]  # core registers the libraries' versions and properties
    files = [
        p for op_folder in folders for p in op_folder.rglob("*.c*") if "STABLE_TORCH_LIBRARY_IMPL(" in p.read_text()
    ]
    assert len(files) > 20
    assert {p.parent.name for p in files} == {"cpu", "cuda"}
    strays = [p for p in files if not p.stem.startswith(stems) and p.parent.parent.name not in stems]
    assert_none(
        [str(p.relative_to(ROOT)) for p in strays],
        "files register kernels and begin with the stem of no file that calls define(m, ...), nor lie in its folder",
    )


def includes() -> dict[str, list[str]]:
    """Every file of csrc and the files of csrc that it includes, as paths in csrc."""
    texts = {str(p.relative_to(CSRC)): p.read_text() for p in SOURCES if p.is_relative_to(CSRC)}
    named = {name: re.findall(r'^#include "([^"]+)"', text, re.MULTILINE) for name, text in texts.items()}
    return {name: [header for header in found if header in texts] for name, found in named.items()}


def may_include(path: str, header: str) -> bool:
    """True if a file may include a header: from its backend or none, and from an earlier folder or its own.

    A backend may include the contract of any op.
    """
    op_folder, backend = path.split("/")[0], path.split("/")[1]
    other, others = header.split("/")[0], header.split("/")[1]
    if op_folder in ("host", "emulator"):
        return other in (op_folder, "core")
    if other not in OP_FOLDERS or (others in ("cpu", "cuda") and others != backend):
        return False
    is_contract = others not in ("cpu", "cuda") and op_folder not in ("core", "rows") and backend in ("cpu", "cuda")
    return is_contract or OP_FOLDERS.index(other) <= OP_FOLDERS.index(op_folder)


def test_includes_go_down() -> None:
    """Includes go from backends to contracts, rows and core; cpu and cuda never include each other."""
    assert may_include("dense/cpu/a.cpp", "jagged/cpu/b.h")
    assert may_include("embedding_bag/cpu/a.cpp", "row_cache/b.h")
    assert not may_include("embedding_bag/cpu/a.cpp", "row_cache/cpu/b.h")
    assert not may_include("embedding_bag/a.h", "row_cache/b.h")
    assert not may_include("jagged/cpu/a.cpp", "jagged/cuda/b.cuh")
    assert not may_include("rows/a.h", "rows/cpu/b.h")
    assert not may_include("rows/cpu/a.h", "jagged/b.h")
    assert not may_include("core/a.h", "rows/b.h")
    found = includes()
    assert len(found) > 150
    assert {name.split("/")[0] for name in found} == {*OP_FOLDERS, "emulator", "host", "portable"}
    up = {(name, header) for name, headers in found.items() for header in headers if not may_include(name, header)}
    assert {(name.rpartition("/")[0], header) for name, header in up} == EXCEPTIONS


def cycles(graph: dict[str, list[str]]) -> list[str]:
    """Chains of includes that return to their start."""
    found, done = [], set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        if name in above:
            found.append(" -> ".join((*above[above.index(name) :], name)))
        elif name not in done:
            for header in graph[name]:
                visit(header, (*above, name))
            done.add(name)

    for name in graph:
        visit(name, ())
    return found


def test_no_include_cycles() -> None:
    """#pragma once would hide a cycle, and its omissions would depend on the order of includes."""
    assert cycles({"a": ["b"], "b": ["c"], "c": ["b"]}) == ["b -> c -> b"]
    assert_none(cycles(includes()), "headers include each other")


def undefined(header: str, own: str) -> list[str]:
    """Names that a header declares at its left margin and its own file does not define."""
    declared = re.findall(r"^(?:[\w:<>,*&]+ )+[*&]?((?!__)\w+)\([^;{}]*\)(?: const)?;", header, re.MULTILINE)
    return [name for name in declared if not re.search(rf"\b{name}\([^;{{}}]*\)(?: const)? \{{", own)]


def test_headers_declare_their_own() -> None:
    """A function declared in a header of a cpu folder is defined in the file of its stem, or in its kernels."""
    assert undefined("int f(int x);\nvoid g();\n", "int f(int x) {\n}\nint h() { return g(); }\n") == ["g"]
    headers = sorted(CSRC.glob("*/cpu/*.h"))
    own = {
        h: "".join(f.read_text() for s in ("", "_kernels") if (f := h.with_name(f"{h.stem}{s}.cpp")).exists())
        for h in headers
    }
    assert len(headers) > 30
    assert_none(
        {str(h.relative_to(CSRC)): names for h in headers if (names := undefined(h.read_text(), own[h]))},
        "functions are declared in a header and defined neither in the .cpp nor in the _kernels.cpp of its stem",
    )
