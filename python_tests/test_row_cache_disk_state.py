"""State of tables on disk: saved, reopened, rejected, killed; and memory use."""

from __future__ import annotations

import copy
import functools
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from row_cache_disk_cases import (
    LFU,
    LRU,
    NONE,
    OPTIMIZERS,
    TABLES,
    assert_equal_state,
    assert_equal_training,
    batch,
    copied,
    make,
    on_disk,
    pair,
    skip_without_host,
    step,
    tables_of,
    train,
    trained_pair,
)
from tiers import cross, fewer, full
from torch import nn

import rec_kernels as rk
from rec_kernels.testing import same_bits

skip_without_host()

HERE = Path(__file__).parent
#: Caches, and budgets with little room beyond their slots.
CACHES = [(LRU, 150_000), (LFU, 170_000)]


def named(value: object) -> str:
    """The policy of a cache, the class of an optimizer."""
    return value[0].policy if isinstance(value, tuple) else type(value).__name__


@pytest.mark.parametrize(("kind", "optimizer"), cross(CACHES, OPTIMIZERS, OPTIMIZERS[1]), ids=named)
def test_opened_again(kind: tuple[rk.RowCache, int], optimizer, tmp_path) -> None:
    """A long training that evicts blocks resumes from the file and a state after every stop."""
    cache, budget = kind
    memory = make(cache, optimizer)
    state: dict[str, torch.Tensor] = {}
    for first in (0, 40, 80):
        disk = make(on_disk(cache, tmp_path / "rows", budget), optimizer)
        if state:
            disk.load_state_dict(state)
        for a, b in zip(train(memory, first, 40), train(disk, first, 40), strict=True):
            assert same_bits(a, b)
        state = copied(disk.state_dict())
        assert not [name for name in state if name.endswith(".weight")]
        disk.close()
    disk = make(on_disk(cache, tmp_path / "rows", budget), optimizer)
    disk.load_state_dict(state)
    memory.row_cache.stats.zero_()  # a restored collection resets it
    assert_equal_state(memory, disk)


def test_states_with_tables_are_refused(tmp_path) -> None:
    """States with tables are rejected: tables are in the file."""
    memory, disk = pair(LRU, tmp_path / "rows")
    with pytest.raises(
        RuntimeError, match=r"embedding_bags\.a\.weight cannot be loaded: the rows of this table are in .*rows"
    ):
        disk.load_state_dict(memory.state_dict())
    assert_equal_state(memory, disk)


def test_a_state_inside_a_model(tmp_path) -> None:
    """Names in a model's state have a prefix, as in messages."""
    model = nn.ModuleDict({"tables": make(on_disk(LRU, tmp_path / "rows")), "top": nn.Linear(2, 2)})
    train(model["tables"])
    state = copied(model.state_dict())
    model["tables"].close()
    other = nn.ModuleDict({"tables": make(on_disk(LRU, tmp_path / "rows")), "top": nn.Linear(2, 2)})
    other.load_state_dict(state)
    assert not [
        n for n, t in other.state_dict().items() if n != "tables.file_generation" and not same_bits(t, state[n])
    ]
    with pytest.raises(RuntimeError, match=r"tables\.file_generation is "):
        other.load_state_dict(state)


@pytest.mark.parametrize("change", ["rows", "format", "name"])
def test_files_of_other_tables_are_refused(change: str, tmp_path) -> None:
    """Files of other tables are rejected with the file's tables."""
    make(on_disk(LRU, tmp_path / "rows")).close()
    name, rows, dim, format, features = TABLES[0]
    other = {
        "rows": (name, rows + 1, dim, format, features),
        "format": (name, rows, dim, "mx9", features),
        "name": ("z", rows, dim, format, features),
    }[change]
    with pytest.raises(ValueError, match="layout"):
        make(on_disk(LRU, tmp_path / "rows"), tables=[other, *TABLES[1:]])
    make(on_disk(LRU, tmp_path / "rows")).close()  # it was closed


def test_a_file_whose_making_was_stopped(tmp_path) -> None:
    """A file whose initialization was interrupted is initialized."""
    memory, disk = pair(LRU, tmp_path / "rows")
    disk.close()
    (tmp_path / "rows").unlink()
    (tmp_path / "rows.log").unlink(missing_ok=True)

    def stop(weight: torch.Tensor) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as kept:
        make(on_disk(LRU, tmp_path / "rows"), init=stop)
    disk = make(on_disk(LRU, tmp_path / "rows"))
    assert_equal_state(memory, disk)
    del kept  # with the failed collection, which has closed its file


