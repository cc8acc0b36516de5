"""Row files and logs that are damaged, truncated or of other files are used safely, or rejected with the reason."""

from __future__ import annotations

import errno
import itertools
import shutil
import struct

import numpy as np
import pytest
from row_file_cases import (
    BLOCK,
    LAYOUT,
    assert_holds,
    contents,
    copied,
    fill,
    flip,
    host_or_skip,
    log_of,
    noise,
    open_file,
)

RowFile = host_or_skip().RowFile
BLOCKS = 8
# Positions of the parts in a file of 8 blocks and its log (docs/row_file.md).
STATES, LAYOUT_AT, CHECKSUMS, DATA = (4096, 8192), 12288, 16384, 20480
SLOTS = 4096


@pytest.fixture
def two_states(tmp_path):
    """Generation 1 in the file, 2 in its log (blocks 0, 1 and 5), and their contents."""
    path = tmp_path / "file"
    first = noise(1, BLOCKS * BLOCK)
    second = first.copy()
    second[: 2 * BLOCK] = noise(2, 2 * BLOCK)
    second[5 * BLOCK : 6 * BLOCK] = noise(3, BLOCK)
    with RowFile.create(path, first.size, layout=LAYOUT, memory_budget=4 * BLOCK) as file:
        fill(file, 0, first)
        file.flush()
        fill(file, 0, second[: 2 * BLOCK])
        fill(file, 5, second[5 * BLOCK : 6 * BLOCK])
        assert file.flush(apply=False) == 2
    return path, first, second


def test_a_committed_log_leaves_the_choice(two_states):
    path, first, second = two_states
    for options in ({}, {"generation": 2}):  # which keep both generations while nothing is written
        assert_holds(path, 2, second, **options)
        assert_holds(copied(path, "other"), 1, first, generation=1)
    one = copied(path, "one")
    assert_holds(one, 1, first, generation=1)
    assert_holds(one, 1, first)  # the other generation no longer exists
    for generation in (0, 3, -1):
        with pytest.raises(ValueError, match=rf"generation is {generation}, but .*file has 1 and, in its log, 2"):
            open_file(path, generation=generation)
    with open_file(path) as file:
        file.apply()
    assert_holds(path, 2, second)
    with pytest.raises(ValueError, match=r"generation is 1, but .*file has 2 only"):
        open_file(path, generation=1)


def test_apply_and_the_next_spill_settle_the_choice(two_states):
    path, _, second = two_states
    with open_file(path) as file:
        fill(file, 7, noise(9, BLOCK))
        file.flush(apply=False)
        assert file.stats()["log_bytes"] == SLOTS + BLOCK
        fill(file, 3, second[3 * BLOCK :])
        file.load([0], 4 * BLOCK)  # the dirty blocks are written
        with pytest.raises(ValueError, match="has 3 only"):
            open_file(copied(path, "copy"), generation=2)
        file.flush(apply=False)
        assert open_file(copied(path, "copy"), generation=3).generation == 3
        file.apply()
        file.apply()
        with pytest.raises(ValueError, match="has 4 only"):
            open_file(copied(path, "copy"), generation=3)
    assert_holds(path, 4, second)


def test_a_generation_in_the_log_goes_on_from_there(two_states):
    """Opened with a generation, read and changed, by a spill or a flush, which drop the other generation."""
    path, first, second = two_states
    for written in (4, 8):
        copy = copied(path, f"written{written}")
        with open_file(copy, memory_budget=5 * BLOCK) as file:
            assert file.generation == 2
            fill(file, 0, first[: written * BLOCK])
            if written == 4:
                assert_holds(copied(copy, f"unwritten{written}"), 1, first, generation=1)
                file.flush(apply=False)
                with pytest.raises(ValueError, match="has 2 and, in its log, 3"):
                    open_file(copied(copy, "flushed"), generation=1)
            else:
                with pytest.raises(ValueError, match="has 2 only"):
                    open_file(copied(copy, "spilled"), generation=1)
                assert_holds(copied(copy, "back"), 2, second)
        expected = np.concatenate([first[: 4 * BLOCK], second[4 * BLOCK :]]) if written == 4 else second
        assert_holds(copy, 3 if written == 4 else 2, expected)


def test_what_was_not_flushed_is_discarded(two_states):
    path, _, second = two_states
    with open_file(path) as file:
        fill(file, 0, noise(4, BLOCKS * BLOCK))
        assert file.stats()["log_bytes"] > 0
        assert log_of(path).stat().st_size > 0
        assert_holds(copied(path, "crashed"), 2, second)
    assert_holds(path, 2, second)


