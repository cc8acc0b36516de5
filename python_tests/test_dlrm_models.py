"""The trainer with DCN V2 and Wukong: training, errors, comparisons and counts."""

from __future__ import annotations

import itertools
from html import escape
from pathlib import Path

import pytest
import torch
from command_lines import main
from dlrm_cases import OPTIONS as SMALL

import rec_kernels as rk
from rec_kernels.dlrm import TrainConfig, checkpoint, evaluate, report, train
from rec_kernels.dlrm.config import MODELS, options_of
from rec_kernels.dlrm.data import DataError
from rec_kernels.dlrm.model import flops_per_example
from rec_kernels.dlrm.runs import Records
from rec_kernels.dlrm.synthetic import NUM_DENSE, Synthetic
from rec_kernels.dlrm.train import build_model

OPTIONS = SMALL | {"cross_layers": 2, "cross_rank": 3}
OPTIONS |= {"wukong_layers": 2, "wukong_features": 3, "wukong_factors": 2, "wukong_hidden": (7,)}
D, VECTORS = 4, 10  # columns; the dense vector and those of 9 features


def config(runs_dir: Path, **options) -> TrainConfig:
    return TrainConfig(**OPTIONS | {"runs_dir": str(runs_dir), "run": "run"} | options)


def mlp(*widths: int) -> tuple[int, int]:
    """Matrix elements of an MLP, and all its parameters."""
    elements = sum(a * b for a, b in itertools.pairwise(widths))
    return elements, elements + sum(widths[1:])


def by_formula(model: str) -> tuple[int, int]:
    """Multiplications of a row's forward, and parameters without tables."""
    if model == "dlrm":
        pairs = VECTORS * (VECTORS - 1) // 2
        inner, kept, width = pairs * D, 0, D + pairs
    elif model == "dcnv2":
        width = VECTORS * D
        inner = 2 * 2 * width * 3
        kept = inner + 2 * width
    else:
        inner = kept = 0
        for n in (VECTORS, 6):
            elements, parameters = mlp(n * 2, 7, 3 * D)
            residual = 6 * n if n != 6 else 0
            inner += 2 * n * D * 2 + elements + D * (3 * n + residual)
            kept += n * 2 + 2 * n * 2 + parameters + 3 * n + residual + 2 * D
        width = 6 * D
    bottom, top = mlp(NUM_DENSE, 5, D), mlp(width, 6, 1)
    return bottom[0] + inner + top[0], bottom[1] + kept + top[1]


@pytest.mark.parametrize("model", MODELS)
def test_counts(model: str, data: Synthetic) -> None:
    """Operations and parameters of the model equal the formulas."""
    made = build_model(TrainConfig(**OPTIONS, model=model), data)
    assert len(data.features) + 1 == VECTORS
    multiplications, parameters = by_formula(model)
    assert flops_per_example(made, data.features, NUM_DENSE) == 2 * multiplications
    assert sum(p.numel() for p in made.dense_parameters()) == parameters


def test_projections_count(data: Synthetic) -> None:
    """Projections of mixed-dimension tables count as matrix products."""
    narrow = build_model(TrainConfig(**OPTIONS, embedding="mixed", temperature=0.5), data)
    projections = sum(p.numel() for p in rk.dense_parameters(narrow.embeddings))
    assert projections
    flops = 2 * (by_formula("dlrm")[0] + projections)
    assert flops_per_example(narrow, data.features, NUM_DENSE) == flops


@pytest.mark.parametrize("cache", [0.0, 0.5])
def test_counting_changes_nothing(cache: float, data: Synthetic) -> None:
    """Counting operations changes no weight, step or cache counter."""
    made = build_model(TrainConfig(**OPTIONS, model="dcnv2", cache=cache), data)
    before = {name: t.clone() for name, t in made.state_dict().items()}, made.embeddings.memory_report()
    flops_per_example(made, data.features, NUM_DENSE)
    assert all(torch.equal(t, before[0][name]) for name, t in made.state_dict().items())
    assert made.embeddings.memory_report() == before[1]


