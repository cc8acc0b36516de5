"""Invalid files in a run's folder: a one-line error names the file, the value and what is allowed."""

from __future__ import annotations

import copy
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from dlrm_stops import stopped_run
from dlrm_tiny import TinyData

from bench.studies import compare
from rec_kernels.dlrm import TrainConfig, checkpoint, report, train
from rec_kernels.dlrm.__main__ import main
from rec_kernels.dlrm.data import DataError
from rec_kernels.dlrm.runs import PARTS, Records

pytestmark = pytest.mark.usefixtures("no_pictures")
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture
def run(stopped, tmp_path):
    return Path(shutil.copytree(stopped, tmp_path / "run"))


def error_of(capsys, *command) -> str:
    """The command's error message, which must be one line."""
    assert main(list(command)) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    return line


def resumed(run, capsys) -> str:
    return error_of(capsys, "train", "--resume", str(run), "--data", "dlrm_tiny:tiny")


CHECKPOINTS = [
    *(
        ("step", value, f"step is {shown}, allowed is a whole number from 0 to 8")
        for value, shown in (
            (math.nan, "nan"),
            (-1, "-1"),
            ("two", "'two'"),
            (torch.tensor(2), "tensor(2)"),
            (10**30, "1000000000000000000000000000000"),
            (True, "True"),
            (9, "9"),
        )
    ),
    ("seconds", math.nan, "seconds is nan, allowed is a number from 0 to"),
    ("worse", "none", "worse is 'none', allowed is a whole number"),
    ("stopped_early", 1, "stopped_early is 1, allowed is true or false"),
    ("records", -1, "records is -1, allowed is a whole number"),
    ("machines", [{"cpu": 1}], "machines[0]['cpu'] is 1, allowed is a text"),
    ("window/steps", -1, "window['steps'] is -1, allowed is a whole number"),
    ("window/seconds/data", "x", "window['seconds']['data'] is 'x', allowed is a number"),
    ("window", {}, "window has no 'steps'"),
    *(
        (
            "window",
            {"steps": 2, "seconds": dict.fromkeys(PARTS, 0.0), **floats},
            "window does not have a logit and a label",
        )
        for floats in ({}, {"logits": torch.zeros(2)}, {"logits": torch.zeros(2), "labels": torch.zeros(3)})
    ),
    ("data/rows/train", torch.zeros(2), "does not fit the run: Boolean value of Tensor with more than one value"),
    ("data/rows/train", 3, "was written with other data, {"),
    ("options", 3, "options is 3, allowed is an object"),
    ("options/lr", torch.zeros(2), "does not fit the run: Boolean value of Tensor with more than one value"),
    ("model", [], "model is [], allowed is an object"),
    (
        "model/embeddings.file_generation",
        torch.tensor(-1),
        "file_generation is tensor(-1), allowed is an int64 of 0 or",
    ),
    ("model/embeddings.step", torch.tensor(math.nan), "embeddings.step must be a whole number, at least 0"),
    ("dense_optimizer/state/0", [], "the optimizer's state is not float32 tensors"),
    # Fused kernels would read and write beyond its end.
    ("dense_optimizer/state/0/exp_avg", torch.zeros(1), "the optimizer's state is not float32 tensors"),
    ("dense_optimizer/state/0/exp_avg_sq", torch.zeros(1).expand(64, 2), "the optimizer's state is not float32"),
    ("dense_optimizer/param_groups/0/eps", "x", "the optimizer has other options"),
]


