"""The trainer with tables in low-precision formats: records, checkpoints, errors and comparisons."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from command_lines import main
from dlrm_cases import PLAIN, flags_of, plain_config
from dlrm_records import records

import rec_kernels as rk
from bench.studies import compare
from rec_kernels.dlrm import (
    DLRM,
    DataError,
    TrainConfig,
    checkpoint,
    evaluate,
    page,
    report,
    train,
)
from rec_kernels.dlrm.config import FORMATS, ROUNDINGS
from rec_kernels.dlrm.synthetic import Synthetic
from rec_kernels.dlrm.train import Run, build_model
from rec_kernels.nn.tables.rows import decode, encode

pytestmark = pytest.mark.usefixtures("no_pictures")
FLAGS = flags_of(PLAIN)
ALL_NAMES = "fp32, fp16, bf16, int8, int4, mx9, mx6"
LOW = [name for name in FORMATS if name != "fp32"]


def tables(model: DLRM) -> dict[str, torch.Tensor]:
    return {t.name: model.embeddings.embedding_bags[t.name].weight for t in model.embeddings.tables}


def saved(directory: Path) -> dict[str, torch.Tensor]:
    return checkpoint.load(directory)["model"]


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_trains_and_says_what_it_saves(
    format: str, data: Synthetic, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    flags = ["--format", format, "--epochs", "3", "--runs-dir", str(tmp_path)]
    assert main(["train", *FLAGS, *flags]) == 0
    name = "synthetic-d16-b500-seed0" if format == "fp32" else f"synthetic-d16-{format}-stochastic-b500-seed0"
    run = next(tmp_path.iterdir())
    assert run.name == re.sub("^synthetic", data.name, name)
    recorded = json.loads((run / "config.json").read_text())["config"]
    assert (recorded["format"], recorded["rounding"]) == (format, "stochastic")
    test = records(run)[-1]
    assert {table["format"] for table in test["tables"]} == {format}
    assert all(t["weight_bytes"] == t["num_embeddings"] * rk.row_bytes(format, 16) for t in test["tables"])
    assert test["log_loss"] < 0.7
    line = report.memory(test["tables"])
    assert re.search(rf"^tables +{re.escape(line)}$", capsys.readouterr().out, re.MULTILINE)
    assert f"<td>tables</td><td>{line}</td>" in (run / "report.html").read_text()
    assert ("less)" in line) == (format != "fp32")


def test_memory_is_said_in_words() -> None:
    def table(format: str, weight: int, state: int) -> dict:
        sizes = {"weight_bytes": weight, "state_bytes": state}
        return {"num_embeddings": 1000, "embedding_dim": 16, "format": format} | sizes

    assert report.memory([table("fp32", 64000, 4000)]) == "62.5 KiB, state 3.9 KiB"
    mixed = [table("fp32", 64000, 0), table("int4", 12000, 0)]
    assert report.memory(mixed) == "74.2 KiB (fp32: 125.0 KiB, 1.7x less), state 0 bytes"
    sizes = (0, 1023, 1024, 2**20 - 1, 2**20, 3 * 2**30, 2**41)
    shown = ["0 bytes", "1,023 bytes", "1.0 KiB", "1,024.0 KiB", "1.0 MiB", "3.0 GiB", "2,048.0 GiB"]
    assert [page.size(size) for size in sizes] == shown


@pytest.mark.parametrize("format", LOW)
def test_initial_weights_are_those_of_fp32_rounded(format: str, data: Synthetic, tmp_path: Path) -> None:
    full, low = (build_model(plain_config(tmp_path, format=f, seed=5), data) for f in ("fp32", format))
    own = tables(low)
    for name, weight in tables(full).items():
        assert torch.equal(own[name], encode(weight.detach(), format)), name
        error = (decode(own[name], format, 16) - weight).abs().max() / weight.abs().max()
        assert error < (0.26 if format in ("mx4", "int4") else 0.07), name
    for one, other in zip(full.dense_parameters(), low.dense_parameters(), strict=True):
        assert torch.equal(one, other)


def trained(data: Synthetic, tmp_path: Path, name: str, **options) -> dict[str, torch.Tensor]:
    """The saved model of a run."""
    return saved(Path(train(plain_config(tmp_path, run=name, **options), data, progress=False)["directory"]))


def test_noise_follows_the_seed_and_roundings_differ(data: Synthetic, tmp_path: Path, monkeypatch) -> None:
    model = build_model(plain_config(tmp_path, format="int8", seed=3), data)
    assert (model.embeddings.seed, model.embeddings.rounding) == (3, "stochastic")
    first = trained(data, tmp_path, "a", format="int8", seed=3)
    assert_same(first, trained(data, tmp_path, "b", format="int8", seed=3))
    weight = "embeddings.embedding_bags.history.weight"
    nearest = trained(data, tmp_path, "c", format="int8", seed=3, rounding="nearest")
    assert not torch.equal(first[weight], nearest[weight])

    def other_noise(*arguments) -> DLRM:
        model = build_model(*arguments)
        model.embeddings._layout.seed += 2
        return model

    monkeypatch.setattr(sys.modules[Run.__module__], "build_model", other_noise)
    assert not torch.equal(first[weight], trained(data, tmp_path, "d", format="int8", seed=3)[weight])
    large = build_model(plain_config(tmp_path, format="int8", seed=2**63), data)
    assert large.embeddings.seed < 2**63


def test_rounding_says_nothing_to_fp32(data: Synthetic, tmp_path: Path) -> None:
    assert_same(*(trained(data, tmp_path, rounding, rounding=rounding) for rounding in ROUNDINGS))


def test_other_formats_are_refused_with_the_way_out(
    data: Synthetic, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run = tmp_path / "run"
    train(plain_config(tmp_path, format="int8"), data, progress=False)
    before = (run / checkpoint.NAME).read_bytes()
    assert main(["train", "--resume", str(run), "--format", "bf16", "--rounding", "nearest"]) == 1
    error = capsys.readouterr().err
    assert (
        "another config: format is 'bf16', was 'int8'; rounding is 'nearest', was 'stochastic': a run resumes" in error
    )
    assert "leave these out, or start a new run without --resume" in error
    settings = json.loads((run / "config.json").read_text())
    settings["config"]["format"] = "mx9"
    (run / "config.json").write_text(json.dumps(settings))
    for command in (["train", "--resume", str(run)], ["evaluate", str(run)]):
        assert main(command) == 1
        message = "was trained with another config: format is 'mx9', was 'int8': a run resumes"
        assert message in capsys.readouterr().err
    assert (run / checkpoint.NAME).read_bytes() == before
    settings["config"]["format"] = "fp8"
    (run / "config.json").write_text(json.dumps(settings))
    assert main(["evaluate", str(run)]) == 1
    assert f"format is 'fp8', allowed is {ALL_NAMES} or mx4" in capsys.readouterr().err


def test_the_way_out_works(data: Synthetic, tmp_path: Path) -> None:
    """convert_formats() loads a run's tables into a model of another format."""
    train(plain_config(tmp_path, format="fp32"), data, progress=False)
    model = build_model(plain_config(tmp_path, format="int8"), data)
    state = saved(tmp_path / "run")
    with pytest.raises(RuntimeError, match="has rows of format fp32, this collection's are int8"):
        model.load_state_dict(state)
    with model.embeddings.convert_formats():
        model.load_state_dict(state)
    assert torch.equal(tables(model)["user"], encode(state["embeddings.embedding_bags.user.weight"], "int8"))


