"""Ratings, movies and users of MovieLens, from the files that GroupLens publishes or RecBole's atomic files.

Every layout is text, a record per line. Errors name the file and its line.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
from pyarrow import csv as arrow_csv

from rec_kernels.dlrm.data import DataError

RATINGS = ("user", "movie", "rating", "timestamp")
MOVIES = ("movie", "genres")
USERS = ("user", "gender", "age", "occupation", "zip")
LINE = 1 << 20  # characters; no line may be longer
SHOWN = 40  # characters of an offending text
MOST_ROWS = 2**31 - 1
WHOLE = re.compile(r"[0-9]{1,18}")
NUMBER = re.compile(r"[0-9]+(\.[0-9]*)?")
YEAR_IN_TITLE = re.compile(r"\(([0-9]{4})[^()]*\)\s*$")  # "Heat (1995)", of series "(2004-2006)"
NO_GENRES = "(no genres listed)"

# The genre columns of u.item in their order.
GENRES = (
    *("unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama"),
    *("Fantasy", "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western"),
)
# Our names for the columns of files with a header; RecBole appends ":type" to its names.
NAMES = {
    "userId": "user",
    "movieId": "movie",
    "user_id": "user",
    "item_id": "movie",
    "movie_title": "title",
    "release_year": "year",
    "class": "genres",
    "genre": "genres",
    "zip_code": "zip",
}


class Text(NamedTuple):
    """Text format of a file.

    Args:
        separator: of the columns; with "," they may be quoted.
        columns: their names; None: the first line has them.
    """

    separator: str
    columns: tuple[str, ...] | None = None


class Layout(NamedTuple):
    """A layout of a data set: its files by name or suffix, and their formats; the users' file is optional."""

    ratings: tuple[str, Text]
    movies: tuple[str, Text]
    users: tuple[str, Text] | None


LAYOUTS = {
    "ml-100k": Layout(
        ("u.data", Text("\t", RATINGS)),
        ("u.item", Text("|", ("movie", "title", "date", "video date", "url", *GENRES))),
        ("u.user", Text("|", ("user", "age", "gender", "occupation", "zip"))),
    ),
    "ml-1m": Layout(
        ("ratings.dat", Text("::", RATINGS)),
        ("movies.dat", Text("::", ("movie", "title", "genres"))),
        ("users.dat", Text("::", USERS)),
    ),
    "csv": Layout(("ratings.csv", Text(",")), ("movies.csv", Text(",")), None),
    "atomic": Layout((".inter", Text("\t")), (".item", Text("\t")), (".user", Text("\t"))),
}


class File(NamedTuple):
    """A file and its format."""

    path: Path
    text: Text


class Source(NamedTuple):
    """The files of a data set; ``users`` is None without such a file."""

    ratings: File
    movies: File
    users: File | None

    def paths(self) -> list[Path]:
        """Paths of the files that exist."""
        return [file.path for file in self if file is not None]


def find(path: Path) -> Source:
    """The files of a data set.

    Args:
        path: its folder, or its file of ratings.

    Raises:
        DataError: there is none, there are several, or the movies are missing.
    """
    names = ", ".join(layout.ratings[0].replace(".inter", "*.inter") for layout in LAYOUTS.values())
    if not path.exists():
        raise DataError(f"{path} does not exist: path must be a folder with one of {names}, or such a file")
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    found = [(file, layout) for file in files for layout in LAYOUTS.values() if _is(file, layout.ratings[0])]
    if not found:
        raise DataError(
            f"{path} has no ratings of MovieLens: path must be a folder with one of {names}, or such a file"
        )
    if len(found) > 1:
        several = ", ".join(file.name for file, _ in found)
        raise DataError(f"{path} has several files of ratings, {several}: path must name one of them")
    ratings, layout = found[0]
    movies, users = (_beside(ratings, what) for what in (layout.movies, layout.users))
    if movies is None:
        missing = _sibling(ratings, layout.movies[0])
        raise DataError(f"{missing} does not exist: {ratings.name} needs {missing.name} in the same folder")
    return Source(File(ratings, layout.ratings[1]), movies, users)


def _is(file: Path, name: str) -> bool:
    return file.is_file() and (file.suffix == name if name == ".inter" else file.name == name)


