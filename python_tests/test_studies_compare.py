"""Comparisons: valid configurations, trained runs, and statistics."""

from __future__ import annotations

import dataclasses
import json
import threading

import numpy as np
import pytest
from dlrm_tiny import TinyData
from scipy import stats

from bench.studies import compare, compare_report
from bench.studies.__main__ import main
from rec_kernels.dlrm import TrainConfig, runs, train
from rec_kernels.dlrm.reader import Reader
from rec_kernels.dlrm.train import Run, RunInterruptedError

pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.fixture
def command(tmp_path, monkeypatch):
    TinyData.opened = 0
    # Collecting the garbage of all tests of the process after each run takes even longer.
    monkeypatch.setattr(compare.gc, "collect", lambda: 0)

    def run(*configurations, seeds="2", more=()):
        flags = ["--data", "dlrm_tiny:tiny", "--batch-size", "100", "--runs-dir", str(tmp_path), "--bottom", "4"]
        return main(["compare", *configurations, "--seeds", seeds, "--name", "c", *flags, "--top", "4", *more])

    return run


@pytest.fixture
def trained(monkeypatch):
    """The runs that are trained, and whether they are resumed."""
    names = []

    def spy(config, data, **options):
        names.append((config.run, options["resume"] is not None))
        return train(config, data, **options)

    monkeypatch.setattr(compare, "train", spy)
    return names


def result(tmp_path) -> dict:
    found = json.loads((tmp_path / "c" / "compare.json").read_text())
    return found | {"configurations": {c["name"]: c for c in found["configurations"]}}


