"""MovieLens as a binary task: does this user rate this movie with 4 stars or more?

Source: F. M. Harper and J. A. Konstan, "The MovieLens Datasets: History and Context", ACM TiiS 5(4), 2015. The files
are GroupLens' (https://grouplens.org/datasets/movielens), under terms of use of their own.

The last tenth of each user's ratings is the test. Features of the past use *earlier training ratings*, from before the
row's second; labels of test rows are in no feature. Training rows include ratings that other users gave after a test
row: a split by time would leave few users with rows in both splits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

import rec_kernels as rk
from bench.studies.movielens_reader import USERS, Source, find, read_movies, read_ratings, read_users
from rec_kernels.dlrm.array_cache import base_directory, fingerprint, ids_by_appearance, open_directory
from rec_kernels.dlrm.data import Batch, DataError, Feature, Rows

FORMAT = 1  # increase when the same source gives different arrays
LIKED = 4  # stars
TEST_SHARE = 10  # ratings of a user per test rating
HISTORY_LENGTH = 50
PRIOR = 5  # pseudo-ratings of the prior of every mean, half of them LIKED or more
DAY, HOUR = 86_400, 3_600  # seconds
FIRST_WEEKDAY = 3  # of 1970-01-01, a Thursday; Monday is 0
GENRE, HISTORY = "genre", "history"
DENSE = ("users_ratings", "movies_ratings", "users_mean", "movies_mean")


@dataclass(frozen=True)
class Prepared:
    """Training rows, then test rows, each sorted by time, user and movie.

    Args:
        ids: int32 [F, N], a row for each feature of one id, in the order of ``num_embeddings``; 0 means "unseen in
            training".
        dense: float32 [N, 4], the columns of ``DENSE``: log1p of counts, and means.
        label: float32 [N], 1 for ``LIKED`` stars or more.
        movie: int32 [N], index of the row's bag of genres.
        genre_offsets: int64 [bags + 1] into ``genres``; the last bag, for unlisted movies, is empty.
        genres: int32, ids of "genre".
        past: int64 [2, N], begin and end in ``seen`` of the user's previous movies, at most 50.
        seen: int32, ids of "movie": the training rows by user, time and movie.
        num_embeddings: table rows by feature, including row 0; "genre" and "history" are the last.
        train_rows: first test row.
    """

    ids: np.ndarray
    dense: np.ndarray
    label: np.ndarray
    movie: np.ndarray
    genre_offsets: np.ndarray
    genres: np.ndarray
    past: np.ndarray
    seen: np.ndarray
    num_embeddings: dict[str, int]
    train_rows: int


class MovieLens(Rows):
    """The data set (``rec_kernels.dlrm.DataSet``), prepared on the first use.

    Args:
        path: the folder of a MovieLens data set, or its file of ratings: ``u.data``, ``ratings.dat``, ``ratings.csv``
            or RecBole's ``*.inter``.
        data_dir: folder of the prepared data, ``~/.cache/rec_kernels`` by default.
        progress: show a progress bar while preparing.

    Attributes:
        prepared: its rows.

    Raises:
        DataError: files are missing or malformed, or no user has enough ratings for a test; names the place.
        OSError: the prepared data cannot be written.
    """

    name = "movielens"
    num_dense = len(DENSE)

    def __init__(self, path: str | Path, *, data_dir: str | Path | None = None, progress: bool = False):
        source = find(Path(path))
        folder = hashlib.sha256(str(source.ratings.path.resolve()).encode()).hexdigest()[:12]
        directory = base_directory(data_dir) / f"movielens-{folder}"
        values = open_directory(directory, _identity(source), lambda folder: vars(_read(source, progress)))
        self.fingerprint = fingerprint(directory)
        self.prepared = Prepared(**values)
        self.rows, self.train_rows = len(self.prepared.label), self.prepared.train_rows
        rows = self.prepared.num_embeddings
        self.features = [Feature(name, count) for name, count in rows.items() if name not in (GENRE, HISTORY)]
        self._one_hot = [feature.name for feature in self.features]
        self.features.append(Feature(GENRE, rows[GENRE], pooling="mean"))
        # Ratings of a user in the same second are neighbours with equal histories.
        self.features.append(Feature(HISTORY, rows[HISTORY], pooling="mean", shared=True))

    def batch_of(self, rows: slice) -> Batch:
        """Makes the batch of these rows."""
        data = self.prepared
        ids = data.ids[:, rows].ravel()
        movie = data.movie[rows]
        ends, genres = _bags(data.genre_offsets[movie], data.genre_offsets[movie + 1], data.genres)
        offsets = np.concatenate([np.arange(len(ids)), len(ids) + ends])
        begin, end = data.past[:, rows]
        past_ends, past = _bags(begin, end, data.seen)
        return Batch(
            dense=torch.from_numpy(data.dense[rows].copy()),
            features=rk.KeyedJaggedTensor(
                [*self._one_hot, GENRE],
                torch.from_numpy(np.concatenate([ids, genres])),
                offsets=torch.from_numpy(offsets),
            ),
            label=torch.from_numpy(data.label[rows].copy()),
            shared=rk.KeyedJaggedTensor([HISTORY], torch.from_numpy(past), offsets=torch.from_numpy(past_ends)),
        )


def _bags(begin: np.ndarray, end: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Offsets int64 [bags + 1] of ``values[begin[0]:end[0]]``, ``values[begin[1]:end[1]]``, ..., and all of these."""
    offsets = np.concatenate([[0], np.cumsum(end - begin)])
    return offsets, values[np.arange(offsets[-1]) + np.repeat(begin - offsets[:-1], end - begin)]


