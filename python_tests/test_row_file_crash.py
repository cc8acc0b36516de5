"""Row files after kill -9, power failures and a full disk have one generation or the next, and lose nothing in memory.

    python python_tests/test_row_file_crash.py --kills 300 --logs 1000 --seed 1

kills a writer and damages logs (``test_row_file_commit.py``) that many times; the seed determines when and where.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest
from row_file_cases import BLOCK, LAYOUT, contents, fill, host_or_skip, log_of, noise, open_file, run_script
from test_row_file_commit import random_damage, two_generations
from tiers import full

RowFile = host_or_skip().RowFile


FULL = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
def put(block, count=1):
    file.load([block * BLOCK], count * BLOCK, write=True)
    window[block * BLOCK : (block + count) * BLOCK] = new[block * BLOCK : (block + count) * BLOCK]
def refused(call, name):
    try:
        call()
    except OSError as error:
        assert error.filename.endswith(name) and "File too large" in str(error), error
        return
    raise AssertionError("not refused")
def check(values):
    for b in range(0, 64, 4):
        file.load([b * BLOCK], 4 * BLOCK)
        assert np.array_equal(window[b * BLOCK : (b + 4) * BLOCK], values[b * BLOCK : (b + 4) * BLOCK]), b
old, new = noise(1, 64 * BLOCK), noise(2, 64 * BLOCK)
file = RowFile.create(sys.argv[1], 64 * BLOCK, layout=LAYOUT, memory_budget=4 * BLOCK)
window = file.window
for b in range(64):
    file.load([b * BLOCK], BLOCK, write=True)
    window[b * BLOCK : (b + 1) * BLOCK] = old[b * BLOCK : (b + 1) * BLOCK]
file.flush()
"""


def test_a_full_disk_when_blocks_must_go(tmp_path):
    """Loads raise while changes that cannot be written fill their budget; nothing is lost."""
    path = tmp_path / "file"
    run_script(
        FULL
        + """
limit(4096 + 10 * BLOCK)  # of the log: 10 blocks
for b in range(14):
    put(b)
before = file.stats()
for _ in range(3):
    refused(lambda: file.load([20 * BLOCK], BLOCK), ".log")
file.prefetch([20 * BLOCK], BLOCK)
file.cancel_prefetch()
refused(lambda: file.load([20 * BLOCK], 4 * BLOCK), ".log")
after = file.stats()
assert after["dirty_bytes"] == before["dirty_bytes"] == 4 * BLOCK, after
assert after["resident_bytes"] == 4 * BLOCK
refused(file.flush, ".log")
assert file.generation == 1
file.load([10 * BLOCK], 4 * BLOCK)
assert np.array_equal(window[10 * BLOCK : 14 * BLOCK], new[10 * BLOCK : 14 * BLOCK])
limit(resource.RLIM_INFINITY)
assert file.flush() == 2
old[: 14 * BLOCK] = new[: 14 * BLOCK]
check(old)
""",
        path,
    )
    with open_file(path) as file:
        assert file.generation == 2
        assert np.array_equal(contents(file)[: 14 * BLOCK], noise(2, 64 * BLOCK)[: 14 * BLOCK])
        assert np.array_equal(contents(file)[14 * BLOCK :], noise(1, 64 * BLOCK)[14 * BLOCK :])


def test_a_write_that_is_cut_short(tmp_path):
    """A flush writes every second block in one call; the disk is full in the middle of the sixth."""
    path = tmp_path / "file"
    run_script(
        FULL.replace("memory_budget=4", "memory_budget=64")
        + """
for b in range(1, 64, 2):
    put(b)
limit(4096 + 5 * BLOCK + 100)
before = file.stats()
for _ in range(2):
    try:
        file.flush()
    except OSError as error:
        place, left = 4096 + 5 * BLOCK + 100, 27 * BLOCK - 100
        assert f"writing {left} bytes at byte {place}: File too large" in str(error), error
        assert error.filename.endswith(".log")
assert os.path.getsize(sys.argv[1] + ".log") == place
assert file.generation == 1 and file.stats()["dirty_bytes"] == before["dirty_bytes"] == 32 * BLOCK
limit(resource.RLIM_INFINITY)
assert file.flush() == 2
""",
        path,
    )
    expected = noise(1, 64 * BLOCK).reshape(64, BLOCK)
    expected[1::2] = noise(2, 64 * BLOCK).reshape(64, BLOCK)[1::2]
    with open_file(path) as file:
        assert file.generation == 2
        assert np.array_equal(contents(file), expected.ravel())


