"""MovieLens: every published layout, the resulting data, and errors of invalid files."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import pytest

from bench.studies import movielens_baselines
from bench.studies.movielens import MovieLens, Prepared
from bench.studies.movielens_reader import GENRES, LAYOUTS, find, read_movies, read_ratings, read_users
from rec_kernels.dlrm.__main__ import main
from rec_kernels.dlrm.data import DataError

ARRAYS = [field.name for field in dataclasses.fields(Prepared) if field.type == "np.ndarray"]
MOVIES = {
    1: ("Toy Story (1995)", ("Animation", "Children's")),
    2: ("Sherlock: Case of Evil (2002)", ("Crime",)),
    7: ('Amélie, "Le Fabuleux" (2001)', ("Comedy", "Romance")),
    30: ("Untitled", ()),
    31: ("Band of Brothers (2001-2002)", ("War", "Drama", "Action")),
    32: ("Rated in the end only (1960)", ("Western",)),
}
USERS = {user: ("FM"[user % 2], 20 + user % 3, ("artist", "lawyer")[user % 2], f"0{user}") for user in range(1, 9)}
BASE = 1_000_000_000  # a Sunday, 01:46:40 in UTC


def make_ratings() -> list[tuple[int, int, int, int]]:
    """(user, movie, stars, second), many in the same second; user 9 and movie 40 are in no other file."""
    rng = random.Random(0)
    rows = {}
    for _ in range(300):
        user, movie = rng.randrange(1, 10), rng.choice([*MOVIES, 40])
        rows[user, movie, BASE + 5_000 * rng.randrange(40)] = rng.randrange(1, 6)
    rows = [(user, movie, stars, time) for (user, movie, time), stars in rows.items() if movie != 32]
    return [*rows, (1, 32, 5, BASE + 5_000 * 50), (3, 1, 4, BASE), (6, 2, 2, BASE + 9)]


RATINGS = make_ratings()


def lines(path: Path, rows: list[str], encoding: str = "utf-8") -> None:
    path.write_bytes("".join(f"{row}\n" for row in rows).encode(encoding))


def write_100k(folder: Path, ratings: list = RATINGS) -> Path:
    lines(folder / "u.data", ["\t".join(map(str, row)) for row in ratings])
    flags = {movie: "|".join(str(int(name in genres)) for name in GENRES) for movie, (_, genres) in MOVIES.items()}
    movies = [f"{movie}|{title}|01-Jan-1990||http://x|{flags[movie]}" for movie, (title, _) in MOVIES.items()]
    lines(folder / "u.item", movies, "latin-1")
    lines(folder / "u.user", [f"{u}|{age}|{sex}|{job}|{place}" for u, (sex, age, job, place) in USERS.items()])
    return folder / "u.data"


def write_1m(folder: Path, ratings: list = RATINGS) -> Path:
    lines(folder / "ratings.dat", ["::".join(map(str, row)) for row in ratings])
    movies = [f"{movie}::{title}::{'|'.join(genres)}" for movie, (title, genres) in MOVIES.items()]
    lines(folder / "movies.dat", movies, "latin-1")
    lines(folder / "users.dat", ["::".join(map(str, (user, *facts))) for user, facts in USERS.items()])
    return folder / "ratings.dat"


def write_csv(folder: Path, ratings: list = RATINGS) -> Path:
    rows = [f"{user},{movie},{stars}.0,{time}" for user, movie, stars, time in ratings]
    lines(folder / "ratings.csv", ["userId,movieId,rating,timestamp", *rows])
    rows = []
    for movie, (title, genres) in MOVIES.items():
        title = title.replace('"', '""')
        rows.append(f'{movie},"{title}",{"|".join(genres)}')
    lines(folder / "movies.csv", ["movieId,title,genres", *rows])
    return folder / "ratings.csv"


def write_atomic(folder: Path, ratings: list = RATINGS) -> Path:
    header = "user_id:token\titem_id:token\trating:float\ttimestamp:float"
    lines(folder / "ml.inter", [header, *("\t".join(map(str, row)) for row in ratings)])
    header = "item_id:token\tmovie_title:token_seq\trelease_year:token\tgenre:token_seq"
    years = {movie: str(year_of(title) or "unknown") for movie, (title, _) in MOVIES.items()}
    rows = [f"{movie}\tx\t{years[movie]}\t{' '.join(genres)}" for movie, (_, genres) in MOVIES.items()]
    lines(folder / "ml.item", [header, *rows])
    header = "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token"
    rows = [f"{user}\t{age}\t{sex}\t{job}\t{place}" for user, (sex, age, job, place) in USERS.items()]
    lines(folder / "ml.user", [header, *rows])
    return folder / "ml.inter"


WRITERS = {"ml-100k": write_100k, "ml-1m": write_1m, "csv": write_csv, "atomic": write_atomic}


def year_of(title: str) -> int:
    return int(title.split("(")[1][:4]) if "(" in title else 0


@pytest.fixture
def data(tmp_path: Path) -> MovieLens:
    write_1m(tmp_path)
    return MovieLens(tmp_path, data_dir=tmp_path / "store")


def in_order() -> tuple[list[tuple], int]:
    """The expected rows, by loops, and the number of training rows."""
    train, test = [], []
    for user in {row[0] for row in RATINGS}:
        own = sorted((row for row in RATINGS if row[0] == user), key=lambda row: row[3])
        last = own[len(own) - len(own) // 10 - 1][3]
        train += [row for row in own if row[3] <= last]
        test += [row for row in own if row[3] > last]
    rows = [sorted(part, key=lambda row: (row[3], row[0], row[1])) for part in (train, test)]
    return rows[0] + rows[1], len(train)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read(layout: str, tmp_path: Path) -> None:
    """Folders and files of ratings are read: ratings, years and genres, and users if available."""
    file = WRITERS[layout](tmp_path)
    assert find(tmp_path) == find(file)
    source = find(file)
    assert len(source.paths()) == (2 if layout == "csv" else 3)
    assert list(read_ratings(source.ratings).itertuples(index=False, name=None)) == RATINGS
    movies = {movie: (year, set(genres)) for movie, year, genres in read_movies(source.movies).itertuples(index=False)}
    expected = {movie: (year_of(title), set(genres)) for movie, (title, genres) in MOVIES.items()}
    if layout == "ml-100k":
        expected[30] = 1990, set()  # without a year in its title: the release date's
    assert movies == expected
    if source.users is not None:
        users = {user: tuple(facts) for user, *facts in read_users(source.users).itertuples(index=False)}
        assert users == {user: (sex, str(age), job, place) for user, (sex, age, job, place) in USERS.items()}


def test_layouts_of_the_same_ratings_give_the_same_rows(tmp_path: Path) -> None:
    """The order of the files does not matter; a data set without users lacks their features."""
    made = {}
    for number, (layout, write) in enumerate(WRITERS.items()):
        folder = tmp_path / layout
        folder.mkdir()
        write(folder, random.Random(number).sample(RATINGS, len(RATINGS)))
        made[layout] = MovieLens(folder, data_dir=tmp_path / "store")
    whole, without = made["ml-1m"], made["csv"]
    assert [f.name for f in without.features] == ["user", "movie", "year", "weekday", "hour", "genre", "history"]
    for name in ARRAYS:
        np.testing.assert_array_equal(
            getattr(without.prepared, name), getattr(whole.prepared, name)[: 5 if name == "ids" else None]
        )
        if name not in ("genres", "ids"):  # other orders of genres, and another year
            np.testing.assert_array_equal(getattr(made["ml-100k"].prepared, name), getattr(whole.prepared, name))
            np.testing.assert_array_equal(getattr(made["atomic"].prepared, name), getattr(whole.prepared, name))
    np.testing.assert_array_equal(made["atomic"].prepared.ids, whole.prepared.ids)


def test_split_labels_and_ids(data: MovieLens) -> None:
    """Split, labels and ids equal plain loops: each user's last tenth, ids by appearance in training, 0 for others."""
    rows, train = in_order()
    assert 0 < len(rows) - train < len(rows) / 10
    assert (data.num_rows("train"), data.num_rows("test")) == (train, len(rows) - train)
    assert data.prepared.label.tolist() == [float(row[2] >= 4) for row in rows]
    when = [datetime.fromtimestamp(row[3], timezone.utc) for row in rows]
    nobody = (None,) * 4
    values = {
        "user": [row[0] for row in rows],
        "movie": [row[1] for row in rows],
        "year": [year_of(MOVIES[row[1]][0]) if row[1] in MOVIES else 0 for row in rows],
        "weekday": [time.weekday() for time in when],
        "hour": [time.hour for time in when],
    }
    for column, name in enumerate(("gender", "age", "occupation", "zip")):
        values[name] = [USERS.get(row[0], nobody)[column] for row in rows]
    assert [f.name for f in data.features] == [*values, "genre", "history"]
    for number, (name, column) in enumerate(values.items()):
        vocabulary: dict = {}
        for value in column[:train]:
            vocabulary.setdefault(value, len(vocabulary) + 1)
        assert data.prepared.ids[number].tolist() == [vocabulary.get(value, 0) for value in column], name
        assert data.features[number].num_embeddings == len(vocabulary) + 1
    assert 0 in data.prepared.ids[1, train:]  # movie 32


