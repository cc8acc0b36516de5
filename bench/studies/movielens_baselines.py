"""Simple models on MovieLens, for scale: ``python -m bench.studies.movielens_baselines --path ml-100k``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
from scipy import sparse
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, roc_auc_score

import bench
from bench.studies.movielens import GENRE, HISTORY, PRIOR, MovieLens, Prepared

ITERATIONS = 2000


def group_mean(data: Prepared, feature: str) -> np.ndarray:
    """Mean training label of each row's user or movie, shrunk to the global mean, float64 [N]."""
    ids, label = data.ids[list(data.num_embeddings).index(feature)], data.label[: data.train_rows]
    trained, rows = ids[: data.train_rows], data.num_embeddings[feature]
    likes, counts = np.bincount(trained, label, minlength=rows), np.bincount(trained, minlength=rows)
    return ((likes + PRIOR * label.mean()) / (counts + PRIOR))[ids]


def one_hot(data: Prepared, features: list[str]) -> sparse.csr_matrix:
    """One-hot encoding, [N, sum of the tables' rows]."""
    names, columns = list(data.num_embeddings), []
    for name in features:
        ids = data.ids[names.index(name)]
        shape = len(ids), data.num_embeddings[name]
        columns.append(sparse.csr_matrix((np.ones(len(ids)), (np.arange(len(ids)), ids)), shape))
    return sparse.hstack(columns, "csr")


def genres(data: Prepared) -> sparse.csr_matrix:
    """Genre fractions of each row's movie, [N, table rows]."""
    lengths = np.diff(data.genre_offsets)
    shares = np.repeat(1 / np.maximum(lengths, 1), lengths)
    shape = len(lengths), data.num_embeddings[GENRE]
    return sparse.csr_matrix((shares, data.genres, data.genre_offsets), shape)[data.movie]


def logistic(data: Prepared, columns: sparse.csr_matrix) -> np.ndarray:
    """Predictions for the test rows."""
    model = LogisticRegression(max_iter=ITERATIONS).fit(columns[: data.train_rows], data.label[: data.train_rows])
    return model.predict_proba(columns[data.train_rows :])[:, 1]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", required=True, help="folder of a MovieLens data set, or its file of ratings")
    parser.add_argument("--data-dir", help="folder of the prepared data (default: ~/.cache/rec_kernels)")
    given = parser.parse_args(argv)
    data = MovieLens(given.path, data_dir=given.data_dir).prepared
    every = [name for name in data.num_embeddings if name not in (GENRE, HISTORY)]
    everything = sparse.hstack([one_hot(data, every), genres(data), sparse.csr_matrix(data.dense)], "csr")
    label = data.label[data.train_rows :]
    rows = {
        "movie mean": group_mean(data, "movie")[data.train_rows :],
        "user mean": group_mean(data, "user")[data.train_rows :],
        "logistic regression, user and movie": logistic(data, one_hot(data, ["user", "movie"])),
        "logistic regression, all but the history": logistic(data, everything),
    }
    scores = ((n, f"{roc_auc_score(label, p):.4f}", f"{log_loss(label, p):.4f}") for n, p in rows.items())
    print(bench.table(("", "test AUC", "log loss"), scores))


if __name__ == "__main__":
    main()