@pytest.mark.parametrize(("path", "value", "message"), CHECKPOINTS, ids=[f"{c[0]}={c[1]!r}"[:40] for c in CHECKPOINTS])
def test_checkpoints(path, value, message, run, capsys):
    state = inner = copy.deepcopy(checkpoint.load(run))
    *before, last = (int(part) if part == "0" else part for part in path.split("/"))
    for part in before:
        inner = inner[part]
    inner[last] = value
    checkpoint.save(run, state)
    line = resumed(run, capsys)
    assert line.startswith(f"error: {run / checkpoint.NAME} ")
    assert message in line


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"seed": 2**70}, "seed is 1180591620717411303424, allowed is 0 or more, below 2**64"),
        ({"seed": 1.5}, "seed is 1.5, must be a whole number (0 or more, below 2**64)"),
        ({"seed": True}, "seed is True, must be a whole number"),
        ({"epochs": None}, "epochs is None, must be a whole number"),
        ({"lr": "fast"}, "lr is 'fast', must be a number (a finite number above 0, as float32)"),
        ({"lr": 10**400}, "lr is 1"),
        ({"bottom": [64, "x"]}, "bottom is (64, 'x'), must be whole numbers"),
        ({"run": 3}, "run is 3, must be a text"),
        ([], "config is [], must be an object"),
    ],
)
def test_configs(config, message, run, capsys):
    settings = json.loads((run / "config.json").read_text())
    settings["config"] = settings["config"] | config if isinstance(config, dict) else config
    (run / "config.json").write_text(json.dumps(settings))
    line = resumed(run, capsys)
    assert f"{run / 'config.json'} is not the config of a run: " in line
    assert message in line


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", DEEP, '{"config": ' + DEEP + "}", b"\xff"],
    ids=["empty", "a list", "half", "deep", "a deep config", "no UTF-8"],
)
def test_configs_that_are_none(text, run, capsys):
    (run / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert f"{run / 'config.json'} is not the config of a run: " in resumed(run, capsys)


def changed_record(line: str, **changes) -> str:
    return json.dumps(json.loads(line) | changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda line: line[: len(line) // 2], "is not JSON"),
        (lambda line: DEEP, "is not JSON"),
        (lambda line: "[]", "is not a record: its kind is None, allowed are train, eval, failed, test"),
        (lambda line: changed_record(line, kind="more"), "is not a record: its kind is 'more', allowed are"),
        (
            lambda line: changed_record(line, examples="many"),
            "is not a record: examples is 'many', allowed is a whole number",
        ),
        (lambda line: changed_record(line, seconds={}), "is not a record: seconds has no 'data'"),
        (lambda line: changed_record(line, loss="low"), "is not a record: loss is 'low', allowed is a number"),
        (lambda line: '{"kind": "train"}', "is not a record: it has no 'step'"),
        (lambda line: '{"kind": "eval", "step": 1}', "is not a record: it has no 'split'"),
        (lambda line: '{"kind": "failed", "error": "x"}', "is not a record: it has no 'step'"),
    ],
)
def test_records(change, message, run, capsys):
    """Invalid records are rejected before the run resumes, and before any of their bytes are dropped."""
    first, second, *more = (run / "metrics.jsonl").read_text().splitlines()
    lines = [first, change(second), *more]
    text = "\n".join(lines) + "\n"
    checkpoint.save(run, checkpoint.load(run) | {"records": len(text)})
    text += first + "\n"  # of steps after the checkpoint
    (run / "metrics.jsonl").write_text(text)
    line = resumed(run, capsys)
    assert f"error: {run / 'metrics.jsonl'}, line 2 {message}" in line
    assert (run / "metrics.jsonl").read_text() == text


def test_positions_between_records(run, capsys):
    """The next record would be appended to half a line."""
    state, before = checkpoint.load(run), (run / "metrics.jsonl").read_bytes()
    checkpoint.save(run, state | {"records": state["records"] - 40})
    line = resumed(run, capsys)
    assert f"records is {state['records'] - 40}, which is not the end of a line of {run / 'metrics.jsonl'}" in line
    assert (run / "metrics.jsonl").read_bytes() == before


def test_reports_of_other_records(run):
    records = Records(run).read()
    (run / "metrics.jsonl").write_text(json.dumps({k: v for k, v in records[0].items() if k != "loss"}) + "\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 1 is not a record: it has no 'loss'"):
        report.write(run)
    (run / "metrics.jsonl").write_text(json.dumps(records[0] | {"seconds": dict.fromkeys(PARTS, 0)}) + "\n")
    with pytest.raises(DataError, match=r"config\.json or metrics\.jsonl of .*run is not what a run writes: ZeroDiv"):
        report.write(run)


@pytest.mark.parametrize("error", [DataError("no numbers"), OSError("disk is full")])
def test_reports_that_fail_take_the_place_of_no_outcome(error, run, tmp_path, monkeypatch):
    def write(directory):
        raise error

    monkeypatch.setattr(report, "write", write)
    with pytest.warns(UserWarning, match=f"the report of .* could not be written: {error}"):
        assert train(TrainConfig.read(run), TinyData(), resume=run, progress=False)["step"] == 8
    with pytest.warns(UserWarning, match="the report of .* could not be written"):
        stopped_run(tmp_path / "other")  # RunInterruptedError


def test_reports_of_paths_that_are_no_text(run):
    settings = json.loads((run / "config.json").read_text())
    settings["config"]["data_dir"] = "\udcff"
    (run / "config.json").write_text(json.dumps(settings))
    report.write(run)
    assert "data_dir" in (run / "report.html").read_text()


def test_comparisons_delete_no_run_that_is_not_understood(tmp_path):
    base = TrainConfig(data="dlrm_tiny:tiny", batch_size=200, runs_dir=str(tmp_path))
    plan = compare.plan(["a", "b:lr=0.1"], base, "1", "both")
    first = compare.run(plan)
    run, elsewhere = plan.folder / "b-seed0", tmp_path / "checkpoint"
    before = (run / "metrics.jsonl").read_text()
    (run / checkpoint.NAME).rename(elsewhere)
    (run / "metrics.jsonl").write_text(before + '{"kind": "test"}\n')
    with pytest.raises(DataError, match=r"line \d is not a record: .*; there is no checkpoint\.pt, so delete"):
        compare.run(plan)
    (run / checkpoint.NAME).symlink_to(tmp_path / "unmounted")
    with pytest.raises(DataError, match=r"b-seed0 has no checkpoint\.pt: nothing to resume from"):
        compare.run(plan)
    assert (run / "metrics.jsonl").read_text() == before + '{"kind": "test"}\n'
    (run / checkpoint.NAME).unlink()
    elsewhere.rename(run / checkpoint.NAME)  # of before the test, which is repeated
    assert compare.run(plan)["b"][0]["auc"] == first["b"][0]["auc"]


def test_seeds_of_comparisons_have_a_limit():
    for seed in (2**64, 2**70):
        with pytest.raises(ValueError, match=r"below 2\*\*64"):
            compare.parse_seeds(f"1,{seed}")
    assert compare.parse_seeds(f"1,{2**64 - 1}")[1] == TrainConfig(seed=2**64 - 1).seed
