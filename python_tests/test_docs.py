"""The documentation is true: its examples run, its commands and links exist, its generated parts are fresh."""

from __future__ import annotations

import importlib.util
import inspect
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest
import torch

from rec_kernels.ops.autograd import signature_of
from rec_kernels.ops.table_layout import Column, Flag, Size, table_layout

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md")),
]
OPS_PAGE = (ROOT / "docs" / "ops.md").read_text()
LAYOUTS_PAGE = (ROOT / "docs" / "layouts.md").read_text()


def python_blocks(page: str) -> list[str]:
    """The fenced python blocks of a page's text."""
    return re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


EXAMPLES = python_blocks((ROOT / "README.md").read_text())


def _load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_ops", ROOT / "docs" / "generate_ops.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generator = _load_generator()


def make_targets_named(text: str) -> set[str]:
    """The first word after every `make`, wherever it stands, and every further target of a command in code."""
    named = set(re.findall(r"\bmake +(?:[A-Z_]+=(?:\"[^\"]*\"|\S+) +)*([a-z][a-z-]*)", text))
    for code in re.findall(r"`(make [^`]+)`|^ {4}(make .+)$", text, re.MULTILINE):
        words = shlex.split("".join(code), comments=True)[1:]
        named |= {word for word in words if "=" not in word}
    return named


def makefile_targets() -> set[str]:
    """Targets that the Makefile has a rule for."""
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_readme_example_runs(number: int) -> None:
    """Each python block of README, by itself."""
    torch._dynamo.reset()
    exec(compile(EXAMPLES[number], f"README.md, example {number + 1}", "exec"), {"__name__": "example"})


def test_readme_examples_are_found() -> None:
    """No fenced python block escapes the test above; two of them are compiled as one graph."""
    text = (ROOT / "README.md").read_text()
    assert len(EXAMPLES) == text.count("```python") >= 2
    assert sum("fullgraph=True" in example for example in EXAMPLES) >= 2


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_make_targets_exist(page: str) -> None:
    """Every `make X` is a target; the verb, in prose, needs another word."""
    assert make_targets_named((ROOT / page).read_text()) <= makefile_targets()


def test_make_targets_are_found() -> None:
    """The search sees plain commands, variables and lists of targets."""
    assert {"train", "test", "bench", "wheel"} <= make_targets_named((ROOT / "README.md").read_text())
    assert make_targets_named('`make A=1 B="x y" one`\n    make two three  # why\nmake four') == {
        "one",
        "two",
        "three",
        "four",
    }


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    """Every relative link names a file or folder of the repository."""
    links = re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text())
    missing = [to for to in links if "://" not in to and not ((ROOT / page).parent / to.split("#")[0]).exists()]
    assert not missing


def test_generated_parts_are_fresh(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """`python docs/generate_ops.py --check` passes."""
    monkeypatch.setattr("sys.argv", ["generate_ops.py", "--check"])
    assert generator.main() == 0, capsys.readouterr().err


def test_generator_mends_what_is_stale() -> None:
    """A schema or a table that was changed by hand comes back as it was."""
    fresh = generator.generate(OPS_PAGE)
    schema = "bool sparse=False, str? format=None"
    for old, new in ((schema, schema.replace("False", "True")), ("| `scale_rows` | yes |", "| `scale_rows` | - |")):
        assert old in fresh
        assert generator.generate(fresh.replace(old, new)) == fresh


def test_generator_refuses_unknown_parts() -> None:
    """A block for an op that does not exist ends the program with its name."""
    with pytest.raises(SystemExit, match="schema nothing"):
        generator.generate("<!-- generated: schema nothing -->\n<!-- end generated -->")


def test_registrations_agree_with_torch() -> None:
    """The generator reads the schemas in csrc as the loaded CPU library has registered them."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    registered = {op for op in generator.op_names() if has_kernel(generator.NAMESPACE + op, "CPU")}
    assert generator.registrations()["CPU"] == registered


@pytest.mark.parametrize("op", generator.op_names())
def test_every_argument_is_explained(op: str) -> None:
    """The op has a heading or a line, and each argument and named result appears in the text outside the schemas."""
    prose = re.sub(r"```.*?```", "", OPS_PAGE, flags=re.DOTALL)
    heading = rf"^##+ {op.partition('.')[0]}$"
    assert f"`{op}`" in prose if op.startswith("_") else re.search(heading, prose, re.MULTILINE)
    schema = generator.schema(op)
    names = [a.name for a in schema.arguments] + [r.name for r in schema.returns if r.name and r.name != "output"]
    assert [name for name in names if f"`{name}`" not in prose] == []


@pytest.mark.parametrize("page", ["ops.md", "layouts.md"])
def test_examples_run(page: str) -> None:
    """The python blocks of a page, one after the other, as one program."""
    blocks = python_blocks((ROOT / "docs" / page).read_text())
    assert blocks
    names = {"__name__": "example"}
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"docs/{page}, block {number}", "exec"), names)


@pytest.mark.parametrize("op", [name for name in generator.op_names() if "layout" in signature_of(name)])
def test_every_layout_has_a_call(op: str) -> None:
    """Each op that takes a layout has a call in its own section of docs/ops.md that passes one."""
    name = op.partition(".")[0]
    section = re.split(r"^##+ ", OPS_PAGE.partition(f"# {name}\n")[2], flags=re.MULTILINE)[0]
    calls = "".join(python_blocks(section))
    assert re.search(rf"\bops\.{re.escape(op)}\(.*\*(layout|places)\b", calls)


@pytest.mark.parametrize("names", [Column, Size, Flag])
def test_layouts_are_described(names: type) -> None:
    """docs/layouts.md has a line for every column, size and flag, in their order."""
    heading = names.__name__.lower()
    table = re.search(rf"^\| {heading} \|.*\n\|-.*\n((?:\|.*\n)+)", LAYOUTS_PAGE, re.MULTILINE)[1]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [member.name for member in names]
    if names is Flag:
        assert re.findall(r"^\| `\w+` \| (\d+) \|", table, re.MULTILINE) == [str(int(flag)) for flag in names]


def test_arguments_of_layouts_are_described() -> None:
    """docs/layouts.md has a line for every optional argument of ``rk.table_layout``."""
    table = re.search(r"^\| argument \|.*\n\|-.*\n((?:\|.*\n)+)", LAYOUTS_PAGE, re.MULTILINE)[1]
    named = {name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    optional = [p.name for p in inspect.signature(table_layout).parameters.values() if p.kind == p.KEYWORD_ONLY]
    assert named == set(optional) - {"device"}