def _sibling(ratings: Path, name: str) -> Path:
    return ratings.with_suffix(name) if ratings.suffix == ".inter" else ratings.with_name(name)


def _beside(ratings: Path, what: tuple[str, Text] | None) -> File | None:
    if what is None or not _sibling(ratings, what[0]).is_file():
        return None
    return File(_sibling(ratings, what[0]), what[1])


def read_ratings(file: File) -> pd.DataFrame:
    """A row per rating, in the order of the file: "user", "movie", "timestamp" (seconds since 1970), int64, "rating".

    Raises:
        DataError: the file is empty or malformed; says where.
    """
    try:
        table = _read(file)
    except (pa.ArrowInvalid, OSError) as error:
        raise _explain(file, error) from error
    if any(table[name].null_count for name in RATINGS):
        raise _explain(file, ValueError("a field is empty"))
    ratings = pd.DataFrame({name: table[name].to_numpy() for name in RATINGS})
    time = ratings["timestamp"]
    ids = ratings[["user", "movie"]]
    good = ((ids >= 0) & (ids < 10**18)).all(axis=1) & ratings["rating"].between(0.5, 5)
    if not (good & time.between(0, 2**33 - 1) & (time % 1 == 0)).all():
        raise _explain(file, ValueError("a number is out of range"))
    if not 0 < len(ratings) <= MOST_ROWS:
        raise DataError(f"{file.path} has {len(ratings)} ratings, allowed are 1 to {MOST_ROWS}")
    return ratings.astype({"timestamp": np.int64})


def _read(file: File) -> pa.Table:
    columns, needed = _columns(file, RATINGS), list(RATINGS)
    # pyarrow's separators have one character: "::" gives an empty column in between.
    if file.text.separator == "::":
        columns = [name for own in columns for name in (own, f":{own}")][:-1]
        needed = columns
    types = dict.fromkeys(("user", "movie"), pa.int64()) | dict.fromkeys(("rating", "timestamp"), pa.float64())
    return arrow_csv.read_csv(
        file.path,
        read_options=arrow_csv.ReadOptions(
            column_names=columns, skip_rows=0 if file.text.columns else 1, block_size=LINE
        ),
        parse_options=arrow_csv.ParseOptions(
            delimiter=file.text.separator[0],
            quote_char='"' if file.text.separator == "," else False,
            ignore_empty_lines=False,
        ),
        convert_options=arrow_csv.ConvertOptions(
            column_types={name: types.get(name, pa.null()) for name in needed}, include_columns=needed, null_values=[""]
        ),
    )


def _explain(file: File, error: Exception) -> DataError:
    """Finds the error in a file of ratings by reading it again line by line."""
    try:
        for line, record in _records(file, RATINGS):
            for name in ("user", "movie"):
                _whole(file, line, name, record[name])
            rating, time = _number(record["rating"]), _number(record["timestamp"])
            if not 0.5 <= rating <= 5:
                return _wrong(file, line, "rating", record["rating"], "numbers from 0.5 to 5")
            if not (0 <= time < 2**33 and time % 1 == 0):
                return _wrong(file, line, "timestamp", record["timestamp"], "whole seconds since 1970, below 2^33")
    except DataError as found:
        return found
    return DataError(f"{file.path} cannot be read: {error}")


def read_movies(file: File) -> pd.DataFrame:
    """A row per movie: "movie", int64; "year" of release, int64, 0 if unknown; "genres", tuples of names.

    Raises:
        DataError: the file is malformed, or a movie is there twice; says where.
    """
    flags = file.text.columns is not None and GENRES[0] in file.text.columns
    rows = []
    for line, record in _unique(file, "movie", MOVIES[:1] if flags else MOVIES):
        genres = _flagged(file, line, record) if flags else _genres(record["genres"].strip(), file.text.separator)
        rows.append((int(record["movie"]), _year(record), genres))
    return pd.DataFrame(rows, columns=["movie", "year", "genres"])


def _flagged(file: File, line: int, record: dict[str, str]) -> tuple[str, ...]:
    for name in GENRES:
        if record[name] not in ("0", "1"):
            raise _wrong(file, line, name, record[name], "0 and 1")
    return tuple(name for name in GENRES if record[name] == "1")


