"""Types of the public names in a user's file, according to mypy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import rec_kernels as rk

pytest.importorskip("mypy")
PACKAGE = Path(rk.__file__).parent
USER = """
import torch
from typing_extensions import assert_type

import rec_kernels as rk

tables = [rk.EmbeddingBagConfig(10, 4, name="t", feature_names=["f"], compression=rk.QuotientRemainder(2))]
collection = rk.EmbeddingBagCollection(tables, optimizer=rk.Adam(0.1, betas=(0.9, 0.99)), cache=rk.RowCache(0.1))
collection.load_state_dict(collection.state_dict())
batch = rk.KeyedJaggedTensor(["f"], torch.tensor([1]), lengths=torch.tensor([1]))
assert_type(collection.forward(batch).values(), torch.Tensor)
assert_type(collection(batch), rk.KeyedTensor)
assert_type(collection.for_serving()(batch)["f"], torch.Tensor)
rows = rk.EmbeddingCollection([rk.EmbeddingConfig(10, 4, name="t", feature_names=["f"])])
assert_type(rows({"f": torch.tensor([1])}), dict[str, rk.JaggedTensor])
assert_type(rows.for_serving()(batch), dict[str, rk.JaggedTensor])
assert_type(rk.Embedding(10, 4)(torch.tensor([1])), torch.Tensor)
assert_type(rk.EmbeddingBag(10, 4)(torch.tensor([[1]])), torch.Tensor)
assert_type(rk.scale_rows(torch.ones(2, 3), torch.ones(2)), torch.Tensor)
scheduler = torch.optim.lr_scheduler.StepLR(collection.fused_optimizer, 1)
"""
WRONG = """
import rec_kernels as rk

rk.RowwiseAdagrad(lr="0.1")
rk.EmbeddingBagConfig(10, 4, name="t", feature_names="f")
rk.EmbeddingBagCollection([], optimizer="adam")
rk.RowCache(None)
rk.jagged_permute()
rk.Embedding(10, 4)([1])
rk.EmbeddingBag(10, 4)()
"""


@pytest.fixture(scope="module")
def mypy_output(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The output of one run of mypy on both files."""
    folder = tmp_path_factory.mktemp("types")
    files = {folder / "user.py": USER, folder / "wrong.py": WRONG}
    for path, text in files.items():
        path.write_text(text)
    # mypy runs in the repository's root, whose .mypy_cache has torch's types from `make lint`.
    command = [sys.executable, "-m", "mypy", "--config-file", str(PACKAGE.parent / "pyproject.toml"), *map(str, files)]
    done = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "(checked 2 source files)" in done.stdout
    return done.stdout


def test_the_package_is_marked() -> None:
    """Without py.typed, type checkers would treat every name as Any."""
    assert (PACKAGE / "py.typed").exists()


def test_right_use_is_accepted(mypy_output: str) -> None:
    """Tables, collections, batches and ops of the README have no type errors."""
    assert all("wrong.py:" in line for line in mypy_output.splitlines() if ": error:" in line), mypy_output


def test_wrong_use_is_refused(mypy_output: str) -> None:
    """Each wrong use is reported with its line."""
    lines = {int(line.split("wrong.py:")[1].split(":")[0]) for line in mypy_output.splitlines() if "wrong.py:" in line}
    assert lines == {number for number, line in enumerate(WRONG.splitlines(), 1) if line.startswith("rk.")}, mypy_output