@pytest.mark.parametrize("model", MODELS)
def test_every_model_trains(model: str, data: Synthetic, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The command line trains every model: name, loss, counts, reports, title and evaluation."""
    others = {name for other in MODELS if other != model for name in options_of(other)}
    own = {name: v[0] if isinstance(v, tuple) else v for name, v in OPTIONS.items() if name not in others}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in own.items()]
    assert main(["train", *flags, "--model", model, "--epochs", "4", "--runs-dir", str(tmp_path)]) == 0
    run = next(tmp_path.iterdir())
    network = "" if model == "dlrm" else f"-{model}"
    assert run.name == f"{data.name}{network}-d4-b500-seed0"
    records = Records(run).read()
    losses, test = [r["loss"] for r in records if r["kind"] == "train"], records[-1]
    assert losses[-1] < 0.97 * losses[0]
    multiplications, parameters = by_formula(model)
    tables = sum(f.num_embeddings for f in data.features) * D
    assert (test["flops_per_example"], test["dense_parameters"]) == (2 * multiplications, parameters)
    assert test["table_parameters"] == tables
    counts = f"{parameters:,} parameters; {2 * multiplications:,} FLOPs of a row's forward"
    page = (run / "report.html").read_text()
    assert escape(counts) in page
    assert f"<p>{report.TITLES[model]}</p>" in page
    assert counts in capsys.readouterr().out
    assert evaluate(run)["auc"] == test["auc"]


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("model", MODELS[1:])
@pytest.mark.parametrize("options", [{"precision": "bf16"}, {"activations": "mx9"}], ids=str)
def test_lower_precision(model: str, options: dict, data: Synthetic, tmp_path: Path) -> None:
    """Lower precision has a nearby but different loss, and the same count of operations."""
    low, full = (
        train(config(tmp_path, model=model, run=name, epochs=2, **more), data, progress=False)
        for name, more in (("low", options), ("full", {}))
    )
    assert low["log_loss"] != full["log_loss"]
    assert low["log_loss"] == pytest.approx(full["log_loss"], abs=0.02)
    assert low["flops_per_example"] == full["flops_per_example"]


def test_models_start_with_the_same_tables_and_seeds_differ(data: Synthetic) -> None:
    """Tables and bottom MLP are equal in all models; the interaction depends on the seed."""
    made = {m: build_model(TrainConfig(**OPTIONS, model=m), data) for m in MODELS}
    for other in (made["dcnv2"], made["wukong"]):
        for part in ("embeddings", "bottom"):
            pairs = zip(getattr(made["dlrm"], part).parameters(), getattr(other, part).parameters(), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)
    for model in MODELS[1:]:
        again, other = (build_model(TrainConfig(**OPTIONS, model=model, seed=s), data).interaction for s in (0, 1))
        mine = list(made[model].interaction.parameters())
        assert all(torch.equal(a, b) for a, b in zip(mine, again.parameters(), strict=True))
        assert not torch.equal(mine[0], next(other.parameters()))


@pytest.mark.usefixtures("no_pictures")
def test_another_models_checkpoint_is_refused(data: Synthetic, tmp_path: Path) -> None:
    """Flags, the run's config and a replaced checkpoint of another model are rejected."""
    for model in ("dlrm", "dcnv2"):
        train(config(tmp_path, model=model, run=model), data, progress=False)
    with pytest.raises(DataError, match="model is 'dcnv2', was 'dlrm'"):
        train(config(tmp_path, model="dcnv2", run="dlrm"), data, resume=tmp_path / "dlrm")
    message = "was trained with another config: model is 'dcnv2', was 'dlrm'"
    state = checkpoint.load(tmp_path / "dlrm")
    older = {name: value for name, value in state.items() if name != "options"} | {"network": "dlrm"}
    for written in (state, older | {"row_format": "fp32"}):
        checkpoint.save(tmp_path / "dcnv2", written)
        with pytest.raises(DataError, match=message):
            evaluate(tmp_path / "dcnv2", data)
        with pytest.raises(DataError, match=message):
            train(config(tmp_path, model="dcnv2", run="dcnv2"), data, resume=tmp_path / "dcnv2")