@pytest.mark.parametrize("again", ["apply", "flush", "open", "load"])
def test_a_full_disk_when_the_log_is_copied(again, tmp_path):
    """The flush is complete, the copy into the file is not."""
    path = tmp_path / "file"
    run_script(
        FULL
        + """
put(60, 2)
limit(20 * BLOCK)  # less than where block 60 lies
refused(file.flush, sys.argv[1])
assert file.generation == 2
old[60 * BLOCK : 62 * BLOCK] = new[60 * BLOCK : 62 * BLOCK]
check(old)
refused(file.apply, sys.argv[1])
refused(file.flush, sys.argv[1])
if sys.argv[2] == "load":
    put(0, 4)
    refused(lambda: file.load([8 * BLOCK], BLOCK), sys.argv[1])
    old[: 4 * BLOCK] = new[: 4 * BLOCK]
limit(resource.RLIM_INFINITY)
check(old)
if sys.argv[2] == "apply":
    file.apply()
if sys.argv[2] in ("flush", "load"):
    assert file.flush() == 3
check(old)
""",
        path,
        again,
    )
    with open_file(path) as file:
        assert file.generation == 2 + (again in ("flush", "load"))
        assert np.array_equal(contents(file)[60 * BLOCK : 62 * BLOCK], noise(2, 64 * BLOCK)[60 * BLOCK : 62 * BLOCK])


KILLED = """
import random, signal, struct, time
BLOCKS = 40
def change(generation, values=None):
    rng = np.random.default_rng((seed, generation))
    for start in rng.integers(0, BLOCKS * BLOCK - 100, 25):
        yield int(start), rng.integers(0, 256, 100, dtype=np.uint8)
def work(report):
    file = RowFile.open(sys.argv[1], layout=LAYOUT, memory_budget=6 * BLOCK, threads=2)
    window = file.window
    while True:
        for start, data in change(file.generation + 1):
            file.load([start], 100, write=True)
            window[start : start + 100] = data
        os.write(report, struct.pack("q", file.flush(apply=file.generation % 3 != 0)))
trials, seed = int(sys.argv[2]), int(sys.argv[3])
RowFile.create(sys.argv[1], BLOCKS * BLOCK, layout=LAYOUT, memory_budget=6 * BLOCK).close()
values, generation, clock, flushes, logs = np.zeros(BLOCKS * BLOCK, np.uint8), 0, random.Random(seed), 0, 0
for trial in range(trials):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        work(writer)
    os.close(writer)
    # Every other one after a flush at least, however slow the machine is.
    reported = os.read(reader, 8) if trial % 2 else b""
    time.sleep(clock.uniform(0.001, 0.06))
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL, "the writer ended by itself"
    reported += os.read(reader, 1 << 16)
    os.close(reader)
    last = struct.unpack("q", reported[-8:])[0] if reported else generation
    logs += os.path.getsize(sys.argv[1] + ".log") > 0
    with RowFile.open(sys.argv[1], layout=LAYOUT, memory_budget=6 * BLOCK) as file:
        assert file.generation in (last, last + 1), (file.generation, last)
        while generation < file.generation:
            generation += 1
            for start, data in change(generation):
                values[start : start + 100] = data
        for start in range(0, BLOCKS * BLOCK, 5 * BLOCK):
            file.load([start], 5 * BLOCK)
            assert np.array_equal(file.window[start : start + 5 * BLOCK], values[start : start + 5 * BLOCK]), trial
print(generation, logs)
"""


def killed(path, trials: int, seed: int) -> tuple[int, int]:
    """Kills a writer ``trials`` times and checks the file; returns the numbers of generations and of logs in use."""
    generations, logs = run_script(KILLED, path, trials, seed, timeout=60 + trials).split()
    return int(generations), int(logs)


def test_kill_at_any_time(tmp_path):
    generations, logs = killed(tmp_path / "file", 50, seed=0)
    assert generations >= 25
    assert logs > 5  # otherwise nothing was in progress at the kills


TRACED = """
file = RowFile.open(sys.argv[1], layout=LAYOUT, memory_budget=4 * BLOCK, threads=2)
for generation in (2, 3):
    values = noise(generation, 6 * BLOCK)
    for block in range(6):
        place = (block * 2 + generation) % 8 * BLOCK
        file.load([place], BLOCK, write=True)
        file.window[place : place + BLOCK] = values[block * BLOCK : (block + 1) * BLOCK]
    file.flush(apply=generation == 2)
file.apply()
"""


