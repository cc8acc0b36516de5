"""Links and pipes in an untrusted run folder: no file elsewhere changes, and no pipe is waited for."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from dlrm_tiny import TinyData
from matplotlib.figure import Figure

from bench import pictures
from bench.studies import compare
from rec_kernels.dlrm import TrainConfig, model_factory, runs
from rec_kernels.dlrm.__main__ import main
from rec_kernels.dlrm.data import DataError
from rec_kernels.dlrm.train import Run, train

pytestmark = pytest.mark.usefixtures("no_pictures")
FLAGS = ["--data", "dlrm_tiny:tiny"]
# Files that a continued run writes; a name with a leading dot is a temporary file.
REPLACED = ["checkpoint.pt", ".checkpoint.pt.new", "report.html", ".report.html.new", "metrics.jsonl"]


@pytest.fixture
def run(stopped, tmp_path):
    """A copy of the stopped run; a test that waits for a pipe times out."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("waits for a pipe"))
    signal.alarm(300)
    yield Path(shutil.copytree(stopped, tmp_path / "run"))
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def move_out(path: Path, link) -> Path:
    """Moves a file, makes ``link`` lead to it from the old name, and returns the new path."""
    target = path.parent.parent / "elsewhere"
    if path.exists():
        path.rename(target)
    else:
        target.write_text("precious")
    link(target, path)
    return target


@pytest.mark.parametrize("link", [os.symlink, os.link])
@pytest.mark.parametrize("name", REPLACED)
def test_links_are_replaced(name, link, run):
    target = move_out(run / name, link)
    before = target.read_bytes()
    assert main(["train", "--resume", str(run), *FLAGS]) == 0
    assert target.read_bytes() == before
    assert not (run / name).is_symlink()
    assert {path.stat().st_nlink for path in run.iterdir() if path.is_file()} == {1}


def test_a_run_goes_on_when_its_folder_is_copied_as_hard_links(run, monkeypatch):
    """A copy by ``cp -al``, as a backup, does not change when the run resumes."""
    step, copies = Run._step, []

    def copied_before(self, batches):
        copies.append(Path(shutil.copytree(run, run.parent / f"copy{self.step}", copy_function=os.link)))
        return step(self, batches)

    monkeypatch.setattr(Run, "_step", copied_before)
    (run / ".metrics.jsonl.new").symlink_to(run.parent / "elsewhere")
    before = (run / "metrics.jsonl").read_bytes()
    assert main(["train", "--resume", str(run), *FLAGS]) == 0
    assert not (run.parent / "elsewhere").exists()
    lengths = [len((copy / "metrics.jsonl").read_bytes().splitlines()) for copy in copies]
    assert lengths == [3, 4, 5, 6, 7]  # one for each previous step
    assert (copies[0] / "metrics.jsonl").read_bytes() == before
    assert len((run / "metrics.jsonl").read_bytes().splitlines()) == 9
    assert {path.name for path in run.iterdir() if path.name.startswith(".")} == set()


def test_records_are_not_begun_behind_a_link(run, capsys):
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").symlink_to(run.parent / "new")
    assert main(["train", "--resume", str(run), *FLAGS]) == 1
    assert "metrics.jsonl has 0 bytes, expected" in capsys.readouterr().err
    assert not (run.parent / "new").exists()


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json", "checkpoint.pt"])
def test_pipes_are_refused(name, run, capsys):
    (run / name).unlink()
    os.mkfifo(run / name)
    assert main(["train", "--resume", str(run), *FLAGS]) == 1
    assert f"{run / name} is not an ordinary file" in capsys.readouterr().err


@pytest.mark.parametrize("name", [".checkpoint.pt.new", "report.html"])
def test_pipes_are_replaced(name, run):
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    assert main(["train", "--resume", str(run), *FLAGS]) == 0
    assert not (run / name).is_fifo()


def test_pictures_replace_links(run):
    """Pictures of comparisons replace links by files."""
    (run / "compare.png").symlink_to(run.parent / "compare.png")
    (run.parent / "compare.png").write_text("precious")
    pictures.save(Figure(), run / "compare.png", dpi=10)
    assert (run.parent / "compare.png").read_text() == "precious"
    assert (run / "compare.png").stat().st_size > 100


@pytest.mark.parametrize("name", ["embeddings.rows", "embeddings.rows.log"])
def test_tables_on_disk_are_not_those_of_a_link(name, tmp_path):
    (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=rf"{name} is a symbolic link"):
        model_factory.row_cache(TrainConfig(backing="disk"), tmp_path)


def test_comparisons_change_nothing_elsewhere(tmp_path, monkeypatch):
    folder = tmp_path / "both"
    folder.mkdir()
    base = TrainConfig(data="dlrm_tiny:tiny", batch_size=200, runs_dir=str(tmp_path))
    plan = compare.plan(["a", "b:lr=0.1"], base, "1", "both")
    target = tmp_path / "precious"
    target.write_text("precious")
    (folder / ".lock").symlink_to(target)
    with pytest.raises(OSError, match=r"symbolic links.*\.lock"):
        compare.run(plan)
    assert target.read_text() == "precious"
    (folder / ".lock").unlink()
    (tmp_path / "other").mkdir()
    (folder / "b-seed0").symlink_to(tmp_path / "other")
    with pytest.raises(DataError, match="b-seed0 is a symbolic link"):
        compare.run(plan)
    assert not list((tmp_path / "other").iterdir())
    assert json.dumps(sorted(os.listdir(folder))) == '[".lock", "b-seed0"]'


def test_a_folder_is_trained_by_one_process(tmp_path):
    """Two processes would write the same checkpoint."""
    config, data = TrainConfig(runs_dir=str(tmp_path), run="one", batch_size=50), TinyData()
    train(config, data)
    program = (
        "import sys; from pathlib import Path; from rec_kernels.dlrm import runs\n"
        "with runs.locked(Path(sys.argv[1])):\n    print('claimed', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "one")], stdin=-1, stdout=-1) as other:
        assert other.stdout.readline() == b"claimed\n"
        with pytest.raises(runs.RunExistsError, match=r"another process trains .*one: wait for it, or stop it"):
            train(config, data, resume=tmp_path / "one")
        other.stdin.close()
    train(config, data, resume=tmp_path / "one")