def test_two_configurations_and_two_seeds(command, tmp_path, capsys, trained):
    assert command("a", "b:lr=0.5,bottom=8+4", more=["--epochs", "2"]) == 0
    assert [name for name, _ in trained] == ["a-seed0", "b-seed0", "a-seed1", "b-seed1"]
    assert TinyData.opened == 1
    out, err = capsys.readouterr()
    assert (tmp_path / "c" / "compare.md").read_text() in out
    assert (tmp_path / "c" / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert "runs: 100%" in err
    assert "training" not in err
    found = result(tmp_path)["configurations"]
    assert found["b"]["options"] | {"lr": 0.5, "bottom": [8, 4], "epochs": 2} == found["b"]["options"]
    assert "lr=0.5, bottom=8+4" in " ".join(out.split()) or "bottom=8+4, lr=0.5" in " ".join(out.split())
    assert found["a"]["parameters"] == 2 * 4 + 4 + 4 * 16 + 16 + 17 * 4 + 4 + 4 + 1 + 20 * 16
    assert found["a"]["table_bytes"] == 20 * 16 * 4 + 20 * 4
    # A run of a comparison equals the trainer's own run.
    options = {"data": "dlrm_tiny:tiny", "batch_size": 100, "bottom": (8, 4), "top": (4,), "epochs": 2, "lr": 0.5}
    alone = train(TrainConfig(**options, seed=1, runs_dir=str(tmp_path)), TinyData(), progress=False)
    assert found["b"]["runs"][1]["auc"] == alone["auc"]
    aucs = [[run["auc"] for run in found[name]["runs"]] for name in "ab"]
    assert found["b"]["auc"]["difference"]["mean"] == pytest.approx(np.mean(aucs[1]) - np.mean(aucs[0]))
    assert found["a"]["auc"]["std"] == pytest.approx(np.std(aucs[0], ddof=1))


def test_finished_runs_are_kept(command, tmp_path, trained, capsys):
    assert command("a", "b:lr=0.5") == 0
    before = (tmp_path / "c" / "compare.json").read_bytes()
    assert command("a", "b:lr=0.5") == 0
    assert len(trained) == 4
    assert (tmp_path / "c" / "compare.json").read_bytes() == before
    assert command("a", "b:lr=0.5", "new:optimizer=sgd", seeds="3") == 0
    assert [name for name, _ in trained[4:]] == ["new-seed0", "new-seed1", "a-seed2", "b-seed2", "new-seed2"]
    capsys.readouterr()
    assert command("a", "b:lr=0.25,top=8") == 1
    error = capsys.readouterr().err
    assert "b-seed0 has another config: top is (8,), was (4,); lr is 0.25, was 0.5: choose another --name" in error
    assert len(trained) == 9


def test_an_interrupted_run_goes_on(command, tmp_path, trained, capsys):
    assert command("a", "b:lr=0.5", seeds="1") == 0
    whole = result(tmp_path)["configurations"]["b"]["runs"][0]["auc"]
    directory = tmp_path / "c" / "b-seed0"
    config = TrainConfig.read(directory)
    for path in directory.iterdir():
        path.unlink()
    runs.write_config(directory, dataclasses.asdict(config), {"on": False, "factor": None})
    stop = threading.Event()
    stop.set()
    with pytest.raises(RunInterruptedError, match="interrupted after step 1 of 4"):
        Run(config, Reader(config, TinyData()), directory).fit(stop)
    assert command("a", "b:lr=0.5", seeds="1") == 0
    assert trained[2:] == [("b-seed0", True)]
    assert result(tmp_path)["configurations"]["b"]["runs"][0]["auc"] == whole


def test_a_killed_run_begins_anew_or_repeats_its_test(command, tmp_path, trained):
    assert command("a", "b:lr=0.5", seeds="1") == 0
    before = result(tmp_path)["configurations"]
    (tmp_path / "c" / "a-seed0" / "checkpoint.pt").unlink()
    for name in "ab":
        metrics = tmp_path / "c" / f"{name}-seed0" / "metrics.jsonl"
        metrics.write_text(metrics.read_text()[:-20])
    assert command("a", "b:lr=0.5", seeds="1") == 0
    assert trained[2:] == [("a-seed0", False), ("b-seed0", True)]
    for name, found in result(tmp_path)["configurations"].items():
        assert found["runs"][0]["auc"] == before[name]["runs"][0]["auc"]


def test_failed_runs_are_published(command, tmp_path, trained, capsys):
    for _ in range(2):
        assert command("a", "bad:dense_lr=1e30", "c:lr=0.1") == 0
        text = capsys.readouterr().out
        assert "| bad           | 0 of 2 |" in text
        assert "no pair of finished runs" in text
        assert "- bad-seed0: loss is nan at step 2 of 4" in text
        assert "(bad 0, c 2)" in text
    assert len(trained) == 6
    bad = result(tmp_path)["configurations"]["bad"]
    assert [run["outcome"] for run in bad["runs"]] == ["failed", "failed"]
    assert bad["auc"]["mean"] is bad["parameters"] is None
    assert "Failed: loss is nan" in (tmp_path / "c" / "bad-seed0" / "report.html").read_text()


def test_interruption_tells_how_to_go_on(command, tmp_path, monkeypatch, capsys):
    def interrupted(config, data, **options):
        raise RunInterruptedError("interrupted after step 3 of 4", tmp_path)

    monkeypatch.setattr(compare, "train", interrupted)
    assert command("a", "b:lr=0.5") == 130
    assert "interrupted after step 3 of 4; repeat the command to resume" in capsys.readouterr().err


def test_folders_of_others_are_refused(command, tmp_path, capsys):
    with compare._locked(tmp_path / "c"):
        assert command("a", "b") == 1
    assert "another process is running the comparison" in capsys.readouterr().err
    (tmp_path / "c" / "config.json").touch()
    assert command("a", "b") == 1
    assert f"{tmp_path / 'c'} is a run, not a comparison" in capsys.readouterr().err
    (tmp_path / "c" / "config.json").unlink()
    (tmp_path / "c" / "b-seed1").mkdir()
    assert command("a", "b") == 1
    assert "config.json is not the config of a run" in capsys.readouterr().err
    assert not (tmp_path / "c" / "a-seed0").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a"], "there is only one configuration, 'a': a comparison needs at least 2"),
        (["a", "a:lr=0.5"], "two configurations are named 'a'"),
        (["a", "../b:lr=0.5"], "its name is '../b', allowed is at most 200 letters, digits"),
        (["a", ":lr=0.5"], "its name is '', allowed is at most 200 letters"),
        (["a", "b:"], "configuration 'b:': '' is not option=value"),
        (["a", "b:lr"], "'lr' is not option=value"),
        (["a", "b:speed=1"], "there is no option 'speed', allowed are data, path"),
        (["a", "b:lr=fast"], "configuration 'b:lr=fast': lr is 'fast', allowed is a finite number above 0"),
        (["a", "b:lr=-1"], "configuration 'b:lr=-1': lr is -1.0, allowed is a finite number above 0"),
        (["a", "b:bottom=64+x"], "bottom is '64+x', allowed is widths of 1 or more"),
        (["a", "b:lr=1,lr=2"], "'lr' is given twice"),
        (["a", "b:patience=2"], "patience is 2, which needs eval_every"),
        *(
            (["a", f"b:{how}=1"], f"{how!r} cannot differ between configurations, allowed are data,")
            for how in ("run", "runs_dir", "threads", "data_dir", "checkpoint_every", "seed")
        ),
        *(
            (["a", "b", "--seeds", seeds], f"seeds is {seeds!r}, allowed is a count of 1 to 1000, or")
            for seeds in ("x", "0", "-3", "1,1", "1,", "", "1.5", "0,-1", "1001")
        ),
        (["a", "b", "--name", "../c"], "name is '../c', allowed is at most 200 letters"),
        (["a", "b", "--lr", "0"], "lr is 0.0, allowed is a finite number above 0"),
        (["a", "b", "--seed", "3"], "unrecognized arguments: --seed 3"),
        (["a", "b", "--run", "x"], "unrecognized arguments: --run x"),
        *(
            (["a", "b", f"--{option}", ""], f"{option} is '', allowed is ")
            for option in ("model", "embedding", "format", "rounding")
        ),
        (
            ["a", "b", "--cross-rank", "8"],
            "cross_rank is 8, which has no effect without model 'dcnv2' (now 'dlrm'): leave it out",
        ),
        (
            ["--model", "dlrm,wukong", "--cross-rank", "8"],
            "without model 'dcnv2' (now 'dlrm' or 'wukong'): leave it out",
        ),
        (["a", "b:cross_rank=8"], "configuration 'b:cross_rank=8': cross_rank is 8, which has no effect without"),
        (["a:model=dcnv2", "b:cross_rank=8"], "configuration 'b:cross_rank=8': cross_rank is 8, which"),
        ([], "there is nothing to compare: give configurations, or lists such as --format fp32,int8"),
        (["--embedding", "qr"], "there is nothing to compare"),
        (["--embedding", "full,qr4"], "embedding is 'full,qr4', allowed is full, hash, qr,"),
        (["--embedding", "qr,qr"], "embedding is 'qr,qr', allowed is"),
        (["--model", "dlrm,dcn"], "model is 'dlrm,dcn', allowed is dlrm, dcnv2, wukong, or several of them"),
        (
            ["a", "b:embedding=qr", "--embedding", "full,hash"],
            "configuration 'b:embedding=qr': 'embedding' is given, but --embedding is a list: leave one out",
        ),
        (["a:model=dcnv2", "--model", "dlrm,dcnv2"], "'model' is given, but --model is a list: leave one out"),
        (["a:rounding=nearest", "--format", "fp32,int8"], "'rounding' is given, but --format or --rounding is a "),
        (["a", "b", "--device", "tpu"], "device is 'tpu', allowed is cpu or cuda"),
    ],
)
def test_wrong_comparisons_give_readable_errors(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["compare", *arguments, "--runs-dir", str(tmp_path / "runs")])
    assert exit.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


