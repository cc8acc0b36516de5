"""Row files call by call: loading, pinning, counting, errors; the format as an independent reader sees it."""

from __future__ import annotations

import gc
import json
import os
import re
import struct
import threading

import numpy as np
import pytest
import torch
from row_file_cases import BLOCK, LAYOUT, contents, fill, host_or_skip, log_of, noise, resident_blocks, run_script

_host = host_or_skip()
RowFile = _host.RowFile


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tables"


def create(path, blocks=8, budget=4, **options):
    return RowFile.create(path, blocks * BLOCK, **{"layout": LAYOUT, "memory_budget": budget * BLOCK} | options)


def reopen(path, budget=4, **options):
    return RowFile.open(path, **{"layout": LAYOUT, "memory_budget": budget * BLOCK} | options)


def test_checksums():
    assert _host.crc32c(b"123456789") == 0xE3069283  # the check value of CRC-32C
    assert _host.crc32c(b"") == 0
    for size in [*range(20), 4079, 4080, 4081, 4096, 8192 + 7, 65536]:
        data = noise(size, size).tobytes()
        assert _host.crc32c(data) == _host.crc32c(data, by_table=True), size


def test_the_format_is_the_documented_one(path):
    """An independent reader follows the comments in block_file.h."""
    values = noise(1, 5 * BLOCK + 10)
    with RowFile.create(path, 9 * BLOCK + 10, layout=LAYOUT, memory_budget=4 * BLOCK) as file:
        fill(file, 2, values)
        file.flush()
        assert file.flush() == 2
    raw = path.read_bytes()
    layout = LAYOUT.encode()
    header = struct.unpack_from("<8sIIqqqQ", raw)
    assert header[:2] == (b"RKROWFIL", 1)
    assert header[3:6] == (9 * BLOCK + 10, BLOCK, len(layout))
    assert header[2] == _host.crc32c(raw[:12] + bytes(4) + raw[16:64] + layout)
    assert raw[12288 : 12288 + len(layout)] == layout
    states = [struct.unpack_from("<8sIIqqQQ", raw, place) for place in (4096, 8192)]
    for place, state in zip((4096, 8192), states, strict=True):
        assert state[2] == _host.crc32c(raw[place : place + 12] + bytes(4) + raw[place + 16 : place + 48])
    newest = max(states, key=lambda s: s[3])
    assert newest[:2] == (b"RKROWSTA", 0)
    assert newest[3] % 2 == 0
    assert newest[4] == 2
    assert newest[6] == header[6]
    checksums = np.frombuffer(raw, np.uint32, 10, 16384)
    data = raw[20480:]
    assert len(data) == 10 * BLOCK
    assert data == bytes(2 * BLOCK) + values.tobytes() + bytes(3 * BLOCK - 10)
    zeros, wrap, digest = _host.crc32c(bytes(BLOCK)), (1 << 64) - 1, 0
    for block, checksum in enumerate(map(int, checksums)):
        assert checksum == _host.crc32c(data[block * BLOCK :][:BLOCK]) ^ zeros
        assert (checksum == 0) == (block < 2 or block > 7)
        if checksum:
            z = (block * 0x9E3779B97F4A7C15 + checksum) & wrap
            z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & wrap
            z = (z ^ z >> 27) * 0x94D049BB133111EB & wrap
            digest = (digest + (z ^ z >> 31)) & wrap
    assert newest[5] == digest


def test_a_new_file_reads_as_zeros_and_is_sparse(path):
    with create(path, blocks=10_000) as file:
        file.load([0, 9_999 * BLOCK], BLOCK)
        assert not file.window[:BLOCK].any()
        assert not file.window[-BLOCK:].any()
        assert path.stat().st_blocks * 512 < 200 * BLOCK
        assert (file.generation, file.num_bytes, file.block_bytes) == (0, 10_000 * BLOCK, BLOCK)
        assert file.path == str(path)