def _genres(text: str, separator: str) -> tuple[str, ...]:
    """Splits genres at "|", or at spaces in tab-separated files."""
    if text == NO_GENRES:
        return (text,)
    return tuple(text.split() if separator == "\t" else filter(None, text.split("|")))


def _year(record: dict[str, str]) -> int:
    """Year of release from its column, the title or the date of release; 0 if none has it."""
    year = re.fullmatch(r"([0-9]{4})", record.get("year", "").strip())
    year = year or YEAR_IN_TITLE.search(record.get("title", ""))
    year = year or re.search(r"([0-9]{4})$", record.get("date", "").strip())
    return int(year[1]) if year else 0


def read_users(file: File) -> pd.DataFrame:
    """A row per user: "user", int64; "gender", "age", "occupation", "zip" as they are written.

    Raises:
        DataError: the file is malformed, or a user is there twice; says where.
    """
    rows = [(int(record["user"]), *(record[name] for name in USERS[1:])) for _, record in _unique(file, "user", USERS)]
    return pd.DataFrame(rows, columns=list(USERS))


def _unique(file: File, key: str, needed: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    """``_records`` with a ``key`` that must be a unique whole number."""
    lines: dict[int, int] = {}
    for line, record in _records(file, needed):
        value = _whole(file, line, key, record[key])
        if value in lines:
            raise DataError(f"{file.path}, line {line}: {key} {value} is already in line {lines[value]}")
        lines[value] = line
        yield line, record


def _columns(file: File, needed: tuple[str, ...]) -> list[str]:
    """The column names."""
    if file.text.columns is not None:
        return list(file.text.columns)
    with file.path.open(encoding="utf-8-sig", errors="replace", newline="\n") as lines:
        header = lines.readline(LINE).rstrip("\r\n")
    try:
        given = [name.split(":")[0] for name in _fields(header, file.text.separator)]
    except csv.Error as error:
        raise DataError(f"{file.path}, line 1: {error}: {_shown(header)}") from error
    columns = [NAMES.get(name, name) for name in given]
    if not set(needed) <= set(columns) or len(set(columns)) < len(columns):
        written = {name: " or ".join(own for own, to in NAMES.items() if to == name) or name for name in needed}
        raise DataError(
            f"{file.path}, line 1: columns are {_shown(header)}, must include, once each, {', '.join(written.values())}"
        )
    return columns


def _records(file: File, needed: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    """The number, from 1, and the columns by name of each line.

    Raises:
        DataError: a line has too few or too many columns, or is too long; says which.
    """
    columns, separator = _columns(file, needed), file.text.separator
    # Old files are Latin-1; only letters of titles, which are not used, fail to decode.
    with file.path.open(encoding="utf-8-sig", errors="replace", newline="\n") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(LINE), ""), 1):
            where = f"{file.path}, line {number}"
            if len(line) == LINE:
                raise DataError(f"{where}: it has {LINE} characters or more: {_shown(line)}")
            if number == 1 and file.text.columns is None:
                continue
            text = line.rstrip("\r\n")
            try:
                fields = _fields(text, separator)
            except csv.Error as error:
                raise DataError(f"{where}: {error}: {_shown(text)}") from error
            if len(fields) != len(columns):
                raise DataError(
                    f"{where}: {len(fields)} columns, expected {len(columns)} separated by {separator!r}: "
                    f"{_shown(text)}"
                )
            yield number, dict(zip(columns, fields, strict=True))


def _fields(line: str, separator: str) -> list[str]:
    return next(csv.reader([line], strict=True), [""]) if separator == "," else line.split(separator)


def _whole(file: File, line: int, name: str, text: str) -> int:
    if not WHOLE.fullmatch(text):
        raise _wrong(file, line, name, text, "whole numbers of at most 18 digits")
    return int(text)


def _number(text: str) -> float:
    """NaN where it is none."""
    return float(text) if NUMBER.fullmatch(text) else float("nan")


def _wrong(file: File, line: int, name: str, text: str, allowed: str) -> DataError:
    return DataError(f"{file.path}, line {line}: {name} is {_shown(text)}, allowed are {allowed}")


def _shown(text: str) -> str:
    return repr(text[:SHOWN]) + ("..." if len(text) > SHOWN else "")