def test_logs_cut_short(two_states):
    """An empty log means the previous generation. A commit without its blocks is damage, with advice in the error."""
    path, first, second = two_states
    size = log_of(path).stat().st_size
    assert size == SLOTS + 3 * BLOCK + 3 * 16
    for length in (0, 1, 63, 64, SLOTS - 1, SLOTS, SLOTS + 1, SLOTS + BLOCK, size - 49, size - 48, size - 16, size - 1):
        copy = copied(path, f"cut{length}")
        with log_of(copy).open("r+b") as log:
            log.truncate(length)
        if length > 0:
            what = f"commit of 3 blocks of generation 2, but only {length} bytes"
            with pytest.raises(OSError, match=what if length > 1 else "both copies of the log's commit") as caught:
                open_file(copy)
            assert (caught.value.errno, caught.value.filename) == (errno.EBADMSG, str(log_of(copy)))
        if length == 1:
            log_of(copy).unlink()
        assert_holds(copy, 1, first, generation=1)
        assert_holds(copy, 1, first)
    log_of(path).write_bytes(log_of(path).read_bytes() + b"more")
    assert_holds(path, 2, second)


def test_damaged_logs(two_states):
    path, first, second = two_states
    index = SLOTS + 3 * BLOCK
    torn = copied(path, "torn")  # the log has a second copy of the commit
    with log_of(torn).open("r+b") as log:
        log.write(b"RKRO" + bytes(60))
    assert_holds(torn, 2, second)
    for place in (index, index + 8, index + 47):
        copy = copied(path, f"index{place}")
        flip(log_of(copy), place)
        with pytest.raises(OSError, match=rf"index \(bytes {index} to {index + 47}\) is damaged"):
            open_file(copy)
        assert_holds(copy, 1, first, generation=1)
    for slot, block in enumerate((0, 1, 5)):
        copy = copied(path, f"slot{slot}")
        flip(log_of(copy), SLOTS + slot * BLOCK + 7)
        place = SLOTS + slot * BLOCK
        for _ in range(2):
            with pytest.raises(OSError, match=rf"block {block} .*, at byte {place} of the file, is damaged"):
                open_file(copy)
        assert_holds(copied(copy, "before"), 1, first, generation=1)
        flip(log_of(copy), place + 7)
        assert_holds(copy, 2, second)


@pytest.mark.parametrize("found", [b"my notes", b"RKROWFIL", b"\0\0\0!", b"r", b"RKROWLOg" + bytes(8192)])
def test_files_that_have_the_name_of_the_log(found, two_states, tmp_path):
    """Other files with the log's name are not changed, whether the row file is created or opened."""
    path, first, _ = two_states
    log = log_of(path)
    kept = log.read_bytes()
    log.write_bytes(found)
    with pytest.raises(
        ValueError, match=r"file\.log is not the log of a row file .* the name of the log of .*file; move it"
    ):
        open_file(path)
    assert log.read_bytes() == found
    new = tmp_path / "new"
    log_of(new).write_bytes(found)
    with pytest.raises(ValueError, match=r"new\.log is not the log of a row file"):
        RowFile.create(new, BLOCK, layout=LAYOUT, memory_budget=BLOCK)
    assert log_of(new).read_bytes() == found
    assert not new.exists()
    log.write_bytes(kept)
    assert_holds(path, 1, first, generation=1)


def test_logs_of_other_files(two_states, tmp_path):
    path, first, _ = two_states
    other = tmp_path / "other"
    with RowFile.create(other, BLOCKS * BLOCK, layout=LAYOUT, memory_budget=BLOCK) as file:
        file.flush()
    shutil.copyfile(log_of(path), log_of(other))
    with pytest.raises(ValueError, match="is the log of another row file"):
        open_file(other)
    old = copied(path, "old")
    with open_file(path) as file:
        fill(file, 1, first[BLOCK : 2 * BLOCK])
        file.flush()
        file.flush(apply=False)
        shutil.copyfile(log_of(path), log_of(old))
    with pytest.raises(ValueError, match=r"has generation 4, but .*old has 1: they do not belong together"):
        open_file(old)
    log_of(old).unlink()
    assert_holds(old, 1, first)


def test_damaged_blocks_are_named_and_the_others_used(two_states):
    path, _, second = two_states
    open_file(path).close()
    flip(path, DATA + 3 * BLOCK + 100)
    flip(path, DATA + 6 * BLOCK)
    with open_file(path) as file:
        message = r"block 3 \(bytes 12288 to 16383 of the window\), at byte 32768 of the file, is damaged"
        for call in range(3):
            with pytest.raises(OSError, match=message) as caught:
                file.load([3 * BLOCK - 5], 10)
            assert (caught.value.errno, caught.value.filename) == (errno.EBADMSG, str(path)), call
        file.prefetch([0, 3 * BLOCK], 1)  # leaves the error to the load
        with pytest.raises(OSError, match="block 3 "):
            file.load([0, 3 * BLOCK], 1)
        for block in (0, 1, 2, 4, 5, 7):
            file.load([block * BLOCK], BLOCK)
            assert np.array_equal(file.window[block * BLOCK :][:BLOCK], second[block * BLOCK :][:BLOCK])
        flip(path, DATA + 3 * BLOCK + 100)
        flip(path, DATA + 6 * BLOCK)
        assert np.array_equal(contents(file), second)


def test_blocks_never_written_are_checked_too(tmp_path):
    with RowFile.create(tmp_path / "file", BLOCKS * BLOCK, layout=LAYOUT, memory_budget=BLOCK) as file:
        flip(tmp_path / "file", DATA + 2 * BLOCK)
        with pytest.raises(OSError, match="block 2 "):
            file.load([2 * BLOCK], 1)