def test_a_saved_table_that_lost_its_format_is_refused(data: Synthetic, tmp_path: Path) -> None:
    """int4 and mx6 rows of 16 columns have equal width: only the stored name distinguishes them."""
    train(plain_config(tmp_path, format="int4"), data, progress=False)
    state = checkpoint.load(tmp_path / "run")
    name = "embeddings.embedding_bags.user.format"
    for found in (None, torch.tensor(list(b"mx6")), torch.tensor(list(b"int9")), torch.tensor([300, -1, 0, 0])):
        damaged = state | {"model": {key: value for key, value in state["model"].items() if key != name}}
        if found is not None:
            damaged["model"][name] = found
        checkpoint.save(tmp_path / "run", damaged)
        with pytest.raises(DataError, match="does not fit the run"):
            evaluate(tmp_path / "run", data)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--format", "fp8"], f"format is 'fp8', allowed is {ALL_NAMES} or mx4"),
        (["train", "--format", "INT8"], f"format is 'INT8', allowed is {ALL_NAMES} or mx4"),
        (["train", "--format", "fp32,int8"], f"format is 'fp32,int8', allowed is {ALL_NAMES} or mx4"),
        (["train", "--format", ""], "format is '', allowed is"),
        (["train", "--rounding", "up"], "rounding is 'up', allowed is stochastic or nearest"),
        (["evaluate", "x", "--format", "int8"], "unrecognized arguments: --format int8"),
        (["compare", "--format", "fp32,fp8"], f"format is 'fp32,fp8', allowed is {ALL_NAMES}, mx4, or several of them"),
        (["compare", "--format", "fp32,fp32"], "format is 'fp32,fp32', allowed is"),
        (["compare", "--format", "fp32,"], "format is 'fp32,', allowed is"),
        (["compare", "--format", "int8"], "there is nothing to compare"),
        (["compare", "--format", "fp32,int8", "--rounding", "up"], "rounding is 'up', allowed is stochastic, nearest"),
        (["compare", "--rounding", "stochastic,nearest"], "format is 'fp32', which is not rounded: also give --format"),
        (
            ["compare", "a", "b:format=int8", "--format", "fp32,int8"],
            "configuration 'b:format=int8': 'format' is given, but --format or --rounding is a list: leave one out",
        ),
        (["compare", "a:format=fp8", "b"], f"format is 'fp8', allowed is {ALL_NAMES} or mx4"),
        (["compare", "a", "a:lr=1", "--format", "fp32,int8"], "two configurations are named 'a-fp32'"),
    ],
)
def test_wrong_formats_give_readable_errors(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    more = ["--runs-dir", str(tmp_path / "runs")] if arguments[0] != "evaluate" else []
    with pytest.raises(SystemExit, match="2"):
        main([*arguments, *more])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", ["train", "compare"])
def test_help_names_formats_and_roundings(command: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    names = f"{{{ALL_NAMES.replace(' ', '')},mx4}}" if command == "train" else f"{ALL_NAMES}, mx4 (default: fp32)"
    for words in (names, "--rounding", "nearest", "(default: stochastic)"):
        assert words in text
    assert ("--format fp32,int8,int4 --rounding stochastic,nearest" in text) == (command == "compare")


def rows_of(configurations: list[str], **options: str) -> dict[str, tuple[str, str]]:
    """Format and rounding of every configuration of a comparison."""
    plan = compare.plan(configurations, TrainConfig(), "2", "c", **options)
    return {name: (config.format, config.rounding) for name, config in plan.configs.items()}


def test_lists_of_formats_and_roundings_are_configurations() -> None:
    assert rows_of([], formats="fp32,int8,mx9", roundings="stochastic,nearest") == {
        "fp32": ("fp32", "stochastic"),
        "int8-stochastic": ("int8", "stochastic"),
        "int8-nearest": ("int8", "nearest"),
        "mx9-stochastic": ("mx9", "stochastic"),
        "mx9-nearest": ("mx9", "nearest"),
    }
    assert list(rows_of([], formats="int4,fp32", roundings="nearest")) == ["int4-nearest", "fp32"]
    assert list(rows_of([], formats="int4", roundings="nearest,stochastic")) == ["int4-nearest", "int4-stochastic"]
    named = rows_of(["a", "b:lr=0.5"], formats="fp32,int8")
    assert list(named) == ["a-fp32", "a-int8-stochastic", "b-fp32", "b-int8-stochastic"]
    assert rows_of(["a", "b:format=int8"], roundings="nearest") == {"a": ("fp32", "nearest"), "b": ("int8", "nearest")}
    assert rows_of(["a", "b:rounding=nearest"], formats="mx6") == {
        "a": ("mx6", "stochastic"),
        "b": ("mx6", "nearest"),
    }
    plan = compare.plan([], TrainConfig(format="int8"), "1", "c", roundings="stochastic,nearest")
    assert list(plan.configs) == ["int8-stochastic", "int8-nearest"]


def test_comparison_of_formats(data: Synthetic, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    flags = [*FLAGS, "--runs-dir", str(tmp_path), "--name", "c", "--seeds", "2"]
    command = ["compare", "--format", "fp32,int8,mx4", "--rounding", "stochastic,nearest", *flags]
    assert main(command) == 0
    out = capsys.readouterr().out
    result = json.loads((tmp_path / "c" / "compare.json").read_text())
    found = {configuration["name"]: configuration for configuration in result["configurations"]}
    names = ["fp32", "int8-stochastic", "int8-nearest", "mx4-stochastic", "mx4-nearest"]
    assert list(found) == names
    assert result["reference"] == "fp32"
    rows = found["fp32"]["weight_bytes"] // 64
    for name, width in zip(names, (64, 24, 24, 8, 8), strict=True):
        sizes = [found[name][key] for key in ("weight_bytes", "state_bytes", "table_bytes")]
        assert sizes == [rows * width, rows * 4, rows * (width + 4)]
        assert [run["run"] for run in found[name]["runs"]] == [f"{name}-seed0", f"{name}-seed1"]
    aucs = {name: [run["auc"] for run in found[name]["runs"]] for name in names}
    for name in names[1:]:
        apart = found[name]["auc"]["difference"]
        gaps = [low - full for low, full in zip(aucs[name], aucs["fp32"], strict=True)]
        assert apart["pairs"] == 2
        assert apart["mean"] == pytest.approx(sum(gaps) / 2)
        assert apart["low"] <= apart["mean"] <= apart["high"]
    assert found["mx4-nearest"]["options"]["format"] == "mx4"
    assert found["mx4-nearest"]["options"]["rounding"] == "nearest"
    assert re.search(r"^\| int8-nearest +\|.* 37\.5% ", out, re.MULTILINE)
    assert (tmp_path / "c" / "compare.png").read_bytes().startswith(b"\x89PNG")
    # A run of the comparison equals the trainer's own run, and can be resumed.
    alone = train(plain_config(tmp_path, format="int8", rounding="nearest", seed=1), data, progress=False)
    assert alone["auc"] == aucs["int8-nearest"][1]
    shutil.rmtree(tmp_path / "c" / "mx4-nearest-seed1")
    assert main(command) == 0
    again = json.loads((tmp_path / "c" / "compare.json").read_text())
    assert again["configurations"][:-1] == result["configurations"][:-1]


def drift(format: str, rounding: str, fraction: float, rows: int) -> torch.Tensor:
    """The movement of a table's values in updates of a fraction of half a step, relative to float32."""
    low, start, high, way = 1.0, 1.25, 1 + 255 / 256, 0.25  # low and high fix an int8 row's 255 steps

    def init(weight: torch.Tensor) -> None:
        weight.fill_(start)
        weight[:, 0], weight[:, -1] = low, high

    update = fraction * {"bf16": 2.0**-7, "int8": 2.0**-8}[format] / 2
    table = rk.EmbeddingBagConfig(rows, 16, name="t", feature_names=["t"], format=format, init=init)
    collection = rk.EmbeddingBagCollection([table], optimizer=rk.SGD(lr=update), rounding=rounding)
    every_row = rk.KeyedJaggedTensor(["t"], torch.arange(rows), offsets=torch.arange(rows + 1))
    for _ in range(round(way / update)):
        (-collection(every_row).values()[:, 1:-1]).sum().backward()
    moved = decode(collection.embedding_bags["t"].weight.detach(), format, 16)[:, 1:-1] - start
    return moved / (round(way / update) * update)


@pytest.mark.parametrize("format", ["bf16", "int8"])
def test_updates_below_half_a_step(format: str) -> None:
    """Rounding to nearest loses updates below half a step and enlarges larger ones; stochastic keeps the mean."""
    assert drift(format, "nearest", 0.5, rows=4).mean() == 0
    assert drift(format, "nearest", 1.25, rows=4).mean() == pytest.approx(2 / 1.25)
    found = drift(format, "stochastic", 0.5, rows=500)
    assert 0.001 < found.std() < 0.5
    assert abs(found.mean() - 1) < 5 * found.std() / found.numel() ** 0.5
