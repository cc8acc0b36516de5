"""The package in processes that fork, import in threads, see no GPU, or exit: no output, no hang, equal bits."""

from __future__ import annotations

import os
import sys

import pytest
import row_file_cases
import torch
from process_cases import ROWS, batch, collection, run_script, trained
from tiers import full
from torch.utils.data import DataLoader, Dataset

import rec_kernels as rk
from rec_kernels.testing import same_bits, use_threads

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


def output_of(code: str, *arguments: object, **environment: str) -> str:
    """Output of a script that must succeed and write nothing to stderr."""
    done = run_script(code, *arguments, **environment)
    assert (done.returncode, done.stderr) == (0, ""), (done.returncode, done.stdout, done.stderr[-3000:])
    return done.stdout


FORK = """
import os, sys, torch, warnings
warnings.simplefilter("error")
from process_cases import trained
torch.set_num_threads(2)
for threads in (2, 1):
    child = os.fork()
    if child == 0:
        torch.set_num_threads(threads)
        print(trained(), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    print(trained(), flush=True)  # between the forks, in threads
"""


def test_fork() -> None:
    """A child has its parent's results, with threads if the parent ran none, and otherwise with one.

    OpenMP's threads do not exist in a child: a parallel region would wait for them forever, also in torch's own ops.
    (docs/robustness.md)
    """
    assert output_of(FORK).split() == [trained()] * 4


class Bags(Dataset):
    """Batches that the loading process deduplicates and looks up."""

    def __init__(self) -> None:
        self.tables = collection(rk.SGD(lr=0.1)).for_serving()

    def __len__(self) -> int:
        return 6

    def __getitem__(self, place: int) -> tuple[torch.Tensor, ...]:
        given = batch(300, seed=place)
        rows, inverse, counts = rk.jagged_dedup(given.values(), given.offsets(), [0, 0, 0])
        with torch.no_grad():
            return rows, inverse, counts, self.tables(given).values()


def test_data_loader_workers() -> None:
    """Two forked workers work in a process that has run its threads."""
    bags = Bags()
    with use_threads(2):
        expected = [bags[place] for place in range(len(bags))]
        loader = DataLoader(bags, batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=120)
        found = list(loader)
    assert len(found) == len(expected)
    for here, there in zip(expected, found, strict=True):
        assert all(map(same_bits, here, there))


IMPORT_IN_THREADS = """
import threading
start, turn, errors, found = threading.Barrier(4), threading.Lock(), [], []
def work():
    try:
        start.wait()
        import rec_kernels as rk
        from process_cases import trained
        with turn:  # they share torch's random numbers
            found.append(trained())
    except BaseException as error:
        errors.append(error)
threads = [threading.Thread(target=work) for _ in range(4)]
[t.start() for t in threads]
[t.join() for t in threads]
assert not errors, errors
import rec_kernels as rk
print(*set(found), rk.build_info()["triton_in_use"])
"""


@pytest.mark.parametrize("environment", [{"CUDA_VISIBLE_DEVICES": "-1"}, *full({})], ids=str)
def test_import_in_threads(environment: dict[str, str]) -> None:
    """Four threads import and use the package at once; without a visible GPU, the CPU's kernels have equal bits."""
    bits, in_use = output_of(IMPORT_IN_THREADS, **environment).split()
    assert bits == trained()
    if environment:
        assert in_use == "False"


LIVE_OBJECTS = """
import sys, threading, torch
import rec_kernels as rk
from process_cases import batch, collection, step
torch.set_num_threads(2)
cache = rk.RowCache(0.1)
if "disk" in sys.argv[1]:
    cache = rk.RowCache(0.1, backing="disk", path=sys.argv[2], memory_budget=600_000)
tables = collection(rk.Adam(lr=0.01), cache)
tables.itself = [tables]  # a cycle: the collector finds it at the end, or never
out = tables(batch(300)).values()
pending = out.square().sum()  # a graph whose backward never comes
if "disk" in sys.argv[1]:
    tables.prefetch(batch(300, 1))  # and rows that are on their way
if "thread" in sys.argv[1]:
    other = threading.Thread(target=lambda: [step(collection(rk.SGD(lr=0.1)), batch(300, s)) for s in range(20)])
    other.start()  # which goes on while the main thread is done
if sys.argv[1] == "exit":
    sys.exit(0)
if sys.argv[1] == "atexit":
    import atexit
    atexit.register(lambda: step(collection(rk.SGD(lr=0.1)), batch(300)))
"""


@pytest.mark.parametrize("how", ["disk and thread", *full("disk", "thread", "memory", "exit", "atexit")])
def test_the_end_of_a_process(how: str, tmp_path) -> None:
    """A process with live collections, caches, graphs and threads exits silently with status 0."""
    if "disk" in how and rk.build_info()["host_library"] is None:
        pytest.skip("row files were not built")
    assert output_of(LIVE_OBJECTS, how, tmp_path / "tables") == ""


#: Three daemon threads that are almost always inside of ``call``, also while the interpreter exits.
DAEMONS = """
import threading
started = [threading.Event() for _ in range(3)]
def work(i):
    while True:
        call(i)
        started[i].set()
for i in range(3):
    threading.Thread(target=work, args=(i,), daemon=True).start()
for event in started:
    event.wait()
"""


def test_the_end_with_daemons_in_a_row_file(tmp_path) -> None:
    """Daemon threads in a row file wait for the end of the process: status 0."""
    row_file_cases.host_or_skip()
    size = 8 << 20
    code = f"""
file = RowFile.create(sys.argv[1], 8 * {size}, layout=LAYOUT, memory_budget=6 * {size})
def call(i):
    file.load([i * {size}], {size}, write=True)
    file.unpin()
"""
    assert row_file_cases.run_script(code + DAEMONS, tmp_path / "tables") == ""


def test_the_end_with_daemons_in_ops() -> None:
    """Daemon threads in our ops abort as in torch's, before Python 3.14 (docs/robustness.md)."""
    code = "import torch, rec_kernels as rk\ntorch.set_num_threads(1)\nx = torch.ones(500, 500)\n"
    of_ours = run_script(code + "call = lambda i: torch.ops.rec_kernels.scale_rows(x, x[0])\n" + DAEMONS)
    if of_ours.returncode:
        of_torch = run_script(code + "call = lambda i: torch.mm(x, x)\n" + DAEMONS)
        assert of_ours.returncode == of_torch.returncode, of_ours.stderr
        assert sys.version_info < (3, 14), of_ours.stderr


def test_a_child_that_ends_with_the_parents_objects() -> None:
    """sys.exit in a forked process frees inherited objects."""
    code = LIVE_OBJECTS + "\nimport os\nchild = os.fork()\nassert child == 0 or os.waitpid(child, 0)[1] == 0\n"
    assert output_of(code, "memory") == ""


def test_ids_are_in_the_tables() -> None:
    """The ids above are in their tables, so that no test passes without work."""
    given = batch(300)
    assert 0 < int(given.values().max()) < ROWS
    assert len(given.values()) > 1000
