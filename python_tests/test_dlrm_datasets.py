"""Data sets by name: options, invalid objects, and the example of docs/data.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rec_kernels.dlrm import checkpoint
from rec_kernels.dlrm.__main__ import main
from rec_kernels.dlrm.config import TrainConfig
from rec_kernels.dlrm.data import DataError
from rec_kernels.dlrm.reader import MEMBERS, open_data
from rec_kernels.dlrm.train import train

pytestmark = pytest.mark.usefixtures("no_pictures")
PAGE = (Path(__file__).parents[1] / "docs" / "data.md").read_text()


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module for ``module:function``; returns its name."""

    def make(source: str) -> str:
        name = f"data_of_{tmp_path.name.replace('-', '_')}"
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        return name

    return make


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"path": "x"},
            r"path is 'x', which has no effect without data 'criteo' or 'module:function' .now 'complete",
        ),
        ({"rows": 9}, r"rows is 9, which has no effect without data 'criteo' or 'synthetic' .now 'complete"),
        (
            {"data": "criteo", "path": "x", "weeks": 3},
            r"weeks is 3, which has no effect without data 'completejourney'",
        ),
        ({"data": "synthetic", "path": "x"}, r"path is 'x', which has no effect without data 'criteo' or"),
        ({"data": "synthetic", "weeks": 3}, r"weeks is 3, which has no effect without data 'compl"),
        (
            {"data": "criteo", "path": "x", "history": 20},
            r"history is 20, which has no effect without data 'completejourney' or 'synthetic'",
        ),
        ({"history": 9}, r"history is 9, allowed are 10 to 200 products"),
        ({"unchanged": 0.5}, r"unchanged is 0.5, which has no effect without data 'synthetic'"),
        ({"data": "synthetic", "samples_per_session": 1e6}, r"samples_per_session is 1000000.0, allowed are 1 to 8192"),
        ({"data": "math:sqrt", "table_rows": 3}, r"table_rows is 3, which has no effect without data 'criteo' or"),
        ({"data": "criteo"}, r"data is 'criteo', which needs path: a file in Criteo's format"),
        ({"data": "criteo", "path": "nowhere"}, r"nowhere does not exist"),
        (
            {"data": "math:sqrt", "path": "x"},
            r"path is 'x', but data is 'math:sqrt', which takes no path: leave it out",
        ),
        ({"data": "builtins:dict", "path": "x"}, r"data is 'builtins:dict', which takes no path"),
        ({"data": "kaggle"}, r"'kaggle', allowed are completejourney, criteo, synthetic and module"),
        ({"data": "no_such_module:f"}, r"'no_such_module:f': No module named 'no_such_module'"),
        ({"data": "math:nothing"}, r"'math:nothing': module 'math' has no attribute 'nothing'"),
        ({"data": ":f"}, r"data is ':f': Empty module name"),
        ({"data": "math:pi"}, r"data is 'math:pi', which is float, expected a function that returns a data set"),
        (
            {"data": "builtins:dict"},
            r"'builtins:dict', which returned dict without name, num_dense, features, num_rows",
        ),
    ],
)
def test_what_is_no_data_set_is_refused(options, message):
    with pytest.raises(DataError, match=message):
        open_data(TrainConfig(**options))


@pytest.mark.parametrize("missing", MEMBERS)
def test_a_missing_member_is_named(module, missing):
    members = ", ".join(f"{member}='x'" for member in MEMBERS if member != missing)
    name = module(f"from types import SimpleNamespace\ndef make(): return SimpleNamespace({members})")
    with pytest.raises(DataError, match=f"returned SimpleNamespace without {missing}: a data set has name, num_dense"):
        open_data(TrainConfig(data=f"{name}:make"))


@pytest.mark.parametrize("name", ["../up", "", None])
def test_a_name_that_cannot_be_a_folder_is_refused(module, name):
    source = f"from types import SimpleNamespace as S\ndef make(): return S(**dict.fromkeys({MEMBERS}, {name!r}))"
    with pytest.raises(DataError, match=re.escape(f"a data set of name {name!r}, allowed are at most 200 letters")):
        open_data(TrainConfig(data=f"{module(source)}:make"))