@pytest.mark.parametrize(
    ("place", "kind", "message"),
    [
        (0, ValueError, "is not a row file: it does not begin with RKROWFIL"),
        (8, ValueError, "has version 65 of the format of row files, expected 1"),
        (12, OSError, "the header .* or the layout .* is damaged"),
        (16, OSError, "the header"),
        (24, OSError, "the header"),
        (32, OSError, "the header"),
        (39, OSError, "the header"),
        (40, OSError, "the header"),
        (63, OSError, "the header"),
        (LAYOUT_AT, OSError, "the header"),
        (CHECKSUMS, OSError, r"checksums of the blocks \(bytes 16384 to 16415\) .*damaged: wrong digest"),
        (CHECKSUMS + 31, OSError, "checksums of the blocks"),
    ],
)
def test_damage_in_front_of_the_blocks(place, kind, message, two_states):
    path, first, _ = two_states
    assert_holds(path, 1, first, generation=1)
    flip(path, place)
    with pytest.raises(kind, match=message):
        open_file(path)
    flip(path, place)
    assert_holds(path, 1, first)


def test_damaged_states(two_states):
    path, _, second = two_states
    with open_file(path) as file:
        file.apply()
    whole, begun = STATES
    for offset in range(0, 48, 5):
        copy = copied(path, f"begun{offset}")
        flip(copy, begun + offset)
        assert_holds(copy, 2, second)  # without effect after the copying
        copy = copied(path, f"whole{offset}")
        flip(copy, whole + offset)
        with pytest.raises(OSError, match="the log does not have generation 2, which was being copied") as caught:
            open_file(copy)
        assert caught.value.errno == errno.EBADMSG
        flip(copy, begun + offset)
        with pytest.raises(OSError, match="states at bytes 4096 and 8192 are damaged"):
            open_file(copy)


def test_states_that_lie(two_states):
    """Impossible counters with a valid checksum are rejected: the next one would overflow."""
    path, _, second = two_states
    with open_file(path) as file:
        file.apply()
    raw = path.read_bytes()
    crc32c = host_or_skip().crc32c
    for begin, place in itertools.product(STATES, (16, 24)):
        state = bytearray(raw[begin : begin + 48])
        struct.pack_into("<q", state, place, 2**63 - 2 + (begin == STATES[1]))
        state[12:16] = bytes(4)
        struct.pack_into("<I", state, 12, crc32c(bytes(state)))
        path.write_bytes(raw[:begin] + state + raw[begin + 48 :])
        if begin == STATES[1]:
            assert_holds(path, 2, second)
            continue
        with pytest.raises(OSError, match="the log does not have generation 2") as caught:
            open_file(path)
        assert caught.value.errno == errno.EBADMSG


def test_files_cut_short_or_of_another_kind(two_states):
    path, _, _ = two_states
    size = path.stat().st_size
    assert size == DATA + BLOCKS * BLOCK
    for length in (LAYOUT_AT + 1, CHECKSUMS, DATA, size - 1, size + 1):
        copy = copied(path, f"cut{length}")
        with copy.open("r+b") as file:
            file.truncate(length)
        with pytest.raises(
            OSError, match=f"{length} bytes, but its header requires {size}|the header .*damaged"
        ) as caught:
            open_file(copy)
        assert caught.value.filename == str(copy)
    for content in (b"", b"RKROWFIL", b"x" * 100_000, bytes(100_000)):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="is not a row file"):
            open_file(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="is not a row file: it has 0 bytes"):
        open_file(path)


def test_headers_that_lie(two_states):
    """Impossible sizes with a valid checksum are rejected."""
    path, _, _ = two_states
    raw = bytearray(path.read_bytes())
    crc32c = host_or_skip().crc32c
    for place, value in itertools.product((16, 24, 32), (-1, -(2**63), 2**63 - 1, 2**40, 2**62, 0)):
        lie = raw.copy()
        struct.pack_into("<q", lie, place, value)
        layout = lie[LAYOUT_AT:][:value] if place == 32 and 0 <= value <= len(raw) - LAYOUT_AT else LAYOUT.encode()
        if place == 32 and not 0 <= value <= len(raw) - LAYOUT_AT:
            layout = b""
        lie[12:16] = bytes(4)
        struct.pack_into("<I", lie, 12, crc32c(bytes(lie[:64]) + bytes(layout)))
        path.write_bytes(lie)
        with pytest.raises((ValueError, OSError), match=r"cannot be used|its header requires|damaged|another layout"):
            open_file(path)


def test_a_file_cut_short_while_open(two_states):
    path, _, second = two_states
    with open_file(path) as file:
        file.load([0], 2 * BLOCK)
        with path.open("r+b") as handle:
            handle.truncate(DATA + 6 * BLOCK + 10)
        with pytest.raises(OSError, match=r"the file ends at byte \d+, expected at least \d+ bytes") as caught:
            file.load([5 * BLOCK], 2 * BLOCK)
        assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(path))
        file.load([0], 2 * BLOCK)
        assert np.array_equal(file.window[: 2 * BLOCK], second[: 2 * BLOCK])
