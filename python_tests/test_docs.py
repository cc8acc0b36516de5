"""The documentation is true: examples run, commands and links exist, generated parts are up to date."""

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


def halves(page: str) -> list[tuple[str, str]]:
    """The programs before and after each fenced diff block of a page's text."""
    blocks = [block.splitlines(keepends=True) for block in re.findall(r"^```diff\n(.*?)^```$", page, re.M | re.DOTALL)]
    return [tuple("".join(line[1:] or line for line in block if line[0] != new) for new in "+-") for block in blocks]


CHANGES = halves((ROOT / "README.md").read_text())


def _load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_ops", ROOT / "docs" / "generate_ops.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generator = _load_generator()


def make_targets_named(text: str) -> set[str]:
    """The first word after every `make`, and further targets of commands in code."""
    named = set(re.findall(r"\bmake +(?:[A-Z_]+=(?:\"[^\"]*\"|\S+) +)*([a-z][a-z-]*)", text))
    for code in re.findall(r"`(make [^`]+)`|^ {4}(make .+)$", text, re.MULTILINE):
        words = shlex.split("".join(code), comments=True)[1:]
        named |= {word for word in words if "=" not in word}
    return named


def makefile_targets() -> set[str]:
    """Targets of the Makefile."""
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("number", range(len(CHANGES)))
def test_readme_changes_keep_the_losses(number: int) -> None:
    """Both sides of each diff of README run and have equal losses, to the bit or up to rounding as promised."""
    before, after = CHANGES[number]
    if "torchrec" in before:
        pytest.importorskip("torchrec")
    theirs, ours = {}, {}
    exec(compile(before, f"README.md, before {number + 1}", "exec"), theirs)
    exec(compile(after, f"README.md, after {number + 1}", "exec"), ours)
    assert theirs["losses"][0] > theirs["losses"][-1]
    assert ours["losses"] == (theirs["losses"] if "torchrec" in before else pytest.approx(theirs["losses"], rel=1e-6))


def test_readme_changes_are_found() -> None:
    """README's code consists of two diffs with changes."""
    text = (ROOT / "README.md").read_text()
    assert len(CHANGES) == text.count("```") // 2 == 2
    assert halves("```diff\n a\n-b\n+c\n```\n") == [("a\nb\n", "a\nc\n")]
    assert all(before != after and "rec_kernels" in after for before, after in CHANGES)


def test_readme_is_short() -> None:
    """README has at most 120 lines."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.mark.parametrize("page", PAGES)
def test_lines_are_short(page: str) -> None:
    """Lines of prose have at most 140 characters; tables, code, pictures and generated parts may be wider."""
    text = re.sub(r"<!-- generated.*?<!-- end generated -->", "", (ROOT / page).read_text(), flags=re.DOTALL)
    assert [line for line in text.splitlines() if len(line) > 140 and not re.match(r" *\||    |!\[", line)] == []


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_make_targets_exist(page: str) -> None:
    """Every `make X` is a target; in prose, use another verb."""
    assert make_targets_named((ROOT / page).read_text()) <= makefile_targets()


def test_make_targets_are_found() -> None:
    """The search finds plain commands, variables and lists of targets."""
    assert {"train", "test", "wheel"} <= make_targets_named((ROOT / "README.md").read_text())
    assert make_targets_named('`make A=1 B="x y" one`\n    make two three  # why\nmake four') == {
        "one",
        "two",
        "three",
        "four",
    }


def test_benchmarks_exist() -> None:
    """Every `python -m bench.X` exists or its line names a commit that has it; every result is linked."""
    pages = "\n".join((ROOT / page).read_text() for page in PAGES)
    here = "\n".join(line for line in pages.splitlines() if not re.search(r"\| [0-9a-f]{8} \|$", line))
    named = set(re.findall(r"python -m (bench(?:\.\w+)*)", here))
    assert len(named) > 5
    files = (ROOT / name.replace(".", "/") for name in named)
    assert not [file for file in files if not (file.with_suffix(".py").exists() or (file / "__main__.py").exists())]
    results = {path.name for path in (ROOT / "bench" / "results").glob("*.json")}
    assert results - set(re.findall(r"bench/results/([\w-]+\.json)", pages)) == set()


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    """Every relative link leads to a file or folder of the repository."""
    links = re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text())
    missing = [to for to in links if "://" not in to and not ((ROOT / page).parent / to.split("#")[0]).exists()]
    assert not missing


def test_the_path_of_an_id_names_existing_functions() -> None:
    """Each function in CONTRIBUTING.md's table is in the file of its line, or in a file that the line names."""
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## The path of an id")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| `([^`]+)` \| (.+) \|$", section, re.MULTILINE)
    assert len(lines) > 10
    for file, text in lines:
        neighbours = [(ROOT / file).parent / name for name in re.findall(r"`(\w+\.(?:h|py))`", text)]
        code = "".join(path.read_text() for path in [ROOT / file, *neighbours])
        assert [name for name in re.findall(r"`(\w+)`", text) if name not in code] == [], file


