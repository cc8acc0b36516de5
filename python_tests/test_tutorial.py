"""docs/tutorial.md: its code runs in order, and its statements about bytes and quality are true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = (DOCS / "tutorial.md").read_text()
FEW_LINES, TRAINING, SIZES = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
SAID = re.search(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[1]
LARGE, SMALL = "ROWS = 1 << 24", "ROWS = 1 << 14"


def _run(code: str, names: dict) -> dict:
    exec(compile(code, "docs/tutorial.md", "exec"), names)
    return names


@pytest.fixture
def names() -> dict:
    """Variables of the tutorial's five lines, with a smaller table."""
    assert LARGE in FEW_LINES
    return _run(FEW_LINES.replace(LARGE, SMALL), {"__name__": "tutorial"})


def test_five_lines_are_five() -> None:
    """The code has the five lines of the title."""
    assert len([line for line in FEW_LINES.splitlines() if line]) == 5


def test_the_table_is_a_tenth(names: dict, capsys: pytest.CaptureFixture) -> None:
    """Allocated weights and state agree with the report, and are at most a tenth of float32's."""
    state = names["items"].state_dict()
    kept = sum(t.nbytes for name, t in state.items() if name.endswith((".weight", ".sum")))
    report = names["items"].memory_report()
    assert kept == sum(table["weight_bytes"] + table["state_bytes"] for table in report)
    _run(SIZES, names)
    assert kept * 10 <= names["megabytes"]() * 1e6


def test_it_trains(names: dict) -> None:
    """The loss falls from that of a coin flip to less than a third of it."""
    losses = _run(TRAINING, names)["losses"]
    assert losses[-1] < losses[0] / 3


def test_sizes_are_those_of_the_page(names: dict, capsys: pytest.CaptureFixture) -> None:
    """The page's sizes are those of the full, unallocated tables; its text has the first and the last."""
    _run(SIZES, names | {"ROWS": 1 << 24})
    assert capsys.readouterr().out == SAID
    sizes = [int(size.replace(",", "")) for size in re.findall(r"([\d,]+) MB$", SAID, re.MULTILINE)]
    assert f"{sizes[0] / 1000:.1f} GB" in PAGE
    assert f"takes {sizes[-1]} MB" in PAGE
    assert sizes[-1] <= 400


def test_quality_is_from_the_results() -> None:
    """Every difference and interval of the page is in docs/quality.md."""
    differences = set(re.findall(r"[+-]0\.\d{5}", PAGE))
    assert len(differences) > 15
    assert {number for number in differences if number not in (DOCS / "quality.md").read_text()} == set()