def _identity(source: Source) -> dict[str, Any]:
    stats = [(path.name, path.stat()) for path in source.paths()]
    return {"format": FORMAT, "source": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]}


def _read(source: Source, progress: bool) -> Prepared:
    with tqdm(total=2, desc="preparing", unit="step", disable=not progress) as bar:
        users = None if source.users is None else read_users(source.users)
        ratings, movies = read_ratings(source.ratings), read_movies(source.movies)
        bar.update()
        prepared = build(ratings, movies, users)
        bar.update()
    if prepared.train_rows == len(ratings):
        raise DataError(
            f"{source.ratings.path} has {len(ratings)} ratings, none of them for the test: at least one user "
            f"needs {TEST_SHARE} ratings or more, not all in the same second"
        )
    return prepared


def build(ratings: pd.DataFrame, movies: pd.DataFrame, users: pd.DataFrame | None) -> Prepared:
    """Converts the frames of ``movielens_reader`` to arrays, independent of the order of their rows."""
    test = _is_test(ratings["user"].to_numpy(), ratings["timestamp"].to_numpy())
    order = np.lexsort((ratings["movie"], ratings["user"], ratings["timestamp"], test))
    rows, train_rows = ratings.iloc[order], len(ratings) - int(test.sum())
    label = (rows["rating"].to_numpy() >= LIKED).astype(np.float32)
    position = pd.Index(movies["movie"]).get_indexer(rows["movie"])  # -1: not listed
    ids, num_embeddings = [], {}
    for name, values in _feature_values(rows, position, movies, users):
        column, num_embeddings[name] = ids_by_appearance(values, train_rows)
        ids.append(column.astype(np.int32))
    genre_offsets, genres, num_embeddings[GENRE] = _genres(movies["genres"], position[:train_rows])
    num_embeddings[HISTORY] = num_embeddings["movie"]
    trained = (np.arange(len(rows)) < train_rows).astype(np.int64)
    dense, past, seen = _past(rows, trained, label, ids[list(num_embeddings).index("movie")])
    movie = np.where(position < 0, len(movies), position).astype(np.int32)
    return Prepared(np.stack(ids), dense, label, movie, genre_offsets, genres, past, seen, num_embeddings, train_rows)


