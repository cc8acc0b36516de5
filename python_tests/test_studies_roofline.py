"""Costs of a trainer's step at the machine's limits."""

from __future__ import annotations

import itertools
import json
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from dlrm_cases import OPTIONS

from bench.studies import roofline
from bench.studies.__main__ import main
from rec_kernels.dlrm import Batch, TrainConfig, train
from rec_kernels.dlrm.config import MODELS
from rec_kernels.dlrm.reader import dedup_batch
from rec_kernels.dlrm.synthetic import HISTORY, Synthetic
from rec_kernels.dlrm.train import build_model

pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("format", ["fp32", "int8"])
def test_costs(format: str, once: bool, data: Synthetic, batch: Batch) -> None:
    """Costs of a model without hidden layers are counted by hand."""
    config = TrainConfig(**OPTIONS | {"bottom": (), "top": (), "format": format, "dedup": "on" if once else "off"})
    model = build_model(config, data)
    given = dedup_batch(batch) if once else batch
    found = roofline.costs(model, [given], 1000)
    row = {"fp32": 4 * 4, "int8": 4 + 8}[format]
    bags = {name: batch.features[name].values() for name in batch.features.keys()}  # noqa: SIM118
    bags[HISTORY] = given.shared.unique(HISTORY).values() if once else batch.shared.values()
    read = sum(ids.numel() * (ids.element_size() + row) for ids in bags.values())
    changed = sum(len(ids.unique()) * (row + 4) for ids in bags.values())
    features, inputs = len(data.features), data.num_dense
    pairs = (features + 1) * features // 2
    pooled, weights = 500 * features * 4 * 4, 4 * ((inputs + 1) * 4 + 4 + pairs + 1)
    # The bottom's product and ReLU, the interaction, the top's product.
    layers = 4 * 500 * ((inputs + 4) + (4 + 4) + (4 * (features + 1) + 4 + pairs) + (4 + pairs + 1)) + weights
    assert found["forward"] == {"bytes": read + pooled + layers, "flops": 500_000}
    assert found["backward"] == {"bytes": pooled + 2 * changed + 2 * layers, "flops": 1_000_000}
    assert found["optimizer"] == {"bytes": 7 * weights, "flops": 0}


def test_every_operation_counts(data: Synthetic, batch: Batch) -> None:
    """More of each kind of operation move more bytes."""
    of = {m: roofline.costs(build_model(TrainConfig(**OPTIONS, model=m), data), [batch], 1) for m in MODELS}
    assert of["dlrm"]["forward"]["bytes"] < of["dcnv2"]["forward"]["bytes"] < of["wukong"]["forward"]["bytes"]


def test_limits() -> None:
    found = roofline.limits(torch.get_num_threads(), torch.float32)
    assert found["bytes_per_second"] > 1e8
    assert found["flops_per_second"] > 1e8
    assert roofline.limits(torch.get_num_threads(), torch.float32) is found


def test_costs_of_several_batches(data: Synthetic) -> None:
    """Equal batches move rows and state once, accumulate the layers' gradients, and repeat all else."""
    model = build_model(TrainConfig(**OPTIONS), data)
    first, second = islice(data.batches("train", 500), 2)
    one, twice = (roofline.costs(model, step, 1000) for step in ([first], [first, first]))
    features = first.joined().features
    changed = sum(len(features[f.name].values().unique()) * (4 * 4 + 4) for f in data.features)
    weights = 4 * sum(p.numel() for p in model.dense_parameters())
    assert twice["forward"] == {key: 2 * count for key, count in one["forward"].items()}
    assert twice["backward"]["bytes"] == 2 * one["backward"]["bytes"] - 2 * changed + 3 * weights
    assert twice["backward"]["flops"] == 2 * one["backward"]["flops"]
    assert twice["optimizer"] == one["optimizer"]
    other = roofline.costs(model, [first, second], 1000)
    assert other["backward"]["bytes"] > twice["backward"]["bytes"]