def slugs(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    found, counts = set(), {}
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        slug = (
            re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()).strip().replace(" ", "-")
        )
        counts[slug] = counts.get(slug, -1) + 1
        found.add(f"{slug}-{counts[slug]}" if counts[slug] else slug)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_headings(page: str) -> None:
    """Every link with an anchor leads to a heading of its page."""
    links = re.findall(r"\]\(([^)\s#]*)#([^)\s]+)\)", (ROOT / page).read_text())
    here = [(ROOT / page).parent / to if to else ROOT / page for to, _ in links if "://" not in to]
    wrong = [anchor for path, (_, anchor) in zip(here, links, strict=True) if anchor not in slugs(path.read_text())]
    assert not wrong


def test_slugs_are_githubs() -> None:
    """Slugs drop punctuation, replace spaces by dashes, number repeated headings and ignore code."""
    text = "# A `b_c`, d\n## A b_c d\n```\n# no\n```\n### What's [new](x.md)?\n"
    assert slugs(text) == {"a-b_c-d", "a-b_c-d-1", "whats-new"}


def test_generated_parts_are_fresh(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """`python docs/generate_ops.py --check` passes."""
    monkeypatch.setattr("sys.argv", ["generate_ops.py", "--check"])
    assert generator.main() == 0, capsys.readouterr().err


def test_pictures_are_fresh(tmp_path: Path) -> None:
    """README's pictures equal the output of `python -m bench.pictures`."""
    pytest.importorskip("matplotlib")
    from bench import pictures

    for drawn in pictures.draw(tmp_path):
        texts = [re.findall(r"<text[^>]*>([^<]+)</text>", p.read_text()) for p in (drawn, pictures.IMAGES / drawn.name)]
        assert len(texts[0]) > 8
        assert texts[0] == texts[1]


def test_readme_has_the_pictures_numbers() -> None:
    """README's range of training steps is that of the files of its picture."""
    pytest.importorskip("matplotlib")
    from bench.pictures import times_over_ours

    peers = ("torch", "fbgemm", "fbgemm, huge pages")
    torch_, fbgemm, huge = (times_over_ours("train", peer).values() for peer in peers)
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"{min(torch_):.1f} to {max(torch_):.0f} times as fast as that of `nn.EmbeddingBag`" in text
    assert f"and {min(fbgemm):.2f} to {max(fbgemm):.1f} times as fast as FBGEMM's" in text
    assert f"its steps take {min(huge):.2f} to {max(huge):.1f} times as long" in text


def test_generator_mends_what_is_stale() -> None:
    """A manually edited schema or table is regenerated."""
    fresh = generator.generate(OPS_PAGE)
    schema = "bool sparse=False, str? format=None"
    for old, new in ((schema, schema.replace("False", "True")), ("| `scale_rows` | yes |", "| `scale_rows` | - |")):
        assert old in fresh
        assert generator.generate(fresh.replace(old, new)) == fresh


def test_generator_refuses_unknown_parts() -> None:
    """A block for an unknown op ends the program with its name."""
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


@pytest.mark.parametrize("page", ["ops.md", "layouts.md", "robustness.md", "tuning.md"])
def test_examples_run(page: str) -> None:
    """The python blocks of a page run as one program."""
    blocks = python_blocks((ROOT / "docs" / page).read_text())
    assert blocks
    names = {"__name__": "example"}
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"docs/{page}, block {number}", "exec"), names)


@pytest.mark.parametrize("op", [name for name in generator.op_names() if "layout" in signature_of(name)])
def test_every_layout_has_a_call(op: str) -> None:
    """Each op with a layout has a call with one in its section of docs/ops.md."""
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
