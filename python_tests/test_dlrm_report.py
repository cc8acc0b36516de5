"""The report of a run: a self-contained page made from its records."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from rec_kernels.dlrm import report

VOID = {"meta", "img"}
SECONDS = {"data": 1.0, "forward": 3.0, "backward": 4.0, "optimizer": 1.0, "evaluation": 10.0, "other": 1.0}


def train_record(step: int, **changes) -> dict:
    record = {"kind": "train", "epoch": 0, "step": step, "steps": 10, "loss": 1 / step, "auc": 0.5 + step / 100}
    return record | {"examples": 1000, "examples_per_second": 100.0, "seconds": SECONDS, "lr": 0.05} | changes


def eval_record(step: int, **changes) -> dict:
    return {"kind": "eval", "split": "valid", "step": step, "auc": 0.6, "log_loss": 0.6} | changes


def table(name: str, rows: int, *, state: bool = True) -> dict:
    sizes = {"weight_bytes": rows * 64, "state_bytes": rows * 4 * state}
    return {"name": name, "num_embeddings": rows, "embedding_dim": 16, "format": "fp32"} | sizes


def test_record(**changes) -> dict:
    record = {"kind": "test", "auc": 0.8765, "log_loss": 0.4321, "normalized_entropy": 0.7, "calibration": 1.01}
    record |= {"accuracy": 0.77, "base_rate": 0.5, "examples": 1234, "step": 30, "stopped_early": False}
    record |= {"train_examples": 3000, "train_seconds": 2.5, "examples_per_second": 1200.0, "dense_parameters": 4321}
    record |= {"flops_per_example": 98765, "device": "cpu", "machines": [], "tiers": {}}
    return record | {"peak_memory_bytes": 2**30, "tables": [table("small", 10), table("large", 990)]} | changes


test_record.__test__ = False  # not a test
CURVE = [train_record(step) for step in (10, 20, 30)]


class Page(HTMLParser):
    """Texts, tags and attributes of a page; fails if tags do not match."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.elements: list[tuple[str, dict]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.texts.append(data)

    def text(self) -> str:
        return "|".join(self.texts)


@pytest.fixture
def write(tmp_path):
    def written(records: list[dict], *, name: str = "run", **options) -> Page:
        directory = tmp_path / name
        directory.mkdir()
        config = {"lr": 0.05, "weeks": None, "bottom": [64], "model": "dlrm"} | options
        settings = {"config": config, "versions": {"torch": "9.9"}}
        (directory / "config.json").write_text(json.dumps(settings))
        (directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        report.write(directory)
        return Page((directory / "report.html").read_text(encoding="utf-8"))

    return written


def pictures(page: Page) -> list[str]:
    """The alt text of the page's embedded SVG, if any."""
    alts = []
    for tag, attributes in page.elements:
        if tag == "img":
            kind, data = attributes["src"].split(",")
            assert kind == "data:image/svg+xml;base64"
            svg = ElementTree.fromstring(base64.b64decode(data))
            references = [value for e in svg.iter() for key, value in e.attrib.items() if key.endswith("href")]
            assert references
            assert all(value.startswith("#") for value in references)
            alts.append(attributes["alt"])
    return alts


def test_page_of_a_finished_run(write):
    page = write([*CURVE[:2], eval_record(20), CURVE[2], test_record()], lr=0.1)
    assert report.STILL_LEARNING in page.text()
    for text in ("0.8765", "0.4321", "1,234", "4,321 parameters; 98,765 FLOPs", "after 30 steps on 3,000 rows", "9.9"):
        assert text in page.text()
    assert pictures(page) == ["log loss [nats], AUC over the rows trained on"]
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in page.elements
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "link", "iframe", "object"}
    loaded = [v for _, a in page.elements for k, v in a.items() if k in ("src", "href", "srcset")]
    assert all(value.startswith("data:") for value in loaded)
    assert sum(a.get("class") == "scroll" for _, a in page.elements) == sum(tag == "table" for tag, _ in page.elements)


def test_every_text_is_escaped(write):
    evil = "<script>alert(1)</script>&\"'"
    page = write([*CURVE, test_record(tables=[table(evil, 5)])], name="a<b>&c", path=evil)
    assert {tag for tag, _ in page.elements} & {"script", "b"} == set()
    assert page.texts.count(evil) == 2
    assert "a<b>&c" in page.texts
    assert evil in write([{"kind": "failed", "step": 3, "error": evil}], name="failed").text()


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([], "no test yet; the last record is of step 0"),
        (CURVE[:2], "no test yet; the last record is of step 20"),
        ([*CURVE[:2], eval_record(25)], "no test yet; the last record is of step 25"),
        ([eval_record(1)], "no test yet; the last record is of step 1"),
        (
            [CURVE[0], {"kind": "failed", "step": 11, "error": "loss is nan at step 11"}],
            "Failed: loss is nan at step 11",
        ),
    ],
)
def test_page_of_a_run_that_did_not_finish(write, records, expected):
    page = write(records)
    assert expected in page.text()
    assert "Memory" not in page.texts
    trained = any(record["kind"] == "train" for record in records)
    assert ("last training AUC" in page.texts) == ("Time" in page.texts) == bool(pictures(page)) == trained