def test_one_at_a_time(tmp_path) -> None:
    """An open file is locked."""
    first = make(on_disk(LRU, tmp_path / "rows"))
    with pytest.raises(BlockingIOError):
        make(on_disk(LRU, tmp_path / "rows"))
    first.close()
    make(on_disk(LRU, tmp_path / "rows")).close()


def test_arguments(tmp_path) -> None:
    """Errors name the missing requirement."""
    for options in ({"path": tmp_path / "x"}, {"memory_budget": 1}):
        with pytest.raises(ValueError, match=r"must be given for backing 'disk'"):
            rk.RowCache(backing="disk", **options)
        with pytest.raises(ValueError, match=r"requires backing 'disk'"):
            rk.RowCache(**options)
    with pytest.raises(ValueError, match="generation requires backing 'disk'"):
        rk.RowCache(generation=1)
    with pytest.raises(ValueError, match="backing"):
        rk.RowCache(backing="tape")
    with pytest.raises(ValueError, match=r"memory_budget = 90000 must be at least (\d+)") as caught:
        make(on_disk(LRU, tmp_path / "x", 90_000))
    assert not (tmp_path / "x").exists()
    least = int(re.search(r"must be at least (\d+)", str(caught.value))[1])
    step(make(on_disk(LRU, tmp_path / "x", least)), 0)
    for device in ["cuda", "xpu"]:
        with pytest.raises(ValueError, match=f"backing 'disk' requires a collection on the CPU, got device '{device}'"):
            make(on_disk(LRU, tmp_path / "y"), device=device)


def test_what_is_not_possible(tmp_path) -> None:
    """Moves, copies and serving raise with the reason, and training goes on."""
    memory, disk = trained_pair(LRU, tmp_path / "rows")
    model = nn.ModuleDict({"tables": disk})
    for call in (lambda: disk.to("meta"), lambda: disk.to_empty(device="meta"), lambda: model.to("meta")):
        with pytest.raises(NotImplementedError, match=r"tables on disk .*rows\) cannot be moved"):
            call()
    if torch.cuda.is_available():
        with pytest.raises(NotImplementedError, match="cannot be moved"):
            disk.cuda()
    for call in (copy.deepcopy, copy.copy, pickle.dumps):
        for module in (disk, model) if call is not copy.copy else (disk,):
            with pytest.raises(TypeError, match=r"rows\) cannot be"):
                call(module)
    with pytest.raises((NotImplementedError, ValueError, TypeError), match="cannot be served"):
        disk.for_serving()
    assert_equal_training(memory, disk)


@pytest.mark.parametrize("cast", ["half", "bfloat16", "float", "double", "cpu"])
@pytest.mark.parametrize("tables", [TABLES, TABLES[2:3]], ids=["bytes", "floats"])
def test_casts_change_nothing(tables: list, cast: str, tmp_path) -> None:
    """Casts change nothing, and do not read the whole file."""
    memory, disk = pair(LRU, tmp_path / "rows", tables=tables)
    for c in (memory, disk):
        train(c, steps=3)
        getattr(c, cast)()
        train(c, 3)
    assert_equal_state(memory, disk)


def test_close(tmp_path) -> None:
    """After close(), uses of the tables raise; only unflushed changes are lost."""
    path = tmp_path / "rows"
    memory, disk = trained_pair(LRU, path)
    state = copied(disk.state_dict())
    train(disk, 6)
    disk.close()
    disk.close()
    calls = [
        lambda: disk(batch(disk, 1)),
        lambda: disk.eval()(batch(disk, 1)),
        lambda: disk.prefetch(batch(disk, 1)),
        disk.flush,
        disk.state_dict,
    ]
    for call in calls:
        with pytest.raises(ValueError, match="closed"):
            call()
    again = make(on_disk(LRU, path))
    again.load_state_dict(state)
    memory.row_cache.stats.zero_()
    assert_equal_state(memory, again)