def traced_calls(path, trace):
    """Traced calls on the two files, in order: (whether the log, name, offset or size, data)."""
    calls, unfinished = [], {}
    for line in trace.read_text().splitlines():
        pid, text = line.split(maxsplit=1)
        if text.endswith("<unfinished ...>"):
            unfinished[pid] = text.removesuffix("<unfinished ...>")
            continue
        if text.startswith("<..."):
            text = unfinished.pop(pid) + text.split("resumed>", 1)[1]
        found = re.match(r"(\w+)\(\d+<((?:\\x..)+)>(?:, (.*))?\) += \d+", text)
        name, file, arguments = found.groups() if found else ("", "", "")
        log = bytes.fromhex(file.replace("\\x", "")) == bytes(log_of(path))
        if not log and bytes.fromhex(file.replace("\\x", "")) != bytes(path):
            continue
        if name == "pwritev":
            ranges, offset = re.findall('iov_base="([^"]*)"', arguments), arguments.rsplit(", ", 1)[1]
            calls.append((log, name, int(offset), bytes.fromhex("".join(ranges).replace("\\x", ""))))
        else:
            calls.append((log, name, int(arguments) if arguments else 0, b""))
    return calls


def apply_calls(files, calls):
    for log, name, place, data in calls:
        file = files[log]
        if name == "ftruncate":
            del file[place:]
            file.extend(bytes(place - len(file)))
        elif name == "pwritev":
            file.extend(bytes(max(0, place + len(data) - len(file))))
            file[place : place + len(data)] = data


def after_a_power_failure(calls, rng):
    """Contents that a power failure may leave: all before a file's last fsync and any part of the rest."""
    last_sync = {log: max((i for i, c in enumerate(calls) if c[:2] == (log, "fsync")), default=-1) for log in (0, 1)}
    for i, call in enumerate(calls):
        log, name, place, data = call
        if i < last_sync[log]:
            yield call
        elif name == "pwritev" and rng.random() < 0.3:  # torn: some of its sectors
            for sector in range(0, len(data), 512):
                if rng.random() < 0.5:
                    yield log, name, place + sector, data[sector : sector + 512]
        elif rng.random() < 0.5:
            yield call


def strace_or_skip(*options):
    """A strace command as a prefix of another command."""
    launcher = ("strace", "-f", *options)
    if shutil.which("strace") is None or subprocess.run([*launcher, "true"], capture_output=True).returncode != 0:
        pytest.skip("strace is not installed or may not trace")
    return launcher


REFUSED = """
def insist(call, *arguments, **options):
    for _ in range(10):
        try:
            return call(*arguments, **options)
        except OSError as error:
            assert error.errno == 5 and "Input/output error" in str(error), error
            errors.append(error)
errors, values = [], noise(2, 8 * BLOCK)
file = RowFile.open(sys.argv[1], layout=LAYOUT, memory_budget=4 * BLOCK, threads=1)
for step in range(3):
    for block in range(8):
        insist(file.load, [block * BLOCK], BLOCK, write=True)
        file.window[block * BLOCK : (block + 1) * BLOCK] = values[block * BLOCK : (block + 1) * BLOCK] + step
    before = file.generation
    insist(file.flush, apply=step == 1)
    assert file.generation > before
insist(file.apply)
file.close()
print(len(errors))
"""


@pytest.mark.parametrize("call", ["pwritev", *full("fsync")])
def test_every_refused_call_can_be_repeated(call, tmp_path):
    """If the n-th write or fsync fails once, an error is raised, nothing is lost, and the next call succeeds."""
    path = tmp_path / "file"
    refused = 0
    for n in range(2, 14):
        trace = ("-o", str(tmp_path / "trace"), "-e", f"trace={call}")
        launcher = strace_or_skip(*trace, "-e", f"inject={call}:error=EIO:when={n}")
        for old in (path, log_of(path)):
            old.unlink(missing_ok=True)
        RowFile.create(path, 8 * BLOCK, layout=LAYOUT, memory_budget=BLOCK).close()
        refused += int(run_script(REFUSED, path, launcher=launcher))
        with open_file(path) as file:
            assert np.array_equal(contents(file), noise(2, 8 * BLOCK) + 2), n
    assert refused >= 12


def test_a_flush_takes_few_calls(tmp_path):
    """Consecutive slots are written and read with one call per chunk of 64 blocks."""
    path, trace = tmp_path / "file", tmp_path / "trace"
    launcher = strace_or_skip("-y", "-e", "trace=pwritev,pread64", "-o", str(trace))
    run_script(
        """
file = RowFile.create(sys.argv[1], 256 * BLOCK, layout=LAYOUT, memory_budget=256 * BLOCK)
file.load(np.arange(0, 256, 2) * BLOCK, BLOCK, write=True)
file.window.reshape(256, BLOCK)[::2] = noise(3, 128 * BLOCK).reshape(128, BLOCK)
file.flush()
""",
        path,
        launcher=launcher,
    )
    calls = re.findall(rf"(pwritev|pread64)\b.*= {64 * BLOCK}$", trace.read_text(), re.MULTILINE)
    assert sorted(calls) == ["pread64"] * 2 + ["pwritev"] * 2


