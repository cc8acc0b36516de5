"""Generations of tables on disk: which exist, which belong to a state, and files without their log."""

from __future__ import annotations

import resource
import shutil

import pytest
import torch
from row_cache_disk_cases import (
    LFU,
    LRU,
    NONE,
    assert_equal_state,
    assert_unchanged,
    batch,
    copied,
    make,
    on_disk,
    pair,
    skip_without_host,
    state_without_tables,
    step,
    tables_of,
    train,
)
from row_file_cases import copied as copied_files

import rec_kernels as rk
from rec_kernels.testing import same_bits

skip_without_host()


def test_the_generation_of_the_checkpoint(tmp_path) -> None:
    """After a flush without a checkpoint, the file reopens at the previous generation, given by number.

    This also works after it was opened without a number, and rejected the state.
    """
    path, memory = tmp_path / "rows", make(LFU)
    expected = train(memory, 0, 12)
    first = make(on_disk(LFU, path))
    train(first, 0, 6)
    state = copied(first.state_dict())
    given = int(state["file_generation"])
    train(first, 6, 3)
    first.flush()
    crashed = copied_files(path, "crashed")
    again = copied_files(path, "again")
    last = make(on_disk(LFU, crashed))
    message = rf"file_generation is {given}, but .*crashed has generation {given + 1}: .*generation={given}\)"
    before = state_without_tables(last)
    with pytest.raises(RuntimeError, match=message):
        last.load_state_dict(state)
    assert_unchanged(last, before)
    with torch.no_grad():
        last(batch(last, 6))
    last.close()
    second = make(on_disk(LFU, crashed, generation=given))
    second.load_state_dict(state)
    for a, b in zip(train(second, 6, 6), expected[6:], strict=True):
        assert same_bits(a, b)
    memory.row_cache.stats.copy_(second.row_cache.stats)
    assert_equal_state(memory, second)
    with pytest.raises(ValueError, match=r"generation.*99"):
        make(on_disk(LFU, again, generation=99))


def test_states_of_tables_that_went_on_are_refused(tmp_path) -> None:
    """The collection itself also rejects states of earlier generations."""
    c = make(on_disk(LRU, tmp_path / "rows"))
    train(c)
    state = copied(c.state_dict())
    c.load_state_dict(state)  # nothing has changed since
    train(c, 6, 12)
    with pytest.raises(RuntimeError, match="whose rows have changed since: reopen the file"):
        c.load_state_dict(state)
    c.flush()
    given = int(state["file_generation"])
    with pytest.raises(RuntimeError, match=f"file_generation is {given}, but .* has generation {given + 1}: reopen"):
        c.load_state_dict(state)


@pytest.mark.parametrize("cache", [LRU, LFU, NONE], ids=["lru", "lfu", "none"])
def test_states_stay_good_while_nothing_changes(cache: rk.RowCache, tmp_path) -> None:
    """States stay valid while nothing changes; any change, even of one cached row, makes a new generation."""
    c = make(on_disk(cache, tmp_path / "rows"))
    for i in range(3):
        step(c, i)
        first = copied(c.state_dict())
        assert first["file_generation"] == i + 2  # 1: the initial tables
        c.eval()
        with torch.no_grad():
            c(batch(c, 50))
        c.train()
        c.prefetch(batch(c, 51))
        c.flush()
        for n, t in c.state_dict().items():
            assert same_bits(t, first[n]), n
        c.load_state_dict(first)
    pooled = c(batch(c, 60)).values()
    between = copied(c.state_dict())
    pooled.square().sum().backward()
    c.flush()
    with pytest.raises(RuntimeError, match=f"file_generation is {i + 3}, but .* has generation {i + 4}"):
        c.load_state_dict(between)


def test_states_of_other_files_are_refused(tmp_path) -> None:
    """Equal tables at an equal generation of another file are rejected; a state without a file's name is accepted."""
    one, other = make(on_disk(LRU, tmp_path / "one"), seed=1), make(on_disk(LRU, tmp_path / "other"), seed=2)
    train(one)
    train(other, 6)
    state, own = copied(one.state_dict()), copied(other.state_dict())
    assert state["file_generation"] == own["file_generation"]
    before = state_without_tables(other)
    with pytest.raises(RuntimeError, match=r"file_identity is -?\d+, but that of .*other is -?\d+: .*another file"):
        other.load_state_dict(state)
    assert_unchanged(other, before)
    one.load_state_dict(state)
    del own["file_identity"]
    assert "<All keys matched" in str(other.load_state_dict(own))


@pytest.mark.parametrize("call", ["flush", "state_dict"])
def test_an_update_after_a_flush_that_failed(call: str, tmp_path) -> None:
    """If the disk is full between a lookup and its update, the update reaches the file with the next flush."""
    memory, disk = pair(NONE, tmp_path / "rows")
    for c in (memory, disk):
        train(c, steps=12)
    outputs = [c(batch(c, 100, size=8)).values() for c in (memory, disk)]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    most = disk._store.file.row_file.stats()["log_bytes"] + 4 * 4096  # some blocks more
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large.*rows\.log"):
            getattr(disk, call)()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    for output in outputs:
        output.square().sum().backward()
    disk.flush()
    disk.close()
    again = make(on_disk(NONE, tmp_path / "rows"))
    assert all(torch.equal(t, tables_of(again)[n]) for n, t in tables_of(memory).items())


def test_a_file_without_its_log(tmp_path) -> None:
    """A file without its log is whole if new or if requested; otherwise the log's generation is lost."""
    path = tmp_path / "rows"
    c = make(on_disk(LRU, path))
    shutil.copyfile(path, tmp_path / "new")
    new = make(on_disk(LRU, tmp_path / "new"), init=lambda weight: weight.zero_())
    assert_equal_state(c, new)
    train(c)
    state = copied(c.state_dict())
    given = int(state["file_generation"])
    for apply in (False, True):
        c.close(apply=apply)
        shutil.copyfile(path, tmp_path / f"alone{apply}")
        c = make(on_disk(LRU, path))
        c.load_state_dict(state)
    before = make(on_disk(LRU, tmp_path / "aloneFalse"))
    assert before._store.file.row_file.generation == given - 1
    alone = make(on_disk(LRU, tmp_path / "aloneTrue"))
    alone.load_state_dict(state)
    c.row_cache.stats.zero_()
    assert_equal_state(c, alone)
