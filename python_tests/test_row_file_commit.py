"""Damaged commits in a row file's log: an acknowledged generation is found, or an error keeps the log."""

from __future__ import annotations

import random

import numpy as np
import pytest
from row_file_cases import BLOCK, LAYOUT, contents, fill, host_or_skip, log_of, noise, open_file
from tiers import full

RowFile = host_or_skip().RowFile

HEAD, SECOND, COMMIT = 4096, 2048, 64


@pytest.fixture(scope="module")
def acknowledged(tmp_path_factory):
    return two_generations(tmp_path_factory.mktemp("row_file") / "file")


def two_generations(path) -> tuple[bytes, bytes, np.ndarray]:
    """The bytes of a row file of generation 1 and of a log with generation 2, and the contents of generation 2."""
    old, new = noise(1, 4 * BLOCK), noise(2, 4 * BLOCK)
    with RowFile.create(str(path), 4 * BLOCK, layout=LAYOUT, memory_budget=4 * BLOCK) as file:
        fill(file, 0, old)
        file.flush()
        fill(file, 0, new)
        file.flush(apply=False)
        return path.read_bytes(), log_of(path).read_bytes(), new


def outcome(folder, main: bytes, log: bytes, new: np.ndarray) -> str:
    """Returns "found" or "refused" after `open`; fails if a generation is lost silently."""
    path = folder / "damaged"
    path.write_bytes(main)
    log_of(path).write_bytes(log)
    try:
        file = open_file(path)
    except (OSError, ValueError):
        assert path.read_bytes() == main
        assert log_of(path).read_bytes() == log
        return "refused"
    with file:
        assert file.generation == 2
        assert np.array_equal(contents(file), new)
    return "found"


@pytest.mark.parametrize("place", [0, SECOND])
def test_every_bit_of_a_copy(place, acknowledged, tmp_path):
    """A flipped bit of one copy is repaired by the other. (In the first word it makes the log no log.)"""
    main, log, new = acknowledged
    for bit in range(8 * COMMIT):
        damaged = bytearray(log)
        damaged[place + bit // 8] ^= 1 << bit % 8
        expected = "refused" if place == 0 and bit < 64 else "found"
        assert outcome(tmp_path, main, bytes(damaged), new) == expected, bit


def test_a_lost_half(acknowledged, tmp_path):
    main, log, new = acknowledged
    for place in (0, SECOND):
        assert outcome(tmp_path, main, log[:place] + bytes(SECOND) + log[place + SECOND :], new) == "found"


def test_both_copies(acknowledged, tmp_path):
    """Damage of both copies is an error."""
    main, log, new = acknowledged
    damaged = bytearray(log)
    damaged[20] ^= 1
    damaged[SECOND + 20] ^= 1
    assert outcome(tmp_path, main, bytes(damaged), new) == "refused"


def test_a_torn_commit(acknowledged, tmp_path):
    """After a crash before the second copy was complete, nothing was acknowledged: generation 1 is used."""
    main, log, _ = acknowledged
    for torn in (0, 1, 30, 48):
        path = tmp_path / "torn"
        path.write_bytes(main)
        log_of(path).write_bytes(bytes(SECOND) + log[SECOND : SECOND + torn] + bytes(SECOND - torn) + log[HEAD:])
        with open_file(path) as file:
            assert file.generation == 1


def test_a_log_of_one_copy(acknowledged, tmp_path):
    """Older logs with one copy are read."""
    main, log, new = acknowledged
    assert outcome(tmp_path, main, log[:SECOND] + bytes(SECOND) + log[HEAD:], new) == "found"


def random_damage(folder, files: tuple[bytes, bytes, np.ndarray], count: int, seed: int) -> list[str]:
    """Outcomes of logs with flipped bits, zeroed, random or exchanged sectors, or truncation."""
    main, log, new = files
    rng, seen = random.Random(seed), []
    for _ in range(count):
        damaged, kind = bytearray(log), rng.randrange(4)
        sector = 512 * rng.randrange(len(log) // 512)
        if kind == 0:
            for _ in range(rng.randint(1, 3)):
                damaged[rng.choice((rng.randrange(HEAD), rng.randrange(len(log))))] ^= 1 << rng.randrange(8)
        elif kind == 1:
            damaged[sector : sector + 512] = bytes(512) if rng.random() < 0.5 else rng.randbytes(512)
        elif kind == 2:
            other = 512 * rng.randrange(len(log) // 512)
            damaged[sector : sector + 512], damaged[other : other + 512] = log[other : other + 512], log[sector:][:512]
        else:
            del damaged[rng.randint(1, len(log) - 1) :]
        seen.append(outcome(folder, main, bytes(damaged), new))
    return seen


@pytest.mark.parametrize("count", [250, *full(1000)])
def test_random_damage(count, acknowledged, tmp_path):
    """Damaged logs are read correctly, or rejected."""
    seen = random_damage(tmp_path, acknowledged, count=count, seed=0)
    assert min(seen.count(how) for how in ("found", "refused")) > count // 10