def test_the_past_is_of_earlier_training_ratings(data: MovieLens) -> None:
    """Counts, means and history of every row, by loops over the training rows before its second."""
    rows, train = in_order()
    movie_id = dict(zip((row[1] for row in rows[:train]), data.prepared.ids[1, :train].tolist(), strict=True))
    for number, (user, movie, _, time) in enumerate(rows):
        earlier = [row for row in rows[:train] if row[3] < time]
        expected = []
        for own in ([r for r in earlier if r[0] == user], [r for r in earlier if r[1] == movie]):
            likes = sum(row[2] >= 4 for row in own)
            expected.append((math.log1p(len(own)), (likes + 2.5) / (len(own) + 5)))
        expected = [*(count for count, _ in expected), *(mean for _, mean in expected)]
        np.testing.assert_allclose(data.prepared.dense[number], expected, rtol=1e-6)
        begin, end = data.prepared.past[:, number]
        seen = [row[1] for row in earlier if row[0] == user]
        assert data.prepared.seen[begin:end].tolist() == [movie_id[m] for m in seen]


def test_history_is_the_last_50(tmp_path: Path) -> None:
    """The history keeps the last 50 movies."""
    write_csv(tmp_path, [(5, movie, 3, BASE + movie) for movie in range(100)])
    data = MovieLens(tmp_path, data_dir=tmp_path / "store")
    batch = next(data.batches("train", 90))
    lengths = np.diff(batch.shared.offsets())
    assert lengths.tolist() == [min(row, 50) for row in range(90)]
    assert batch.shared.values()[-50:].tolist() == list(range(40, 90))  # movie m has id m + 1
    test = next(data.batches("test", 10))
    assert test.shared.values().tolist() == list(range(41, 91)) * 10  # all of them have the same past