def _is_test(user: np.ndarray, time: np.ndarray) -> np.ndarray:
    """True for the last tenth of each user's ratings, except those in the second of the last training rating."""
    order = np.lexsort((time, user))
    starts = np.flatnonzero(np.r_[True, np.diff(user[order]) != 0])
    counts = np.diff(np.r_[starts, len(user)])
    last_trained = time[order][starts + counts - counts // TEST_SHARE - 1]
    test = np.empty(len(user), dtype=bool)
    test[order] = time[order] > np.repeat(last_trained, counts)
    return test


def _feature_values(
    rows: pd.DataFrame, position: np.ndarray, movies: pd.DataFrame, users: pd.DataFrame | None
) -> Iterator[tuple[str, np.ndarray]]:
    """Name and raw values [N] of each one-hot feature; hours are UTC, because users' time zones are unknown."""
    time = rows["timestamp"].to_numpy()
    yield "user", rows["user"].to_numpy()
    yield "movie", rows["movie"].to_numpy()
    yield "year", np.append(movies["year"], 0)[position]
    yield "weekday", (time // DAY + FIRST_WEEKDAY) % 7
    yield "hour", time // HOUR % 24
    if users is not None:
        own = pd.Index(users["user"]).get_indexer(rows["user"])
        for name in USERS[1:]:
            yield name, np.append(pd.factorize(users[name])[0], -1)[own]


def _genres(of_movies: pd.Series, trained: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Offsets [movies + 2] and ids of every movie's genres, and the number of table rows.

    Args:
        of_movies: tuples of names.
        trained: positions in ``of_movies`` of the training rows' movies, -1 for none.
    """
    numbers: dict[str, int] = {}
    for movie in pd.unique(trained[trained >= 0]):
        for name in of_movies.iloc[movie]:
            numbers.setdefault(name, len(numbers) + 1)
    lengths = [*map(len, of_movies), 0]
    ids = [numbers.get(name, 0) for names in of_movies for name in names]
    return np.concatenate([[0], np.cumsum(lengths)]), np.array(ids, dtype=np.int32), len(numbers) + 1


def _past(
    rows: pd.DataFrame, trained: np.ndarray, label: np.ndarray, movie_ids: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``dense``, ``past`` and ``seen`` of ``Prepared``.

    Args:
        rows: sorted.
        trained: int64 [N], 1 for training rows, else 0.
        label, movie_ids: [N].
    """
    time = rows["timestamp"].to_numpy()
    liked = trained * label.astype(np.int64)
    dense = np.empty((len(rows), len(DENSE)), dtype=np.float32)
    for column, name in enumerate(("user", "movie")):
        group = rows[name].to_numpy()
        before = _EarlierSums(group, time)
        (_, count), (_, likes) = before.sums(trained), before.sums(liked)
        dense[:, column] = np.log1p(count)
        dense[:, 2 + column] = (likes + PRIOR / 2) / (count + PRIOR)
        if name == "user":
            start, count = before.sums(trained)
            past = np.stack([start + np.maximum(count - HISTORY_LENGTH, 0), start + count])
            seen = movie_ids[before.order][trained[before.order] == 1]
    return dense, past, seen


class _EarlierSums:
    """Sums over a group's rows at earlier times.

    Args:
        group, time: int64 [N].

    Attributes:
        order: rows sorted by group, then time (stable).
    """

    def __init__(self, group: np.ndarray, time: np.ndarray):
        self.order = np.lexsort((time, group))
        group, time = group[self.order], time[self.order]
        new_group = np.r_[True, group[1:] != group[:-1]]
        new_time = new_group | np.r_[True, time[1:] != time[:-1]]
        position = np.arange(len(group))
        self._group = np.maximum.accumulate(np.where(new_group, position, 0))
        self._time = np.maximum.accumulate(np.where(new_time, position, 0))

    def sums(self, amount: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sums of int64 [N]: over all earlier groups in ``order``, and over the group's rows at earlier times."""
        total = np.concatenate([[0], np.cumsum(amount[self.order])])
        groups, own = np.empty_like(amount), np.empty_like(amount)
        groups[self.order] = total[self._group]
        own[self.order] = total[self._time] - total[self._group]
        return groups, own