def test_a_state_without_a_cache(tmp_path) -> None:
    """Another cache on the same file starts with empty slots, and the tables are complete."""
    first = make(on_disk(LRU, tmp_path / "rows"))
    train(first)
    state, rows = copied(first.state_dict()), tables_of(first)
    first.close()
    second = make(on_disk(LFU, tmp_path / "rows"))
    second.load_state_dict(state)
    assert (second.row_cache.tags == -1).all()
    assert all(torch.equal(t, tables_of(second)[n]) for n, t in rows.items())
    train(second, 6)


@pytest.mark.parametrize("given", ["its cache", "another cache", "no cache"])
def test_loading_drops_what_came_after(given: str, tmp_path) -> None:
    """Loading drops rows of later updates, in slots and in the file."""
    configs = [rk.EmbeddingBagConfig(n, d, name=t, feature_names=f, format=kind) for t, n, d, kind, f in TABLES]

    def opened(fraction: float = 0.02) -> rk.EmbeddingBagCollection:
        cache = on_disk(replace(LRU, fraction=fraction), tmp_path / "rows", 400_000)
        return rk.EmbeddingBagCollection(configs, optimizer=OPTIMIZERS[1], cache=cache)

    first = opened()
    train(first)
    state, rows = copied(first.state_dict()), tables_of(first)
    first.close()
    if given == "no cache":
        state = {name: t for name, t in state.items() if not name.startswith("row_cache.")}
    other = opened(0.05 if given == "another cache" else 0.02)
    if given == "its cache":
        other.load_state_dict(state)  # the rows below may be in its slots
    for _ in range(2):
        other(batch(other, 7)).values().sum().backward()
        assert not other._store.file.has_changed  # all rows are in slots
        other.load_state_dict(state)
    for name, t in tables_of(other).items():
        assert torch.equal(t, rows[name]), name
    with pytest.raises(RuntimeError, match="file_generation is missing, so the generation"):
        other.load_state_dict(other.row_cache.own_state("row_cache."), strict=False)
    other.close()
    assert all(torch.equal(t, rows[n]) for n, t in tables_of(opened()).items())


def test_evaluations_change_nothing(tmp_path) -> None:
    """Lookups without a backward keep the file's generation; training changes it."""
    memory, disk = trained_pair(NONE, tmp_path / "rows")
    state = copied(disk.state_dict())
    for c in (memory, disk):
        c.eval()
        for i in range(3):
            c(batch(c, i))
        assert c.step == 6
    assert int(disk.state_dict()["file_generation"]) == int(state["file_generation"])
    disk.load_state_dict(state)
    for c in (memory, disk):
        for i in range(6):
            c(batch(c, i)).values().square().sum().backward()
    memory.row_cache.stats.zero_()
    assert_equal_state(memory, disk)
    assert int(disk.state_dict()["file_generation"]) > int(state["file_generation"])


def test_written_weights_are_refused(tmp_path) -> None:
    """Writing to weights raises; the file keeps the last flush."""
    disk = make(on_disk(LRU, tmp_path / "rows"))
    train(disk)
    disk.flush()
    rows = tables_of(disk)
    with torch.no_grad():
        disk.embedding_bags["c"].weight.fill_(7.0)
    calls = disk.flush, disk.state_dict, disk.reset_cache_states, lambda: disk(batch(disk))
    for call in calls:
        with pytest.raises(RuntimeError, match="the weight of table 'c' was written, but the table is in a file"):
            call()
    disk.close()
    again = make(on_disk(LRU, tmp_path / "rows"))
    assert all(torch.equal(t, rows[n]) for n, t in tables_of(again).items())


def test_compiled_and_exported(tmp_path) -> None:
    """Full graphs are rejected with a reason; others break where the file is read."""
    disk = make(on_disk(LRU, tmp_path / "rows")).eval()
    given = batch(disk)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="tables on disk are read in Python"):
        torch.compile(lambda kjt: disk(kjt).values(), fullgraph=True)(given)
    assert torch.equal(torch.compile(lambda kjt: disk(kjt).values())(given), disk(given).values())
    ids = {f: torch.arange(4) for f in disk.feature_names}
    with pytest.raises(NotImplementedError, match="rows cannot be exported"):
        torch.export.export(nn.Sequential(disk), (ids,))