def test_scores_that_are_not_defined_are_dashes(write):
    nothing = {"auc": None, "normalized_entropy": None, "calibration": None}
    page = write([train_record(10, auc=None), eval_record(10, **nothing), test_record(**nothing)])
    texts = page.texts
    assert [texts[texts.index(label) + 1] for label in ("test AUC", "normalized entropy", "calibration")] == ["-"] * 3
    assert len(pictures(page)) == 1


def axes_of(records: list[dict]) -> list:
    return report.draw(records).axes


def test_learning_rate_is_drawn_if_it_changes(write):
    rising = [train_record(step, lr=step / 100) for step in (10, 20)]
    assert pictures(write(rising))[0].endswith("AUC, learning rate of the tables over the rows trained on")
    assert axes_of(rising)[-1].lines[0].get_xydata().tolist() == [[1000, 0.1], [2000, 0.2]]


def test_curves_put_evaluations_and_the_test_where_they_were():
    records = [*CURVE, eval_record(15), eval_record(30, log_loss=0.5), test_record()]
    loss, auc = axes_of(records)
    curve, evaluations, _, test = (line.get_xydata().tolist() for line in loss.lines)
    assert curve == [[1000, 0.1], [2000, 0.05], [3000, 1 / 30]]
    assert evaluations == [[1500, 0.6], [3000, 0.5]]
    assert test == [[3000, 0.4321]]
    assert auc.lines[-1].get_xydata().tolist() == [[3000, 0.8765]]
    assert [text.get_text() for text in loss.get_legend().get_texts()][1:] == [
        "on the held-out rows",
        "test, model frozen: 0.4321",
    ]


def test_time_of_the_parts_and_outside_the_model(write):
    texts = write([*CURVE, test_record()]).texts
    shares = {part: texts[texts.index(part) + 1 :][:2] for part in SECONDS}
    assert shares["evaluation"] == ["30.00", "50.0%"]
    assert shares["backward"] == ["12.00", "20.0%"]
    # 2 of the 10 seconds that are not evaluation
    assert any("Outside the model (data, other): 20.0%" in text for text in texts)


def test_memory_is_sorted_and_summed(write):
    tables = [table("small", 10), table("large", 980, state=False), table("middle", 100)]
    texts = write([*CURVE, test_record(tables=tables)]).texts
    start = texts.index("share", texts.index("Memory")) + 1
    total, large = texts[start : start + 5], texts[start + 5 : start + 12]
    assert total == ["total", "1,090", f"{(1090 * 64) / 1024:,.1f}", f"{440 / 1024:,.1f}", "100.0%"]
    assert large == ["large", "980", "16", "fp32", "61.2", "0.0", f"{980 * 64 / (1090 * 64 + 440):.1%}"]
    assert texts.index("large") < texts.index("middle") < texts.index("small")


def test_options_that_are_not_at_their_default_come_first(write):
    page = write(CURVE, weeks=4, bottom=[32, 16], threads=None, lr=0.05)
    start = page.texts.index("default") + 1
    assert page.texts[start : start + 6] == ["weeks", "4", "-", "bottom", "32,16", "64"]
    assert page.texts[start + 6 : start + 9] == ["lr", "0.05", "0.05"]
    assert any(text.startswith("2 of 5 options differ from their default") for text in page.texts)
    assert sum(attributes.get("class") == "strong" for _, attributes in page.elements) == 3  # and the total time


def test_page_is_the_same_every_time(tmp_path, write):
    write([*CURVE, test_record()])
    before = (tmp_path / "run" / "report.html").read_bytes()
    report.write(tmp_path / "run")
    assert (tmp_path / "run" / "report.html").read_bytes() == before


def test_summary_names_all_tables_and_scores():
    text = report.summary(test_record(auc=None))
    assert re.search(r"^total +1,000 +62\.5 +3\.9 +100\.0%$", text, re.MULTILINE)
    assert re.search(r"^test AUC +-$", text, re.MULTILINE)
    assert "1,234, 50.0% positive" in text
    assert "3,000 rows in 2.5 s, 1,200 examples/s" in text
    assert "1,024 MiB" in text


def test_a_run_without_config_is_refused(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        report.write(tmp_path)
