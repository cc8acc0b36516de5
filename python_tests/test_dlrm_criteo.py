"""Criteo's format: reading, preparation, and errors for invalid files."""

from __future__ import annotations

import functools
import gzip
import itertools
import json
import math
import os
import random
import resource
from pathlib import Path

import numpy as np
import pytest

from rec_kernels.dlrm.criteo import BLANK, BLOCK, CATEGORIES, INTEGERS, Criteo, hashed_ids, read_rows, train_rows
from rec_kernels.dlrm.data import DataError

SAMPLE = Path(__file__).parents[1] / "../shared/data/criteo_8000.tsv.gz"
EDGES = [
    ["1", "0", "-3", "7", *[""] * 10, "0", "00000000", "ffffffff", "FFFFFFFF", "a", "0A", "00000abc", *[""] * 19],
    ["0", *[""] * 39],
    ["1", *["9223372036854775807"] * 13, *["1"] * 26],
]


def make_lines(count: int, seed: int = 0) -> list[list[str]]:
    """Rows with few values per column, including blanks and short numbers."""
    rng = random.Random(seed)
    values = ["", *(f"{rng.getrandbits(32):08x}" for _ in range(20)), "5", "0abc"]
    integers = ["", "0", "-1", "-12", "3", "1500"]
    return [
        [
            str(rng.randrange(2)),
            *rng.choices(integers, k=13),
            *rng.choices(values[: 3 + len(values) * k // count], k=26),
        ]
        for k in range(count)
    ]


def text(rows: list[list[str]]) -> bytes:
    return "".join("\t".join(row) + "\n" for row in rows).encode()


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def number(category: str) -> int:
    return int(category, 16) if category else BLANK


def check_against_plain_python(data: Criteo, rows: list[list[str]]) -> None:
    """Compares every label, dense value and id with loops and dicts."""
    train = len(rows) * 6 // 7
    assert (data.num_rows("train"), data.num_rows("test")) == (train, len(rows) - train)
    assert data.label.tolist() == [float(row[0]) for row in rows]
    for column in range(13):
        expected = [math.log1p(max(int(row[1 + column] or 0), 0)) for row in rows]
        np.testing.assert_allclose(data.dense[:, column], expected, rtol=1e-6)
    for column in range(26):
        values = [number(row[14 + column]) for row in rows]
        vocabulary: dict[int, int] = {}
        for value in values[:train]:
            vocabulary.setdefault(value, len(vocabulary) + 1)
        assert data.ids[column].tolist() == [vocabulary.get(value, 0) for value in values]
        assert data.features[column].num_embeddings == len(vocabulary) + 1


def test_small_file_against_plain_python(tmp_path):
    rows = EDGES + make_lines(200)
    data = Criteo(write(tmp_path / "a.tsv", text(rows)), data_dir=tmp_path / "store")
    check_against_plain_python(data, rows)
    assert (data.ids == 0).any()
    assert (data.dense.dtype, data.ids.dtype, data.label.dtype) == (np.float32, np.int32, np.float32)
    assert [feature.name for feature in data.features] == list(CATEGORIES)
    assert data.num_dense == len(INTEGERS)


@pytest.mark.skipif(not SAMPLE.exists(), reason="the sample is not part of the project")
def test_real_rows_against_plain_python(tmp_path):
    with gzip.open(SAMPLE, "rt") as file:
        rows = [line.rstrip("\n").split("\t") for line in file]
    assert len(rows) == 8000
    check_against_plain_python(Criteo(SAMPLE, data_dir=tmp_path), rows)


def test_files_of_several_blocks(tmp_path):
    rows = make_lines(6000) * 2
    assert len(text(rows)) > 2 * BLOCK
    check_against_plain_python(Criteo(write(tmp_path / "a", text(rows)), data_dir=tmp_path / "store"), rows)


@pytest.mark.parametrize("end", [b"\r\n", b"\n"])
def test_line_ends_and_a_last_line_without_one(tmp_path, end):
    rows = make_lines(20)
    file = write(tmp_path / "a.tsv", text(rows).replace(b"\n", end).removesuffix(end))
    check_against_plain_python(Criteo(file, data_dir=tmp_path / "store"), rows)


def test_a_folder_is_read_in_the_order_of_names(tmp_path):
    parts = [make_lines(10, seed) for seed in range(3)]
    folder = tmp_path / "days"
    folder.mkdir()
    for name, part in zip(("day_2", "day_0.gz", "day_1.gz"), parts, strict=True):
        write(folder / name, text(part))
    (folder / ".hidden").write_text("not data")
    data = Criteo(folder, data_dir=tmp_path / "store")
    check_against_plain_python(data, parts[1] + parts[2] + parts[0])


def test_gzip_of_several_members(tmp_path):
    rows = make_lines(30)
    file = tmp_path / "a.tsv.gz"
    file.write_bytes(gzip.compress(text(rows[:10])) + gzip.compress(text(rows[10:])))
    check_against_plain_python(Criteo(file, data_dir=tmp_path / "store"), rows)


def test_only_the_first_rows(tmp_path):
    rows = make_lines(8000)
    file = write(tmp_path / "a.tsv.gz", text(rows))
    for count in (7, 100, 8000, 9000):
        check_against_plain_python(Criteo(file, rows=count, data_dir=tmp_path / "store"), rows[:count])


def test_hashed_ids(tmp_path):
    rows = EDGES + make_lines(200)
    data = Criteo(write(tmp_path / "a.tsv", text(rows)), table_rows=50, data_dir=tmp_path / "store")
    for column in range(26):
        values = [number(row[14 + column]) for row in rows]
        assert data.ids[column].tolist() == [split_mix(column * 2**33 + value) % 50 for value in values]
    assert {feature.num_embeddings for feature in data.features} == {50}
    ids = hashed_ids(np.arange(100_000), 3, 100)
    counts = np.bincount(ids.astype(np.int64), minlength=100)
    assert counts.min() > 850  # expected: 1000, with standard deviation 31
    assert counts.max() < 1150


def split_mix(state: int) -> int:
    """SplitMix64 in plain Python: the first number after ``state``."""
    z = (state + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def test_reference_of_the_hash():
    assert [split_mix(0), split_mix(1234567)] == [0xE220A8397B1DCDAF, 6457827717110365317]


def test_batches_are_the_rows_in_order(tmp_path):
    data = Criteo(write(tmp_path / "a.tsv", text(make_lines(100))), data_dir=tmp_path / "store")
    for split, rows in (("train", slice(0, 85)), ("test", slice(85, 100))):
        batches = list(data.batches(split, 10))
        np.testing.assert_array_equal(np.concatenate([b.label for b in batches]), data.label[rows])
        np.testing.assert_array_equal(np.concatenate([b.dense for b in batches]), data.dense[rows])
        ids = np.concatenate([b.features.values().view(26, -1) for b in batches], axis=1)
        np.testing.assert_array_equal(ids, data.ids[:, rows])
        assert all(b.shared is None for b in batches)
    assert [len(batch.label) for batch in data.batches("train", 10, 7)] == [10, 5]


def test_split_is_six_sevenths():
    assert [train_rows(rows) for rows in (7, 8, 13, 14, 8000)] == [6, 6, 11, 12, 6857]


@functools.cache
def many_lines() -> list[list[str]]:
    return make_lines(9000)


def changed(row: int, column: int, field: str) -> bytes:
    rows = many_lines().copy()
    rows[row] = [*rows[row][:column], field, *rows[row][column + 1 :]]
    return text(rows)


def check_refused(file: Path, content: bytes, message: str) -> None:
    """Asserts a DataError with the file's name, and that nothing is left."""
    write(file, content)
    with pytest.raises(DataError, match=message) as error:
        Criteo(file, data_dir=file.parent / "store")
    assert str(file) in str(error.value)
    assert not list((file.parent / "store").iterdir())


@pytest.mark.parametrize(
    ("row", "column", "field", "message"),
    [
        (8500, 0, "2", r"Row #8501: label is 2; expected are .*label \(0 or 1\), 13 whole numbers of 64 bits"),
        (4, 0, "", r"Row #5: label is blank;"),
        (0, 0, "yes", r", Row #1: label: .* int64: invalid value 'yes';"),
        (8500, 3, "1.5", r"Row #8501: I3: .* int64: invalid value '1\.5';"),
        (7, 13, "9" * 19, r"Row #8: I13: .* int64: invalid value '9{19}'"),
        (8500, 14, "xyz", r"Row #8501: C1 is 'xyz'; expected are .* 26 categories of up to 8 hexadecimal"),
        (7, 39, "123456789", r"Row #8: C26 is '123456789';"),
        (7, 20, "0x12345", r"Row #8: C7 is '0x12345';"),
        (7, 20, "é", r"Row #8: C7 is 'é';"),
        (7, 20, "1" * 100, r"Row #8: C7 is '1{59};"),
        (7, 20, '"1"', r"Row #8: C7 is '\"1\"';"),
        (8500, 39, "1\t2", r"Row #8501: Expected 40 columns, got 41: "),
    ],
)
def test_malformed_fields_are_refused(tmp_path, row, column, field, message):
    check_refused(tmp_path / "a.tsv", changed(row, column, field), message)


def with_a_long_line() -> bytes:
    return text(make_lines(9)) + b"0" * 3 * BLOCK


LONG = rf"after row 9: a line of more than {BLOCK} bytes; expected are"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: text(make_lines(9)) + b"\n" + text(make_lines(9)), r"Row #10: label is blank;"),
        (lambda: b"label\tI1\n" + text(make_lines(9)), r"Row #1: Expected 40 columns, got 2: label\tI1;"),
        (with_a_long_line, LONG),
        (lambda: b"", r"after row 0: Empty CSV file; expected are lines"),
        (lambda: text(make_lines(6)), r"has 6 rows, needs at least 7"),
    ],
    ids=["blank line", "names", "long line", "empty", "few rows"],
)
def test_malformed_files_are_refused(tmp_path, make, message):
    check_refused(tmp_path / "a.tsv", make(), message)