INT8, QR = {"format": "int8"}, {"embedding": "qr"}
LISTS = [
    ([], {"models": "dlrm,wukong"}, {"dlrm": {}, "wukong": {"model": "wukong"}}),
    (["a", "b:model=dcnv2"], {}, {"a": {}, "b": {"model": "dcnv2"}}),
    (
        ["a", "b:format=int8,rounding=nearest"],
        {"embeddings": "full,qr"},
        {
            "a-full": {},
            "a-qr": QR,
            "b-full": INT8 | {"rounding": "nearest"},
            "b-qr": INT8 | QR | {"rounding": "nearest"},
        },
    ),
    (
        ["a", "b:embedding=hash"],
        {"formats": "fp32,int8"},
        {
            "a-fp32": {},
            "a-int8-stochastic": INT8,
            "b-fp32": {"embedding": "hash"},
            "b-int8-stochastic": INT8 | {"embedding": "hash"},
        },
    ),
    (
        ["a"],
        {"models": "dlrm,dcnv2", "embeddings": "full,qr", "formats": "fp32,int8"},
        {
            f"a-{model}-{kind}-{format}": {"model": model, "embedding": kind, "format": format.split("-")[0]}
            for model in ("dlrm", "dcnv2")
            for kind in ("full", "qr")
            for format in ("fp32", "int8-stochastic")
        },
    ),
]