def test_an_init_of_all_rows(tmp_path) -> None:
    """An init of more rows than the budget warns, unless it is elementwise in torch."""
    with pytest.warns(UserWarning, match=r"table '[abdcq]': its init receives all rows at once, \d+ bytes in float32"):
        make(on_disk(LRU, tmp_path / "rows"), init=lambda rows: nn.init.uniform_(rows)).close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(on_disk(LRU, tmp_path / "rows"), init=lambda rows: None).close()  # the file exists
        make(on_disk(LRU, tmp_path / "other"), init=functools.partial(nn.init.uniform_, a=-1.0, b=1.0)).close()


def start(*arguments: object) -> subprocess.Popen:
    """Starts a process that runs this file."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)])}
    command = [sys.executable, str(Path(__file__)), *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def train_with_checkpoints(folder: Path, last: int) -> None:
    """Trains from the last checkpoint on, with a checkpoint after every second step."""
    saved = folder / "state.pt"
    state = torch.load(saved, weights_only=True) if saved.exists() else None
    generation = None if state is None else int(state["tables"]["file_generation"])
    c = make(on_disk(LRU, folder / "rows", 150_000, generation), OPTIMIZERS[2])
    if state is not None:
        c.load_state_dict(state["tables"])
    for i in range(0 if state is None else state["step"], last):
        step(c, i, i + 1)
        if i % 2 or i + 1 == last:
            torch.save({"step": i + 1, "tables": c.state_dict()}, folder / "new.pt")
            (folder / "new.pt").replace(saved)
    c.close()


@pytest.mark.parametrize("times", [fewer(1), *full(3)])
def test_killed(times: int, tmp_path) -> None:
    """A run that is killed resumes from its checkpoint, with the bits of an uninterrupted training."""
    memory, wait, last = make(LRU, OPTIMIZERS[2]), random.Random(1), 4_000
    for _ in range(times):
        before = time_of(tmp_path / "state.pt")
        process = start("train", tmp_path, last)
        while time_of(tmp_path / "state.pt") == before and process.poll() is None:
            time.sleep(0.005)
        time.sleep(wait.uniform(0, 0.25))
        process.send_signal(signal.SIGKILL)
        _, errors = process.communicate()
        assert process.returncode == -signal.SIGKILL, errors
    done = torch.load(tmp_path / "state.pt", weights_only=True)
    assert 0 < done["step"] < last
    train_with_checkpoints(tmp_path, done["step"] + 5)
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    disk = make(on_disk(LRU, tmp_path / "rows"), OPTIMIZERS[2])
    disk.load_state_dict(state["tables"])
    train(memory, 0, done["step"] + 5)
    memory.row_cache.stats.zero_()
    assert_equal_state(memory, disk)


def time_of(path: Path) -> int:
    """Modification time, or 0."""
    return path.stat().st_mtime_ns if path.exists() else 0


def own_memory() -> int:
    """Bytes of resident anonymous memory of this process."""
    lines = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"RssAnon:\s+(\d+) kB", lines)[1])


def train_large(backing: str, folder: Path, rows: int, budget: int) -> None:
    """Prints the maximum growth of the process since before it had tables."""
    small = make(LRU, OPTIMIZERS[0], tables=[("w", 3_000, 64, "int8", ["w"])])
    train(small)  # torch's own
    before = largest = own_memory()
    cache = rk.RowCache(0.01, ways=8)
    cache = cache if backing == "device" else on_disk(cache, folder / "rows", budget)
    c = make(cache, OPTIMIZERS[0], tables=[("t", rows, 64, "int8", ["t"])])
    for i in range(100):
        ids = torch.randint(0, rows, (400,), generator=torch.Generator().manual_seed(i))
        given = rk.KeyedJaggedTensor(["t", "q"], ids, lengths=torch.tensor([400, 0]))
        c(given).values().square().sum().backward()
        largest = max(largest, own_memory())
    c.flush()
    print(max(largest, own_memory()) - before)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("backing", ["disk", *full("device")])
def test_memory_of_the_process(backing: str, tmp_path) -> None:
    """Training all pages of tables four times the budget grows the process by the budget,
    or by the tables if these are in memory.
    """
    rows, mib = 400_000, 2**20
    budget = rows * 72 // 4
    process = start("grow", backing, tmp_path, rows, budget)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    if backing == "device":
        assert int(output) > 0.95 * rows * 72
    else:  # besides rows: bookkeeping of blocks, threads' stacks, and the allocator's batches
        assert int(output) < budget + 12 * mib


if __name__ == "__main__":
    if sys.argv[1] == "train":
        train_with_checkpoints(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        train_large(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