def test_malformed_files_in_gzip_are_refused(tmp_path):
    check_refused(tmp_path / "a.tsv.gz", changed(8500, 0, "2"), r"Row #8501: label is 2;")
    check_refused(tmp_path / "a.tsv.gz", with_a_long_line(), LONG)


def test_the_row_is_counted_in_its_own_file(tmp_path):
    write(tmp_path / "day_0", text(make_lines(50)))
    bad = write(tmp_path / "day_1", changed(2, 14, "?"))
    with pytest.raises(DataError, match=rf"{bad}, Row #3: C1 is '\?'"):
        list(read_rows([tmp_path / "day_0", bad]))


def damaged(content: bytes) -> dict[str, bytes]:
    packed = gzip.compress(content)
    middle = len(packed) // 2
    return {
        "half": packed[:middle],
        "without the end": packed[:-5],
        "changed": packed[:middle] + bytes(b ^ 0xFF for b in packed[middle : middle + 4]) + packed[middle + 4 :],
        "no gzip": content,
        "garbage after": packed + b"garbage",
    }


@pytest.mark.parametrize("kind", damaged(b""))
def test_damaged_gzip_is_refused(tmp_path, kind):
    file = tmp_path / "a.tsv.gz"
    file.write_bytes(damaged(text(make_lines(3000)))[kind])
    with pytest.raises(DataError, match=rf"{file}.*(after row \d+: |Row #\d+: )"):
        Criteo(file, data_dir=tmp_path / "store")
    assert not list((tmp_path / "store").iterdir())


