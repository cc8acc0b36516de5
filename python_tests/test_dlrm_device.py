"""The trainer on a GPU, tested without one: what moves there, and errors without a GPU."""

from __future__ import annotations

import json
import re
from importlib import metadata
from pathlib import Path

import pytest
import torch
from command_lines import main
from dlrm_cases import Changed
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

import rec_kernels
from rec_kernels.dlrm import DLRM, Batch, DeviceError, TrainConfig, checkpoint, devices, evaluate, train
from rec_kernels.dlrm.data import DataError
from rec_kernels.dlrm.scores import Window
from rec_kernels.dlrm.synthetic import Synthetic
from rec_kernels.nn import late_errors

pytestmark = pytest.mark.usefixtures("no_pictures")
OPTIONS = {"data": "synthetic", "rows": 3000, "table_rows": 200, "batch_size": 500}
FLAGS = ["--data", "synthetic", "--rows", "3000", "--table-rows", "200", "--batch-size", "500"]
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def config(tmp_path: Path, **options) -> TrainConfig:
    return TrainConfig(**OPTIONS | {"runs_dir": str(tmp_path), "run": "run"} | options)


def batch_of(data: Synthetic) -> Batch:
    return next(data.batches("train", 500))


@no_gpu
@pytest.mark.parametrize("command", ["train", "evaluate", "compare"])
def test_no_gpu_is_one_line(command: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A missing GPU is reported in one line, and no folder is left behind."""
    train(config(tmp_path), progress=False)
    flags = {
        "train": ["train", *FLAGS, "--runs-dir", str(tmp_path)],
        "evaluate": ["evaluate", str(tmp_path / "run")],
        "compare": ["compare", "a", "b:lr=0.5", *FLAGS, "--runs-dir", str(tmp_path / "compared")],
    }[command]
    assert main([*flags, "--device", "cuda"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: device is 'cuda', but torch {torch.__version__} ")
    assert error.endswith(": choose device cpu")
    assert [path.name for path in tmp_path.iterdir() if path.name != "compared"] == ["run"]
    assert not list(tmp_path.glob("compared/*/*/*"))


def test_other_devices_are_refused(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["evaluate", "run", "--device", "tpu"])
    assert re.search("'tpu' .choose from '?cpu'?, '?cuda'?", capsys.readouterr().err)


def test_a_gpu_needs_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU without kernels of this package is rejected."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(devices.rk, "build_info", lambda: {"cuda_unavailable": "no library", "triton_in_use": False})
    with pytest.raises(DeviceError, match="rec_kernels has no kernels for a GPU: no library; and Triton"):
        devices.find("cuda")


def test_nothing_of_a_step_stays_behind() -> None:
    """With model and batch on the meta device, any tensor left on the CPU would raise in ops and layers."""
    data = Synthetic(3000, 200)
    model = DLRM(data.features, data.num_dense).to("meta")
    batch = batch_of(data).to("meta")
    tensors = [batch.dense, batch.label, batch.features.values(), batch.shared.offsets()]
    assert all(tensor.is_meta for tensor in tensors)
    logits = model(batch)
    assert logits.is_meta
    assert model.device.type == "meta"
    logits.sum().backward()
    assert all(weight.grad.is_meta for weight in model.dense_parameters())
    with pytest.raises((ValueError, RuntimeError), match="device"):
        model(batch._replace(features=batch_of(data).features))


def test_every_batch_goes_to_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of training, evaluation and test move to the device from pinned memory, without waiting."""
    moves = []

    def to(batch: Batch, device: torch.device, *, non_blocking: bool = False) -> Batch:
        if len(batch.label) > 1:  # except the row that counts the model's operations
            moves.append((str(device), non_blocking, len(batch.label)))
        return batch

    def pin_memory(batch: Batch) -> Batch:
        moves.append("pinned")
        return batch

    monkeypatch.setattr(Batch, "to", to)
    monkeypatch.setattr(Batch, "pin_memory", pin_memory)
    options = {"valid_fraction": 0.3, "eval_every": 3}
    expected = train(config(tmp_path, run="cpu", **options), progress=False)
    assert not moves
    assert expected["device"] == "cpu"
    # Claims to be a GPU, so that batches are moved to it, but keeps them.
    monkeypatch.setattr(DLRM, "device", torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU of {device}")
    found = train(config(tmp_path, run="gpu", **options), progress=False)
    sizes = [428] + [500] * 6  # of the test, four batches and an evaluation of two; the order of threads varies
    assert moves.count("pinned") == 7
    assert sorted(part for part in moves if part != "pinned") == [("cuda:0", True, size) for size in sizes]
    assert found["device"] == "GPU of cuda:0"
    assert found["log_loss"] == expected["log_loss"]
    assert "<td>device</td><td>GPU of cuda:0</td>" in (tmp_path / "gpu" / "report.html").read_text()


def test_labels_are_looked_at_before_a_gpu_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels are checked on the CPU: checking them on the GPU would make every step wait."""
    pinned: list[Batch] = []
    monkeypatch.setattr(DLRM, "device", torch.device("cuda", 0))
    monkeypatch.setattr(Batch, "pin_memory", lambda batch: pinned.append(batch))
    monkeypatch.setattr(devices, "gpu_name", lambda device: "Some GPU")
    data = Synthetic(3000, 200)
    wrong = Changed(data, lambda batches: (batch._replace(label=batch.label + 2) for batch in batches))
    with pytest.raises(DataError, match=r"batch 0 of split .train.: label\[\d+\] is 2\.0, must be 0 or 1"):
        train(config(tmp_path, data="synthetic"), wrong, progress=False)
    assert not pinned


def test_scores_of_a_window_stay_on_the_device() -> None:
    """A window copies its scores only for a record, because a copy waits for a backward; a saved window resumes."""
    Window().add(torch.empty(3, device="meta"), torch.empty(3, device="meta"))  # meta tensors cannot be copied
    logits, labels = torch.randn(8, 5), torch.rand(8, 5).round()
    whole, stopped = Window(), Window()
    for i in range(8):
        if i == 4:
            stopped = Window(stopped.state())
        for part in (whole, stopped):
            part.add(logits[i], labels[i])
            part.steps += 1
    for part in (whole, stopped):
        record = part.record()
        assert (record["steps"], record["examples"]) == (8, 40)
        assert record["loss"] == binary_cross_entropy_with_logits(logits.flatten(), labels.flatten()).item()
    saved = [part.state() for part in (whole, stopped)]
    assert all(torch.equal(state["logits"], logits.flatten()) for state in saved)


def test_a_checkout_that_is_not_installed_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries built in place have no distribution metadata."""

    def unknown(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", unknown)
    assert devices.versions()["rec_kernels"] == rec_kernels.__version__
    assert list(devices.versions()) == ["python", "rec_kernels", "torch", "numpy", "scikit-learn"]


def test_what_a_run_remembers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The config has the device, and versions have the GPU's name; a resumed run may use another device."""
    monkeypatch.setattr(devices, "find", lambda name: torch.device("cpu"))
    monkeypatch.setattr(devices, "gpu_name", lambda device: "Some GPU")
    train(config(tmp_path, device="cuda"), progress=False)
    settings = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (settings["config"]["device"], settings["versions"]["gpu"]) == ("cuda", "Some GPU")
    monkeypatch.undo()
    assert train(config(tmp_path), resume=tmp_path / "run", progress=False)["device"] == "cpu"
    assert evaluate(tmp_path / "run", device="cpu")["examples"] == 428


def test_bad_ids_end_a_run_that_is_told_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run ends by the end of the test, and before anything is saved."""
    events, check = [], late_errors.LateErrors.check

    def recorded(reports: late_errors.LateErrors, position: Tensor) -> None:
        events.append(reports)
        check(reports, position)

    monkeypatch.setattr(late_errors.LateErrors, "check", recorded)
    monkeypatch.setattr(checkpoint, "save", lambda *_: events.append("saved"))
    train(config(tmp_path, valid_fraction=0.3, eval_every=3), progress=False)
    evaluated, saved, tested = events[:1], events[1:-1], events[-1:]
    assert evaluated == saved[:1] == tested
    assert saved[1:] == ["saved"]


@gpu
def test_train_on_a_gpu(tmp_path: Path) -> None:
    """Scores equal the CPU's up to rounding; checkpoints are interchangeable."""
    scores = {name: train(config(tmp_path, run=name, device=name), progress=False) for name in ("cpu", "cuda")}
    assert scores["cuda"]["log_loss"] == pytest.approx(scores["cpu"]["log_loss"], rel=1e-3)
    assert scores["cuda"]["device"] == torch.cuda.get_device_name()
    for name, other in (("cpu", "cuda"), ("cuda", "cpu")):
        again = evaluate(tmp_path / name, device=other)
        assert again["log_loss"] == pytest.approx(scores[name]["log_loss"], rel=1e-4)
        more = train(config(tmp_path, run=name, device=other), resume=tmp_path / name, progress=False)
        assert more["log_loss"] == pytest.approx(scores[name]["log_loss"], rel=1e-4)