def test_blocks_of_other_sizes(path):
    values = noise(2, 10 * BLOCK)
    with RowFile.create(path, 10 * BLOCK, layout="", memory_budget=8 * BLOCK, block_bytes=4 * BLOCK) as file:
        file.load([5], 1, write=True)
        assert resident_blocks(file.window) == 4
        file.load([0, 9 * BLOCK], BLOCK)
        for start in (0, 8 * BLOCK):
            file.load([start], min(8, 10 - start // BLOCK) * BLOCK, write=True)
            file.window[start : start + 8 * BLOCK] = values[start : start + 8 * BLOCK]
        file.flush()
    with RowFile.open(path, layout="", memory_budget=1 << 20) as file:
        assert file.block_bytes == 4 * BLOCK
        file.load([0], file.num_bytes)
        assert np.array_equal(file.window, values)


def test_no_bytes_at_all(path):
    with create(path, blocks=0, budget=1) as file:
        file.load([], 4)
        file.load([0], 0)
        assert file.window.shape == (0,)
        assert file.flush() == 1
    with reopen(path) as file:
        assert file.generation == 1


def test_the_window_outlives_the_file(path):
    file = create(path)
    window = file.window
    file.load([0], BLOCK, write=True)
    window[:BLOCK] = 7
    file.close()
    file.close()
    assert file.closed
    assert not window.any()  # released, but still mapped
    del file
    gc.collect()
    window[0] = 1
    for call in ("unpin", "cancel_prefetch", "flush", "apply"):
        other = create(path.with_name(call))
        other.close()
        with pytest.raises(ValueError, match="is closed"):
            getattr(other, call)()


def test_arguments_from_torch_and_numpy(path):
    with create(path) as file:
        file.load(torch.tensor([0, BLOCK]), torch.tensor([1, 1]))
        file.load(np.array([0, BLOCK]), np.int64(3))
        file.load(torch.tensor([0]), torch.tensor(3))
        assert file.stats()["hits"] == 3
        file.load(np.arange(0, 8 * BLOCK, BLOCK)[::2], 1)  # strides
        assert file.stats()["hits"] == 4


def test_every_file_has_a_number_of_its_own(path):
    with create(path) as file, create(path.with_name("other")) as other:
        number = file.identity
        assert 0 <= number < 2**64
        assert number != other.identity
    assert struct.unpack_from("<Q", path.read_bytes(), 40) == (number,)
    with reopen(path) as file:
        assert file.identity == number


def test_statistics(path):
    with create(path, blocks=8, budget=4) as file:
        fill(file, 0, noise(3, 4 * BLOCK))
        file.load([0, 1, BLOCK - 1, 4 * BLOCK], 2)  # three blocks, one of them not resident
        stats = file.stats()
        assert (stats["loads"], stats["hits"], stats["blocks_read"], stats["bytes_read"]) == (2, 2, 5, 5 * BLOCK)
        assert (stats["blocks_written"], stats["log_bytes"]) == (1, 2 * BLOCK)
        assert (stats["resident_bytes"], stats["dirty_bytes"]) == (4 * BLOCK, 3 * BLOCK)
        assert 8 * 5 <= stats["bookkeeping_bytes"] < 4000
        file.unpin()
        file.prefetch([6 * BLOCK], 1)
        assert file.stats()["prefetched"] == 1


def test_what_is_asked_for_often_stays(path):
    """Second chance: a block loaded every other time stays, except in the first round, when all are equal."""
    with create(path, blocks=64, budget=4) as file:
        for block in range(1, 64):
            file.load([0], 1)
            file.load([block * BLOCK], 1)
        assert file.stats()["blocks_read"] <= 65


def test_pinned_blocks_stay(path):
    with create(path, blocks=8, budget=4) as file:
        file.load([0], 3 * BLOCK)
        file.prefetch([3 * BLOCK], 1)
        for what in ([4 * BLOCK], [5 * BLOCK]):
            with pytest.raises(MemoryError, match=r"needs 4096 bytes .* 16384 bytes held by .*_budget is 16384 bytes"):
                file.prefetch(what, 1)
        with pytest.raises(MemoryError, match=r"load needs 20480 bytes of memory \(5 blocks of 4096 bytes\)"):
            file.load([0, 2 * BLOCK], 3 * BLOCK)
        read = file.stats()["blocks_read"]
        file.load([0], 4 * BLOCK)  # all of them stayed pinned through the errors
        assert file.stats()["blocks_read"] <= max(read, 4)
        file.unpin()
        file.load([4 * BLOCK], 4 * BLOCK)


def test_prefetch_then_load_is_load(path):
    values = noise(4, 64 * BLOCK)
    with create(path, blocks=64, budget=64) as file:
        fill(file, 0, values)
        file.flush()
    with reopen(path, budget=16, threads=2) as file:
        order = np.random.default_rng(0).permutation(64).reshape(8, 8) * BLOCK
        file.prefetch(order[0], BLOCK)
        for step, starts in enumerate(order):
            file.load(starts, BLOCK)
            if step < 7:
                file.prefetch(order[step + 1], BLOCK)
            for s in starts:
                assert np.array_equal(file.window[s : s + BLOCK], values[s : s + BLOCK])
        stats = file.stats()
        assert (stats["prefetched"], stats["blocks_read"], stats["hits"]) == (64, 64, 64)


def test_many_threads(path):
    values = noise(5, 64 * BLOCK)
    file = create(path, blocks=64, budget=24, threads=3)
    fill(file, 0, values)
    file.flush()
    loading, failures = threading.Lock(), []

    def load(starts, write):
        while True:
            try:
                return file.load(starts, BLOCK, write=write)
            except MemoryError:  # the others have prefetched too much
                file.cancel_prefetch()

    def work(seed):
        rng = np.random.default_rng(seed)
        try:
            for _ in range(150):
                starts = rng.integers(0, 64, 8) * BLOCK
                if seed % 2:
                    with loading:
                        load(starts, write=bool(rng.integers(2)))
                        for s in starts:
                            assert np.array_equal(file.window[s : s + BLOCK], values[s : s + BLOCK])
                elif rng.integers(3):
                    try:
                        file.prefetch(starts, BLOCK)
                    except MemoryError:
                        file.cancel_prefetch()
                else:
                    assert file.stats()["resident_bytes"] <= 24 * BLOCK
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    file.cancel_prefetch()
    assert np.array_equal(contents(file), values)
    file.flush()
    file.close()
    with reopen(path) as file:
        assert np.array_equal(contents(file), values)


def test_memory_stays_near_the_budget(path):
    """A file of 128 MiB, written and read in 8 MiB."""
    out = run_script(
        """
def rss():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmRSS")).split()[1]) << 10
file = RowFile.create(sys.argv[1], 32768 * BLOCK, layout=LAYOUT, memory_budget=8 << 20)
window, rng, most = file.window, np.random.default_rng(0), 0
before = rss()
for step in range(64):
    starts = rng.integers(0, 32768, 1500) * BLOCK
    file.load(starts, 64, write=True)
    window[starts] = 1
    most = max(most, rss() - before)
file.flush()
print(most, max(most, rss() - before), file.stats()["blocks_read"])
""",
        path,
    )
    most, with_flush, read = map(int, out.split())
    assert read > 60_000
    assert 6 << 20 < most < 12 << 20
    assert with_flush < 16 << 20


def test_forked_processes_are_told(path):
    out = run_script(
        """
file = RowFile.create(sys.argv[1], 8 * BLOCK, layout=LAYOUT, memory_budget=4 * BLOCK)
file.load([0], 10, write=True)
file.window[:10] = 5
sys.stdout.flush()
child = os.fork()
if child == 0:
    try:
        file.load([0], 10)
    except RuntimeError as error:
        print("told:", error)
    del file
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
file.flush()
file.close()
with RowFile.open(sys.argv[1], layout=LAYOUT, memory_budget=BLOCK) as file:
    file.load([0], 10)
    print(file.window[:10].tolist())
""",
        path,
    )
    assert "told: the row file" in out
    assert "open the file after forking" in out
    assert str([5] * 10) in out


@pytest.mark.parametrize(
    ("starts", "sizes", "kind", "message"),
    [
        ([0, 8 * BLOCK - 3], 4, IndexError, r"starts\[1\] = 32765 with size 4 is outside the window of 32768 bytes"),
        ([-1], 1, IndexError, r"starts\[0\] = -1 with size 1"),
        ([2**62], [2**62], IndexError, r"starts\[0\] = 4611686018427387904"),
        ([0], 2**63 - 1, IndexError, "size 9223372036854775807"),
        ([0, 0], [1, -2], ValueError, r"sizes\[1\] is -2, allowed is at least 0"),
        ([0], -2, ValueError, "sizes is -2"),
        ([0, 0], [1], ValueError, "as many elements as starts, 2, got 1"),
        ([[0]], 1, ValueError, "starts must have 1 dimension, got 2"),
        ([0.0], 1, TypeError, "starts must be int64, got float64"),
        (np.array([0], np.int32), 1, TypeError, "starts must be int64, got int32"),
        ([0], [1.5], TypeError, "sizes must be int64, got float64"),
        ([0], 1.5, TypeError, "'float' object cannot be interpreted as an integer"),
        ([0], 2**70, OverflowError, "int too"),
        ([0], [[1]], ValueError, "sizes must have 1 dimension, got 2"),
    ],
)
def test_bad_ranges_change_nothing(starts, sizes, kind, message, path):
    with create(path) as file:
        file.load([0], 4 * BLOCK, write=True)
        before = file.stats()
        for call in (file.load, file.prefetch, file.mark_dirty):
            with pytest.raises(kind, match=message):
                call(starts, sizes)
        assert file.stats() == before


def test_only_loaded_blocks_can_be_marked(path):
    with create(path) as file:
        file.load([0], BLOCK)
        with pytest.raises(ValueError, match=r"block 1 \(bytes 4096 to 8191 of the window\) is not loaded"):
            file.mark_dirty([0, BLOCK], 1)
        assert file.stats()["dirty_bytes"] == 0
        file.unpin()
        with pytest.raises(ValueError, match="block 0"):
            file.mark_dirty([0], 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blocks": -1}, "num_bytes is -4096, allowed are 0 to"),
        ({"blocks": 2**40}, "num_bytes is 4503599627370496, allowed"),
        ({"memory_budget": BLOCK - 1}, "memory_budget is 4095 bytes, allowed is at least a block: 4096"),
        ({"block_bytes": 5000}, "block_bytes is 5000, allowed are powers of two from 4096"),
        ({"block_bytes": 512}, "block_bytes is 512"),
        ({"block_bytes": 0}, "block_bytes is 0"),
        ({"block_bytes": 0, "memory_budget": -1}, "block_bytes is 0"),
        ({"block_bytes": 2**62}, "block_bytes is 4611686018427387904"),
        ({"threads": 0}, "threads is 0, allowed are 1 to 256"),
        ({"threads": 257}, "threads is 257"),
    ],
)
def test_bad_options_make_no_file(options, message, path):
    with pytest.raises(ValueError, match=message):
        create(path, **options)
    assert not os.listdir(path.parent)


def test_no_addresses_make_no_file(path):
    """Without enough virtual memory, neither the file nor its log is left."""
    run_script(
        """
import resource
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, resource.RLIM_INFINITY))
try:
    RowFile.create(sys.argv[1], 64 << 30, layout=LAYOUT, memory_budget=BLOCK)
except MemoryError as error:
    assert "cannot reserve 68719476736 bytes of virtual memory" in str(error), error
else:
    raise AssertionError("made")
""",
        path,
    )
    assert not os.listdir(path.parent)


def test_files_that_cannot_be_created_or_opened(path, tmp_path):
    with create(path) as file:
        with pytest.raises(FileExistsError) as caught:
            create(path)
        assert caught.value.filename == str(path)
        with pytest.raises(BlockingIOError, match="is open already, in this process or another") as caught:
            reopen(path)
        assert caught.value.filename == str(path)
        file.flush()
    with reopen(path) as file:
        assert file.generation == 1
    with pytest.raises(FileNotFoundError):
        reopen(tmp_path / "none")
    with pytest.raises(FileNotFoundError):
        create(tmp_path / "none" / "file")
    with pytest.raises(IsADirectoryError):
        reopen(tmp_path)
    with pytest.raises(ValueError, match="memory_budget is 4095 bytes"):
        RowFile.open(path, layout=LAYOUT, memory_budget=4095)
    with pytest.raises(ValueError, match="zero byte"):
        create("a\0b")


def test_another_layout_is_refused_with_both(path):
    create(path).close()
    with pytest.raises(ValueError, match=re.escape(f"another layout: '{LAYOUT}', expected 'other'")):
        reopen(path, layout="other")
    long = json.dumps([{"name": f"tablé{i}", "rows": i} for i in range(1000)])
    create(path.with_name("long"), layout=long).close()
    with pytest.raises(ValueError, match=r"\"rows\": 700\}.*\"rows\": 7\}") as caught:
        reopen(path.with_name("long"), layout=long.replace('"rows": 700', '"rows": 7'))
    assert len(str(caught.value)) < 1200


def test_what_a_removed_file_left_is_no_log(path):
    with create(path) as file:
        fill(file, 0, noise(6, BLOCK))
        file.flush(apply=False)
    path.unlink()
    with create(path):
        assert log_of(path).stat().st_size == 0  # also after a crash before the first flush
    with reopen(path) as file:
        assert file.generation == 0
        assert not contents(file).any()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission(path):
    create(path).close()
    path.chmod(0)
    with pytest.raises(PermissionError):
        reopen(path)
