"""The scripts in examples/: what they say comes out."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def replace_embeddings() -> ModuleType:
    """examples/replace_embeddings.py."""
    spec = importlib.util.spec_from_file_location("replace_embeddings", EXAMPLES / "replace_embeddings.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclass looks for annotations
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("name", "package"), [("fbgemm", "fbgemm_gpu"), ("torchrec", "torchrec")])
def test_replace_embeddings(name: str, package: str, replace_embeddings: ModuleType) -> None:
    """The same losses with the other package's embeddings and with ours, and the model learns."""
    pytest.importorskip(package)
    assert replace_embeddings.compare(name, 40) < 1e-5
    _, mine, _ = getattr(replace_embeddings, name)()
    losses = replace_embeddings.losses(mine, [], 60)
    assert sum(losses[-10:]) < sum(losses[:10])


def test_ours_alone_learns(replace_embeddings: ModuleType) -> None:
    """Without either package: what takes their place trains; and the command says that there is nothing to replace."""
    tables = replace_embeddings.ours(replace_embeddings.rk.RowwiseAdagrad(lr=0.05))
    names = replace_embeddings.NAMES
    model = replace_embeddings.Model(
        lambda b: tables(replace_embeddings.rk.KeyedJaggedTensor(names, b.values, offsets=b.offsets)).values()
    )
    losses = replace_embeddings.losses(model, [], 60)
    assert sum(losses[-10:]) < sum(losses[:10])


def test_nothing_to_replace(
    replace_embeddings: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Neither package is there: an error that says so."""
    monkeypatch.setattr(replace_embeddings, "_installed", lambda _: False)
    monkeypatch.setattr(sys, "argv", ["replace_embeddings.py"])
    with pytest.raises(SystemExit):
        replace_embeddings.main()
    assert "neither fbgemm_gpu nor torchrec is installed" in capsys.readouterr().err