def test_a_function_gets_the_options_that_it_names(module):
    """A function gets path and data_dir if it names them and they are given."""
    source = "from types import SimpleNamespace as S\ndef all(path='p', data_dir='d'): return S(**dict.fromkeys("
    name = module(f"{source}{MEMBERS}, path + '.' + data_dir))\ndef none(): return all()")
    for given, expected in ({}, "p.d"), ({"path": "x"}, "x.d"), ({"path": "x", "data_dir": "y"}, "x.y"):
        assert open_data(TrainConfig(data=f"{name}:all", **given)).name == expected
    assert open_data(TrainConfig(data=f"{name}:none", data_dir="y")).name == "p.d"


def test_synthetic_takes_its_options():
    data = open_data(TrainConfig(data="synthetic", rows=70, table_rows=30))
    assert (data.num_rows("train"), data.num_rows("test"), data.features[0].num_embeddings) == (70, 10, 30)
    data = open_data(TrainConfig(data="synthetic", samples_per_session=3, unchanged=0.0, history=5))
    assert data.name == "synthetic-session3-unchanged0-history5"
    data = open_data(TrainConfig(data="synthetic"))
    assert (data.num_rows("train"), data.features[0].num_embeddings) == (1_000_000, 100_000)


def test_criteo_takes_its_options(tmp_path):
    file = tmp_path / "a.tsv"
    file.write_text("".join(f"{row % 2}{(chr(9) + str(row)) * 39}\n" for row in range(20)))
    store = tmp_path / "store"
    data = open_data(TrainConfig(data="criteo", path=str(file), rows=14, table_rows=3, data_dir=str(store)))
    assert (data.num_rows("train"), data.num_rows("test"), data.features[0].num_embeddings) == (12, 2, 3)
    assert len(list(store.iterdir())) == 1


def test_command_line_trains_on_criteo_and_reports_errors(tmp_path, capsys):
    file = tmp_path / "a.tsv"
    lines = [f"{row % 2}{(chr(9) + str(row % 2)) * 39}\n" for row in range(70)]
    file.write_text("".join(lines))
    command = ["train", "--data", "criteo", "--path", str(file), "--data-dir", str(tmp_path / "store")]
    command += ["--batch-size", "6", "--runs-dir", str(tmp_path / "runs"), "--threads", "1"]
    assert main(command) == 0
    assert "test rows           10, 50.0% positive" in capsys.readouterr().out
    file.write_text("".join([*lines, "3\n"]))
    assert main(command) == 1
    assert f"error: {file}, Row #71: Expected 40 columns" in capsys.readouterr().err


def test_data_that_was_moved_is_found_again_and_no_other_is_taken(tmp_path, monkeypatch, capsys):
    """Moved data is recognized by its contents; other data with equal name, sizes and features is rejected."""

    def write(name: str, positive: int) -> str:
        rows = range(70)
        (tmp_path / name).write_text("".join(f"{row % 7 < positive:d}{(chr(9) + str(row % 2)) * 39}\n" for row in rows))
        return str(tmp_path / name)

    first, other, run = write("a.tsv", 3), write("b.tsv", 4), str(tmp_path / "runs" / "x")
    options = ["--data-dir", str(tmp_path / "store"), "--batch-size", "6", "--threads", "1", "--checkpoint-every", "2"]
    options += ["--runs-dir", str(tmp_path / "runs")]
    assert main(["train", "--data", "criteo", "--path", first, "--run", "x", *options]) == 0
    scores = [line for line in capsys.readouterr().out.splitlines() if line.startswith("test AUC")]
    moved = str(tmp_path / "moved.tsv")
    Path(first).rename(moved)
    for command in (["train", "--resume", run], ["evaluate", run]):
        assert main(command) == 1
        assert f"error: {first} does not exist" in capsys.readouterr().err
        assert main([*command, "--path", other]) == 1
        assert "was written with other data" in capsys.readouterr().err
        assert main([*command, "--path", moved]) == 0
        assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("test AUC")] == scores
    reads, load = [], checkpoint.load
    monkeypatch.setattr(checkpoint, "load", lambda directory: reads.append(directory) or load(directory))
    for command in (["train", "--resume", run], ["evaluate", run]):
        assert main([*command, "--path", moved]) == 0
    assert reads == [Path(run)] * 2  # data may have many gigabytes
    with pytest.raises(SystemExit, match="2"):
        main(["evaluate", run, "--path", ""])


def test_example_of_the_documentation_is_a_data_set_that_can_be_learnt(module, tmp_path):
    (example,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    name = module(example)
    config = TrainConfig(data=f"{name}:clicks", batch_size=50, epochs=3, threads=1, runs_dir=str(tmp_path / "runs"))
    test = train(config)
    assert test["examples"] == 1000
    assert test["auc"] > 0.9