def test_limits_are_of_the_precision(data: Synthetic, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 products are compared with a bfloat16 product's limit; limits of bytes are equal."""
    rates = {torch.float32: 1.0, torch.bfloat16: 0.25}
    monkeypatch.setattr(
        roofline, "limits", lambda threads, dtype: {"bytes_per_second": 1e30, "flops_per_second": rates[dtype]}
    )
    seconds = {"examples": 500, "seconds": dict.fromkeys(("forward", "backward", "optimizer"), 1.0)}
    for precision, least in (("fp32", 500_000), ("bf16", 2_000_000)):
        model = build_model(TrainConfig(**OPTIONS, precision=precision), data)
        profile = roofline.beside_limits(model, [batch], [seconds], 1000)
        assert profile["precision"] == precision
        assert profile["parts"]["forward"]["least_seconds"] == pytest.approx(least)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_profile_of_a_run(accumulate: int, data: Synthetic, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The profile uses a run's files and the curve's times; nothing in the run's folder changes."""
    options = {"runs_dir": str(tmp_path), "run": "run", "cache": 0.1, "accumulate": accumulate}
    test = train(TrainConfig(**OPTIONS | options), data, progress=False)
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    profile, records = roofline.profile(tmp_path / "run"), (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert profile["rows"] == 500
    seconds = sum(json.loads(line)["seconds"]["backward"] for line in records[:-1])
    assert profile["parts"]["backward"]["seconds"] == pytest.approx(seconds / (data.num_rows("train") / 500))
    assert profile["parts"]["optimizer"]["bytes"] == 7 * 4 * test["dense_parameters"] // accumulate
    for part in profile["parts"].values():
        assert part["of_roofline"] == pytest.approx(part["least_seconds"] / part["seconds"])
    assert profile["batches_of_step"] == accumulate
    assert main(["roofline", str(tmp_path / "run")]) == 0
    text = capsys.readouterr().out
    assert "| backward " in text
    assert "ms at the limits" in text
    assert ("Of a step's 2 batches, this is the mean one" in text) == (accumulate == 2)
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


@pytest.mark.parametrize(
    ("rows", "size", "accumulate", "first", "count"),
    [(9, 2, 1, 3, 1), (9, 2, 3, 0, 3), (13, 2, 3, 3, 3), (5, 2, 4, 0, 2)],
)
def test_the_last_step_of_whole_batches(rows: int, size: int, accumulate: int, first: int, count: int) -> None:
    """A profile takes the last complete group of micro-batches, or all if there are too few."""
    data = SimpleNamespace(num_rows=lambda split: rows, batches=lambda split, size, start: itertools.count(start))
    found = roofline.last_step(data, TrainConfig(batch_size=2, accumulate=accumulate))
    assert found == list(range(first, first + count))


def test_runs_without_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Missing and unfinished runs, runs on a GPU, and runs without a whole batch are reported."""
    assert main(["roofline", str(tmp_path / "none")]) == 1
    assert "config.json is not the config of a run" in capsys.readouterr().err
    options = {"runs_dir": str(tmp_path), "run": "run", "batch_size": 4000}
    train(TrainConfig(**OPTIONS | options), progress=False)
    assert main(["roofline", str(tmp_path / "run")]) == 1
    assert "data set 'synthetic' has no whole batch: batch_size is 4000" in capsys.readouterr().err
    assert main(["roofline", str(tmp_path / "run"), "--data", "math:pi"]) == 1
    assert "(now 'math:pi')" in capsys.readouterr().err
    metrics = tmp_path / "run" / "metrics.jsonl"
    records = metrics.read_text()
    metrics.write_text(records.replace('"device": "cpu"', '"device": "Some GPU"'))
    assert main(["roofline", str(tmp_path / "run")]) == 1
    assert "was trained on Some GPU, where only the host's part" in capsys.readouterr().err
    metrics.write_text(records[: records.index('{"kind": "test"')])
    assert main(["roofline", str(tmp_path / "run")]) == 1
    assert "run is not finished: a profile needs a run that was tested" in capsys.readouterr().err
