"""What a step of the trainer costs at the machine's limits, and its dense side by torch.compile."""

from __future__ import annotations

import copy
import json
from itertools import islice
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("pandas")
pytest.importorskip("sklearn")

from rec_kernels.dlrm import Batch, TrainConfig, roofline, train
from rec_kernels.dlrm.config import MODELS
from rec_kernels.dlrm.dedup import dedup_batch
from rec_kernels.dlrm.synthetic import HISTORY, Synthetic
from rec_kernels.dlrm.train import build_model

OPTIONS = {"data": "synthetic", "rows": 3000, "table_rows": 300, "batch_size": 500, "threads": 1, "embedding_dim": 4}
OPTIONS |= {"bottom": (5,), "top": (6,)}


@pytest.fixture(scope="module")
def data() -> Synthetic:
    return Synthetic(3000, 300)


@pytest.fixture(scope="module")
def batch(data: Synthetic) -> Batch:
    return next(data.batches("train", 500))


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("format", ["fp32", "int8"])
def test_costs(format: str, once: bool, data: Synthetic, batch: Batch) -> None:
    """Counted by hand: a model without hidden layers."""
    config = TrainConfig(**OPTIONS | {"bottom": (), "top": (), "format": format, "dedup": "on" if once else "off"})
    model = build_model(config, data)
    given = dedup_batch(batch)[0] if once else batch
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
    """More of them move more."""
    of = {m: roofline.costs(build_model(TrainConfig(**OPTIONS, model=m), data), [batch], 1) for m in MODELS}
    assert of["dlrm"]["forward"]["bytes"] < of["dcnv2"]["forward"]["bytes"] < of["wukong"]["forward"]["bytes"]


def test_limits() -> None:
    found = roofline.limits(torch.get_num_threads(), torch.float32)
    assert found["bytes_per_second"] > 1e8
    assert found["flops_per_second"] > 1e8
    assert roofline.limits(torch.get_num_threads(), torch.float32) is found


def test_costs_of_several_batches(data: Synthetic) -> None:
    """Of equal ones: rows and state move once, gradients of the layers are added up, all else moves as often."""
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
    """Products of bfloat16 beside a product of bfloat16; bytes as they are in either."""
    rates = {torch.float32: 1.0, torch.bfloat16: 0.25}
    monkeypatch.setattr(
        roofline, "limits", lambda threads, dtype: {"bytes_per_second": 1e30, "flops_per_second": rates[dtype]}
    )
    seconds = {"examples": 500, "seconds": dict.fromkeys(("forward", "backward", "optimizer"), 1.0)}
    for precision, least in (("fp32", 500_000), ("bf16", 2_000_000)):
        model = build_model(TrainConfig(**OPTIONS, precision=precision), data)
        profile = roofline.record(model, [batch], [seconds], 1000)["profile"]
        assert profile["precision"] == precision
        assert profile["parts"]["forward"]["least_seconds"] == pytest.approx(least)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_profile_of_a_run(accumulate: int, data: Synthetic, tmp_path: Path) -> None:
    """In the test record and on the page; times are those of the curve's records."""
    options = {"runs_dir": str(tmp_path), "run": "run", "cache": 0.1, "accumulate": accumulate}
    test = train(TrainConfig(**OPTIONS | options), data, progress=False)
    profile, records = test["profile"], (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert profile["rows"] == 500
    seconds = sum(json.loads(line)["seconds"]["backward"] for line in records[:-1])
    assert profile["parts"]["backward"]["seconds"] == pytest.approx(seconds / (data.num_rows("train") / 500))
    assert profile["parts"]["optimizer"]["bytes"] == 7 * 4 * test["dense_parameters"] // accumulate
    for part in profile["parts"].values():
        assert part["of_roofline"] == pytest.approx(part["least_seconds"] / part["seconds"])
    page = (tmp_path / "run" / "report.html").read_text()
    assert "ms at the limits" in page
    assert profile["batches_of_step"] == accumulate
    assert ("Of a step's 2 batches, this is the mean one" in page) == (accumulate == 2)
    lookups = sum(table["lookups"] for table in test["tables"])
    curve = sum(len(b.features.values()) for b in data.batches("train", 500))
    assert lookups < curve + sum(len(b.shared.values()) for b in data.batches("train", 500)) + 1  # none by the profile


def test_there_is_no_profile_on_a_gpu(data: Synthetic, batch: Batch) -> None:
    model = build_model(TrainConfig(**OPTIONS), data)
    assert roofline.record(model, (), [], 1) == {}
    assert roofline.record(model.to("meta"), [batch], [], 1) == {}


@pytest.mark.parametrize("model", MODELS)
def test_compiled(model: str, data: Synthetic, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same logits and gradients but for rounding, in one graph, and the weights' names."""
    calls, compiler = [], torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **more: calls.append(more) or compiler(f, backend="eager"))
    eager, compiled = (build_model(TrainConfig(**OPTIONS, model=model, compile=c), data) for c in ("no", "default"))
    assert calls == [{"mode": "default", "fullgraph": True, "dynamic": False}]
    assert eager.state_dict().keys() == compiled.state_dict().keys()
    for made in (eager, compiled):
        made(batch).square().sum().backward()
    for one, other in zip(eager.dense_parameters(), compiled.dense_parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    for made in (eager, compiled):
        again = copy.deepcopy(made)
        again.top[-1].bias.data.add_(1)
        torch.testing.assert_close(again(batch), made(batch) + 1)  # the copy's layers are its own


def test_a_compiled_run(data: Synthetic, tmp_path: Path) -> None:
    """By the real compiler, to the same scores but for rounding."""
    given = {"runs_dir": str(tmp_path)}
    found = [train(TrainConfig(**OPTIONS | given, compile=c), data, progress=False) for c in ("no", "default")]
    assert found[1]["log_loss"] == pytest.approx(found[0]["log_loss"], abs=1e-3)
    assert found[1]["flops_per_example"] == found[0]["flops_per_example"] > 0
    assert found[1]["directory"].endswith("-compiled-default-b500-seed0")