def test_batches(data: MovieLens) -> None:
    """Batches of any size, from anywhere, have the rows in order, genres and histories as bags."""
    rows, train = in_order()
    genre_of: dict[str, int] = {}
    for _, movie, _, _ in rows[:train]:
        for name in MOVIES.get(movie, ("", ()))[1]:
            genre_of.setdefault(name, len(genre_of) + 1)
    for split, first in (("train", 0), ("test", train)):
        batches = list(data.batches(split, 7))
        assert sum(len(batch.label) for batch in batches) == data.num_rows(split)
        number = first
        for batch in batches:
            size = len(batch.label)
            offsets, values = batch.features.offsets(), batch.features.values()
            for row in range(size):
                for feature in range(9):
                    assert values[offsets[feature * size + row]] == data.prepared.ids[feature, number]
                genres = values[offsets[9 * size + row] : offsets[9 * size + row + 1]].tolist()
                names = MOVIES.get(rows[number][1], ("", ()))[1]
                assert genres == [genre_of.get(name, 0) for name in names]
                begin, end = data.prepared.past[:, number]
                bag = batch.shared.offsets()[row : row + 2]
                np.testing.assert_array_equal(batch.shared.values()[bag[0] : bag[1]], data.prepared.seen[begin:end])
                np.testing.assert_array_equal(batch.dense[row], data.prepared.dense[number])
                assert batch.label[row] == data.prepared.label[number]
                number += 1
        assert len(list(data.batches(split, 7, 2))) == max(len(batches) - 2, 0)


def test_the_future_of_a_user_changes_no_training_row(tmp_path: Path) -> None:
    """Inverting the labels of test rows changes nothing else."""
    (tmp_path / "other").mkdir()
    rows, train = in_order()
    turned = rows[:train] + [(user, movie, 6 - stars, time) for user, movie, stars, time in rows[train:]]
    write_1m(tmp_path)
    write_1m(tmp_path / "other", turned)
    one, two = (MovieLens(path, data_dir=tmp_path / "store") for path in (tmp_path, tmp_path / "other"))
    for name in set(ARRAYS) - {"label"}:
        np.testing.assert_array_equal(getattr(one.prepared, name), getattr(two.prepared, name))
    assert (one.prepared.label[train:] != two.prepared.label[train:]).any()