@pytest.mark.parametrize(("configurations", "lists", "expected"), LISTS)
def test_lists_of_models_tables_and_formats(configurations, lists, expected):
    """Lists expand every configuration, which gives the options without lists itself."""
    plan = compare.plan(configurations, TrainConfig(), "1", "c", **lists)
    assert list(plan.configs.items()) == [(name, TrainConfig(**options)) for name, options in expected.items()]


def test_options_of_one_model_reach_the_configurations_of_it():
    """Configurations of other models in the same comparison ignore them."""
    base = TrainConfig(cross_rank=8)
    plan = compare.plan(["a"], base, "1", "c", models="dlrm,dcnv2", given={"cross_rank": 8})
    assert {config.cross_rank for config in plan.configs.values()} == {8}
    plan = compare.plan(["a:wukong_hidden=8+4", "b"], base, "1", "c", models="dlrm,wukong")
    assert plan.configs["a-wukong"].wukong_hidden == (8, 4)


def test_plan_takes_what_is_not_given_from_the_base():
    base = TrainConfig(weeks=4, lr=0.1, bottom=(32,))
    plan = compare.plan(["a", "b:lr=0.5,bottom=64+32,top=", "c:data=my.module:make"], base, "3,5", "x")
    assert plan.configs["a"] == base
    assert plan.configs["b"] == dataclasses.replace(base, lr=0.5, bottom=(64, 32), top=())
    assert plan.configs["c"].data == "my.module:make"
    assert plan.seeds == (3, 5)
    config = plan.run_config("b", 5)
    assert (config.run, config.runs_dir, config.seed, config.lr) == ("b-seed5", "runs/x", 5, 0.5)
    assert compare.parse_seeds("3") == (0, 1, 2)


def records(aucs, **changes) -> dict[int, dict]:
    same = {"kind": "test", "examples": 10, "base_rate": 0.5} | changes
    return {seed: same | {"auc": auc, "log_loss": 1 - auc} for seed, auc in enumerate(aucs) if auc is not None}


def test_intervals_are_those_of_the_paired_t_test():
    generator = np.random.default_rng(0)
    first = generator.normal(0.8, 0.1, 9)
    second = first + generator.normal(0.01, 0.02, 9)
    found = compare_report.difference(records(first), records(second), "auc", 1)
    expected = stats.ttest_rel(second, first).confidence_interval(0.95)
    assert (found["low"], found["high"]) == (pytest.approx(expected.low), pytest.approx(expected.high))
    assert found["mean"] == pytest.approx(np.mean(second - first))
    assert found["pairs"] == 9
    # Four values 0, 0, 1, 1: mean 1/2, standard error 1/sqrt(12), and 3.182 is the 97.5 % point of t with 3 degrees.
    assert compare_report.half_width([0, 0, 1, 1]) == pytest.approx(3.18245 / 12**0.5, rel=1e-5)


@pytest.mark.parametrize(
    ("other", "auc", "log_loss"),
    [
        ([0.72, 0.73, 0.74], "better", "better"),
        ([0.68, 0.67, 0.66], "worse", "worse"),
        ([0.69, 0.70, 0.72], "indistinguishable", "indistinguishable"),
        ([0.70, 0.70, 0.70], "indistinguishable", "indistinguishable"),
        ([0.71, None, None], "no interval from 1 pair", "no interval from 1 pair"),
        ([None, None, None], "no pair of finished runs", "no pair of finished runs"),
    ],
)
def test_verdicts(other, auc, log_loss):
    reference = records([0.7, 0.7, 0.7])
    assert compare_report.difference(reference, records(other), "auc", 1)["verdict"] == auc
    assert compare_report.difference(reference, records(other), "log_loss", -1)["verdict"] == log_loss