def test_missing_paths_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"nothing does not exist: path must be a file in Criteo's format"):
        Criteo(tmp_path / "nothing", data_dir=tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty has no files: path must be a file"):
        Criteo(tmp_path / "empty", data_dir=tmp_path)
    (tmp_path / "empty" / "folder").mkdir()
    with pytest.raises(DataError, match=r"folder is not a file"):
        Criteo(tmp_path / "empty", data_dir=tmp_path)


@pytest.mark.parametrize(("option", "value"), [("rows", 6), ("table_rows", 2**31)])
def test_options_out_of_range(tmp_path, option, value):
    file = write(tmp_path / "a.tsv", text(make_lines(9)))
    with pytest.raises(DataError, match=f"{option} is {value}, allowed are"):
        Criteo(file, data_dir=tmp_path, **{option: value})


def test_a_prepared_source_is_prepared_again_only_when_it_or_the_options_change(tmp_path, capsys):
    rows = make_lines(40)
    file, store = write(tmp_path / "a.tsv", text(rows)), tmp_path / "store"

    def made(**options) -> set[tuple[str, int]]:
        Criteo(file, data_dir=store, **options)
        return {(folder.name, (folder / "manifest.json").stat().st_ino) for folder in store.iterdir()}

    first = made()
    (folder,) = store.iterdir()
    arrays = {f"{name}.npy" for name in ("label", "dense", "ids", "num_embeddings")}
    assert {path.name for path in folder.iterdir()} == {"manifest.json", *arrays}
    assert set(json.loads((folder / "manifest.json").read_text())) >= {"source", "rows", "table_rows", "files"}
    assert made() == first
    others = made(table_rows=9) | made(rows=20)
    assert first < others
    assert len(others) == 3
    assert "rebuilt" not in capsys.readouterr().err
    write(file, text(rows[::-1]))
    os.utime(file, ns=(1, 1))
    check_against_plain_python(Criteo(file, data_dir=store), rows[::-1])
    assert "prepared data is rebuilt" in capsys.readouterr().err
    assert len(list(store.iterdir())) == 3


def test_full_disk_leaves_nothing(tmp_path):
    file = write(tmp_path / "a.tsv", text(make_lines(3000)))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            Criteo(file, data_dir=tmp_path / "store")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list((tmp_path / "store").iterdir())


def test_reading_can_stop_in_the_middle(tmp_path):
    file = write(tmp_path / "a.tsv.gz", text(make_lines(20_000)))
    for count in (1, 2, 1):
        blocks = read_rows([file])
        assert all(len(block) for block in itertools.islice(blocks, count))
        blocks.close()