def test_prepared_once_per_state_of_the_files(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A second use reads the prepared data; changed files are prepared again."""
    write_csv(tmp_path)
    store = tmp_path / "store"
    first = MovieLens(tmp_path, data_dir=store)
    folder = next(store.iterdir())
    stamp = (folder / "manifest.json").stat().st_mtime_ns
    again = MovieLens(tmp_path / "ratings.csv", data_dir=store)
    assert [path.stat().st_mtime_ns for path in store.glob("*/manifest.json")] == [stamp]
    assert isinstance(again.prepared.ids.base, np.memmap)
    assert again.prepared.num_embeddings == first.prepared.num_embeddings
    assert "rebuilt" not in capsys.readouterr().err
    write_csv(tmp_path, RATINGS[:-1])
    assert len(MovieLens(tmp_path, data_dir=store).prepared.label) == len(RATINGS) - 1
    assert "prepared data is rebuilt" in capsys.readouterr().err


def test_command_line(tmp_path: Path) -> None:
    """The trainer trains on it, also with compressed tables."""
    write_100k(tmp_path)
    flags = [
        "--data",
        "bench.studies.movielens:MovieLens",
        "--path",
        str(tmp_path),
        "--data-dir",
        str(tmp_path / "store"),
        "--threads",
        "1",
    ]
    flags += ["--batch-size", "50", "--embedding", "qr", "--threshold", "5", "--runs-dir", str(tmp_path / "runs")]
    assert main(["train", *flags]) == 0
    records = (tmp_path / "runs" / "movielens-d16-qr4-b50-seed0" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(records[-1])["examples"] == len(RATINGS) - in_order()[1]


def test_baselines(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The baselines of docs/data.md run, and the movie mean is the mean."""
    path = write_csv(tmp_path)
    movielens_baselines.main(["--path", str(path), "--data-dir", str(tmp_path / "store")])
    assert capsys.readouterr().out.count("|\n") == 6
    rows, train = in_order()
    data = MovieLens(path, data_dir=tmp_path / "store").prepared
    likes = [row[2] >= 4 for row in rows[:train] if row[1] == 7]
    overall = sum(row[2] >= 4 for row in rows[:train]) / train
    means = movielens_baselines.group_mean(data, "movie")
    expected = (sum(likes) + 5 * overall) / (len(likes) + 5)
    np.testing.assert_allclose(means[[row[1] == 7 for row in rows]], expected, rtol=1e-6)


MALFORMED = [
    ("ml-100k", "u.data", 3, "1\t2\t3", r"u\.data, line 3: 3 columns, expected 4 separated by '\\t': '1\\t2\\t3'"),
    ("ml-100k", "u.data", 2, "1\t2\t6\t5", r"u\.data, line 2: rating is '6', allowed are numbers from 0\.5 to 5"),
    ("ml-100k", "u.data", 2, "1\t2\tnan\t5", r"line 2: rating is 'nan'"),
    ("ml-100k", "u.data", 2, "1\t2\t\t5", r"line 2: rating is ''"),
    ("ml-100k", "u.data", 2, "-1\t2\t3\t5", r"line 2: user is '-1', allowed are whole numbers of at most 18 digits"),
    ("ml-100k", "u.data", 2, "1\tx\t3\t5", r"line 2: movie is 'x'"),
    ("ml-100k", "u.data", 2, "1\t2\t3\t5.5", r"line 2: timestamp is '5\.5', allowed are whole seconds since 1970"),
    ("ml-100k", "u.data", 2, "1\t2\t3\t8589934592", r"line 2: timestamp is '8589934592', allowed are .* below 2\^33"),
    ("ml-100k", "u.data", 2, "", r"line 2: 1 columns, expected 4"),
    ("ml-100k", "u.item", 1, "1|x|||y", r"u\.item, line 1: 5 columns, expected 24 separated by '\|'"),
    ("ml-100k", "u.item", 2, "2|x|||y" + "|2" * 19, r"u\.item, line 2: unknown is '2', allowed are 0 and 1"),
    ("ml-100k", "u.user", 2, "1|2|M|x|y", r"u\.user, line 2: user 1 is already in line 1"),
    ("ml-1m", "ratings.dat", 4, "1:x:2::3::5", r"ratings\.dat, line 4: 3 columns, expected 4 separated by '::'"),
    ("ml-1m", "ratings.dat", 4, "1::2::3::5:", r"ratings\.dat, line 4: timestamp is '5:'"),
    ("ml-1m", "movies.dat", 2, "1::x::y", r"movies\.dat, line 2: movie 1 is already in line 1"),
    ("ml-1m", "users.dat", 3, "u::F::1::2::3", r"users\.dat, line 3: user is 'u'"),
    (
        "csv",
        "ratings.csv",
        1,
        "user,movie",
        r"ratings\.csv, line 1: columns are 'user,movie', must include, once each, u",
    ),
    ("csv", "ratings.csv", 9, "1,2,3", r"ratings\.csv, line 9: 3 columns"),
    ("csv", "ratings.csv", 4, "0_3,2,3,4", r"ratings\.csv, line 4: user is '0_3'"),
    ("csv", "ratings.csv", 4, "1,2,\u0663,4", r"ratings\.csv, line 4: rating is"),
    ("csv", "ratings.csv", 4, "9" * 18 + "9,2,3,4", r"ratings\.csv, line 4: user is '9999999999999999999'"),
    ("csv", "ratings.csv", 1, 'user,"x', r"ratings\.csv, line 1: unexpected end of data"),
    ("csv", "movies.csv", 3, '7,"x', r"movies\.csv, line 3: unexpected end of data: '7,\"x'"),
    ("csv", "movies.csv", 3, "7" * 19 + ",x,y", r"movies\.csv, line 3: movie is '7777777777777777777'"),
    ("csv", "movies.csv", 3, "7" * 2**20, r"movies\.csv, line 3: it has 1048576 characters or more: '7777"),
    ("atomic", "ml.inter", 5, "1\t2\t3\t-5", r"ml\.inter, line 5: timestamp is '-5'"),
    ("atomic", "ml.item", 1, "item_id:token\tgenre:x\tclass:y", r"ml\.item, line 1: columns are .*, must include"),
]


@pytest.mark.parametrize(
    ("layout", "file", "line", "text", "message"),
    MALFORMED,
    ids=[f"{file}, line {line}: {text!r:.30}" for _, file, line, text, _ in MALFORMED],
)
def test_malformed_files(layout: str, file: str, line: int, text: str, message: str, tmp_path: Path) -> None:
    """Errors have the line, the value and what is allowed; nothing is kept."""
    WRITERS[layout](tmp_path)
    path = tmp_path / file
    rows = path.read_text("latin-1").splitlines()
    rows[line - 1] = text
    lines(path, rows, "utf-8" if not text.isascii() else "latin-1")
    with pytest.raises(DataError, match=message):
        MovieLens(tmp_path, data_dir=tmp_path / "store")
    assert not list((tmp_path / "store").iterdir())


def test_quoted(tmp_path: Path) -> None:
    """Every field may be quoted, as some tools write CSV files."""
    file = write_csv(tmp_path)
    plain = read_ratings(find(tmp_path).ratings)
    rows = [",".join(f'"{field}"' for field in row.split(",")) for row in file.read_text().splitlines()]
    lines(file, rows)
    assert read_ratings(find(tmp_path).ratings).equals(plain)


def test_long_titles(tmp_path: Path) -> None:
    """A title of 150,000 brackets is scanned once; scanning from each bracket would take half a minute."""
    write_1m(tmp_path)
    lines(tmp_path / "movies.dat", [f"1::{'(1234' * 150_000}::Drama"])
    assert read_movies(find(tmp_path).movies)["year"].tolist() == [0]


def test_missing_files(tmp_path: Path) -> None:
    """Missing and duplicate ratings, missing movies, an empty file, and no test users are reported."""
    with pytest.raises(
        DataError, match=r"nowhere does not exist: path must be a folder with one of u\.data, ratings\.d"
    ):
        find(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"has no ratings of MovieLens: path must be a folder with one of .*\*\.inter"):
        find(tmp_path)
    lines(tmp_path / "ratings.csv", ["userId,movieId,rating,timestamp"])
    with pytest.raises(DataError, match=r"movies\.csv does not exist: ratings\.csv needs movies\.csv in the same f"):
        find(tmp_path)
    lines(tmp_path / "movies.csv", ["movieId,title,genres"])
    with pytest.raises(DataError, match=r"ratings\.csv (has 0 ratings|cannot be read: Empty CSV)"):
        MovieLens(tmp_path, data_dir=tmp_path / "store")
    lines(tmp_path / "ratings.csv", ["userId,movieId,rating,timestamp", *("1,2,3,4",) * 20])
    with pytest.raises(
        DataError, match=r"has 20 ratings, none of them for the test: at least one user needs 10 ratings"
    ):
        MovieLens(tmp_path, data_dir=tmp_path / "store")
    (tmp_path / "u.data").write_bytes(b"")
    with pytest.raises(DataError, match=r"has several files of ratings, ratings\.csv, u\.data: path must name one"):
        find(tmp_path)
    lines(tmp_path / "u.item", [])
    with pytest.raises(DataError, match=r"u\.data cannot be read: Empty CSV"):
        MovieLens(tmp_path / "u.data", data_dir=tmp_path / "store")
    with pytest.raises(DataError, match=r"movies\.csv has no ratings of MovieLens"):
        find(tmp_path / "movies.csv")