def test_pairs_are_seeds_that_both_finished():
    failed = {"kind": "failed", "error": "x"}
    reference, other = records([0.7, 0.1, 0.8, 0.9]), records([0.6, 0.9, 0.7, 0.8])
    reference[1] = other[3] = failed
    other[2] = other[2] | {"auc": None}
    found = compare_report.difference(reference, other, "auc", 1)
    assert (found["pairs"], found["mean"]) == (1, pytest.approx(-0.1))
    assert compare_report.difference(reference, other, "log_loss", -1)["pairs"] == 2


def test_other_test_rows_are_not_compared():
    found = compare_report.difference(records([0.7, 0.8]), records([0.6, 0.7], examples=11), "auc", 1)
    assert found == {"pairs": 0, "mean": None, "low": None, "high": None, "verdict": "not comparable: other test rows"}


@pytest.mark.parametrize(("seeds", "failed"), [(1, 0), (7, 0), (8, 1), (8, 0)])
def test_few_pairs_are_said(seeds, failed):
    table = {"num_embeddings": 5, "embedding_dim": 4, "weight_bytes": 80, "state_bytes": 20}
    more = {"dense_parameters": 7, "examples_per_second": 10.0, "tables": [table]}
    outcomes = {name: records(np.linspace(low, 0.9, seeds), **more) for name, low in (("a", 0.8), ("b", 0.7))}
    outcomes["b"] |= {seed: {"kind": "failed", "error": "why"} for seed in range(failed)}
    plan = compare.plan(["a", "b"], TrainConfig(), str(seeds), "c")
    result = compare_report.summarise(plan, outcomes)
    assert (result["configurations"][1]["parameters"], result["configurations"][1]["table_bytes"]) == (27, 100)
    text = compare_report.markdown("c", result)
    pairs = seeds - failed
    assert (f"Fewer than 8 pairs of finished runs (b {pairs})" in text) == (pairs < 8)
    assert ("no interval from 1 pair" in text) == (seeds == 1)
    assert ("- b-seed0: why" in text) == (failed > 0)


def test_picture_shows_means_intervals_and_names():
    aucs = {"small": [0.7, 0.72], "large": [0.8, 0.9], "failed": []}
    configurations = []
    for (name, values), size in zip(aucs.items(), (2**20, 2**25, None), strict=True):
        auc = {"mean": float(np.mean(values)) if values else None, "half_width": compare_report.half_width(values)}
        apart = {"mean": 0.12, "low": 0.1, "high": 0.14} if name == "large" else None
        configurations.append({"name": name, "auc": auc | {"difference": apart}, "table_bytes": size})
    result = {"seeds": [0, 1], "reference": "small", "configurations": configurations}
    axes, differences = compare_report.draw(result).axes
    assert axes.get_legend_handles_labels()[1] == ["small", "large"]
    assert axes.get_xscale() == "log"
    for container, x, mean in zip(axes.containers, (1, 32), (0.71, 0.85), strict=True):
        assert container.lines[0].get_xydata().tolist() == [[x, pytest.approx(mean)]]
        (bar,) = container.lines[2][0].get_segments()
        half = 12.7062 * np.std(aucs[("small", "large")[x > 1]], ddof=1) / 2**0.5
        assert np.ptp(bar[:, 1]) / 2 == pytest.approx(half, rel=1e-4)
    (container,) = differences.containers
    assert container.lines[0].get_xydata().tolist() == [[32, pytest.approx(0.12)]]
    assert container.lines[2][0].get_segments()[0][:, 1].tolist() == pytest.approx([0.1, 0.14])
    assert differences.get_ylabel().startswith("difference to small")
    for panel in (axes, differences):
        low, high = panel.get_ylim()
        ends = [bar.get_segments()[0][:, 1] for c in panel.containers for bar in c.lines[2]]
        assert low < np.min(ends)
        assert np.max(ends) < high