def test_a_flush_goes_by_slots(tmp_path):
    """Blocks evicted in any order are written with one call once they are loaded again."""
    path, trace = tmp_path / "file", tmp_path / "trace"
    launcher = strace_or_skip("-e", "trace=pwritev", "-o", str(trace))
    run_script(
        """
file = RowFile.create(sys.argv[1], 128 * BLOCK, layout=LAYOUT, memory_budget=64 * BLOCK)
first = np.random.default_rng(0).permutation(64)
for block in [*first, *range(64, 128), *first]:
    file.load([block * BLOCK], BLOCK, write=True)
    file.window[block * BLOCK : (block + 1) * BLOCK] += np.uint8(1 + block)
file.flush(apply=False)
""",
        path,
        launcher=launcher,
    )
    assert len(re.findall(rf"pwritev\b.*= {64 * BLOCK}$", trace.read_text(), re.MULTILINE)) == 1
    with open_file(path) as file:
        expected = (1 + np.arange(128, dtype=np.uint8)) * np.repeat(np.array([2, 1], np.uint8), 64)
        assert np.array_equal(contents(file), np.repeat(expected, BLOCK))


def test_kernels_that_drop_one_range_at_a_time(tmp_path):
    launcher = strace_or_skip("-o", str(tmp_path / "trace"), "-e", "inject=process_madvise:error=EINVAL")
    out = run_script(
        """
import ctypes
file = RowFile.create(sys.argv[1], 256 * BLOCK, layout=LAYOUT, memory_budget=64 * BLOCK)
order = np.random.default_rng(0).permutation(256).reshape(8, 32) * BLOCK
for starts in order:
    file.load(starts, BLOCK, write=True)
    file.window.reshape(256, BLOCK)[starts // BLOCK] = 1
found = (ctypes.c_ubyte * 256)()
ctypes.CDLL(None).mincore(ctypes.c_void_p(file.window.ctypes.data), ctypes.c_size_t(256 * BLOCK), found)
print(sum(b & 1 for b in found))
""",
        tmp_path / "file",
        launcher=launcher,
    )
    assert "process_madvise" in (tmp_path / "trace").read_text()
    assert int(out) == 64


def test_power_failures(tmp_path):
    """Every prefix of the writes of two flushes, with any part lost that no fsync covered."""
    trace, path = tmp_path / "trace", tmp_path / "file"
    calls = "trace=pwritev,fsync,ftruncate"
    launcher = strace_or_skip("-y", "-xx", "-s", "1000000", "-e", calls, "-o", str(trace))
    states = {1: noise(1, 8 * BLOCK)}
    with RowFile.create(path, 8 * BLOCK, layout=LAYOUT, memory_budget=4 * BLOCK) as file:
        fill(file, 0, states[1])
        file.flush()
    before = (path.read_bytes(), b"")
    run_script(TRACED, path, launcher=launcher)
    for generation in (2, 3):
        states[generation] = states[generation - 1].copy()
        values = noise(generation, 6 * BLOCK)
        for block in range(6):
            place = (block * 2 + generation) % 8 * BLOCK
            states[generation][place : place + BLOCK] = values[block * BLOCK : (block + 1) * BLOCK]
    calls = traced_calls(path, trace)
    commits = [i for i, c in enumerate(calls) if c[3].startswith(b"RKROWLOG") and c[2] == 0]  # the later of two copies
    done = [next(j for j in range(i, len(calls)) if calls[j][:2] == (True, "fsync")) for i in commits]
    assert len(done) == 2
    assert len(calls) > 30
    rng, seen = random.Random(0), set()
    copy = tmp_path / "copy"
    for cut in range(len(calls) + 1):
        for trial in range(8):
            kept = list(after_a_power_failure(calls[:cut], rng)) if trial else calls[:cut]
            files = (bytearray(before[0]), bytearray(before[1]))
            apply_calls(files, kept)
            copy.write_bytes(files[0])
            log_of(copy).write_bytes(files[1])
            with open_file(copy) as file:
                least = 1 + sum(cut > end for end in done)
                assert least <= file.generation <= least + 1, (cut, trial)
                assert np.array_equal(contents(file), states[file.generation]), (cut, trial)
                seen.add(file.generation)
    assert seen == {1, 2, 3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--logs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        generations, logs = killed(Path(folder) / "file", options.kills, options.seed)
        print(f"{options.kills} kills, {logs} with a log in use: none of {generations} generations lost", flush=True)
        seen = random_damage(Path(folder), two_generations(Path(folder) / "two"), options.logs, options.seed)
    found = seen.count("found")
    print(
        f"{len(seen)} damaged logs: {found} have the last generation, {len(seen) - found} are refused, none is ignored"
    )


if __name__ == "__main__":
    main()
