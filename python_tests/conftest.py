"""Settings of all tests: poisoned uninitialized memory, reproducible hypothesis examples, and deselected files."""

from __future__ import annotations

import functools
import gc
import hashlib
import importlib.util
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from rec_kernels.dlrm import Batch
    from rec_kernels.dlrm.synthetic import Synthetic

# Set before torch loads OpenMP: waiting threads sleep. Otherwise several test processes would compete by spinning.
os.environ["OMP_WAIT_POLICY"] = "passive"
# Set before CUDA makes a handle: in deterministic mode torch rejects cuBLAS without a fixed workspace.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import backends
import torch
from backends import PASSED
from hypothesis import settings

# Graphs in torch's on-disk cache refer to op arguments by position, so each version of the schemas has its own cache.
_HERE = Path(__file__).resolve().parent
_SCHEMAS = hashlib.sha256((_HERE / "schemas.json").read_bytes()).hexdigest()[:16]
os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(_HERE.parent / "build" / f"inductor-{_SCHEMAS}")
# Plain `pytest` then finds bench and wheels like `python -m pytest`. An installed rec_kernels takes precedence.
sys.path.append(str(_HERE.parent))

# Every run has the same examples and no time limit per example: a test fails because of the code or not at all.
settings.register_profile("rec_kernels", derandomize=True, deadline=None, database=None, print_blob=True)
settings.load_profile("rec_kernels")


#: Files that take more than half a minute, longest first, so that none starts last and delays the end.
#: (xdist keeps this order with --no-loadscope-reorder; otherwise files with the most tests start first.)
SLOWEST_FILES = (
    *("test_emulator.py", "test_triton.py", "test_sanitized_cpu.py", "test_cpp_examples.py"),
    *("test_embedding_bag_triton.py", "test_row_formats.py", "test_types.py", "test_aarch64.py"),
    *("test_cuda_code.py", "test_dlrm_sharded.py", "test_sanitize_cuda.py", "test_bench_workloads.py"),
)
#: Prefixes of test files that import the trainer, and packages that only these files need.
TRAINER_FILES = (
    *("test_dlrm_", "test_studies_", "test_recorded_programs."),
    *("test_bench_tools.", "test_cost_model.", "test_tuning."),  # bench.run reads the processor's name with the trainer
)
TRAINER_PACKAGES = ("matplotlib", "pandas", "pyarrow", "scipy", "sklearn", "tqdm")


@functools.cache
def _missing() -> list[str]:
    """Packages of the trainer that are not installed."""
    return [name for name in TRAINER_PACKAGES if importlib.util.find_spec(name) is None]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--backends``: on a GPU, ``--backends=cuda`` skips the CPU's and the emulated kernels."""
    parser.addoption(
        "--backends",
        metavar="KINDS",
        help=f"only these backends, of {', '.join(backends.KINDS)}, and only the tests that use one of them, "
        "except in files named by the command",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Configures every process of pytest."""
    if kinds := config.getoption("--backends"):
        try:
            backends.select(kinds)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None


def pytest_report_header() -> str | None:
    """Report files that are skipped because packages are missing."""
    return f"the trainer's tests are skipped: {', '.join(_missing())} not installed" if _missing() else None


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Skip files without tests for ``--backends``, and files of the trainer if its packages are missing.

    A file that the command names is collected.
    """
    if not (collection_path.name.startswith("test_") and collection_path.suffix == ".py"):
        return None
    of_trainer = collection_path.name.startswith(TRAINER_FILES)
    return True if (of_trainer and _missing()) or backends.is_deselected(collection_path) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests by ``--backends``, and move the slowest files to the front; the others keep their order."""
    named = {Path(arg.partition("::")[0]).name for arg in config.args}
    selected = [item.path.name in named or not _is_deselected(item) for item in items]
    if not all(selected):
        config.hook.pytest_deselected(
            items=[item for item, is_selected in zip(items, selected, strict=True) if not is_selected]
        )
        items[:] = itertools.compress(items, selected)
    places = {name: place for place, name in enumerate(SLOWEST_FILES)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


def _is_deselected(item: pytest.Item) -> bool:
    """True if a test function or its class uses no selected backend."""
    test = item.cls.__name__ if getattr(item, "cls", None) else getattr(item, "originalname", None)
    return backends.is_deselected(item.path, test or item.name.partition("[")[0])


def pytest_collection_finish() -> None:
    """Freeze existing objects: a full garbage collection, which took 0.5 s, then skips them."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _poison_uninitialised_memory() -> Iterator[None]:
    """Fill uninitialized tensors with NaN (integers: the largest value).

    In deterministic mode ``aten::empty`` and everything built on it fill their memory. The compiled ops allocate
    outputs with ``aten::new_empty``, so an element that a kernel does not write is NaN. test_embedding_bag.py checks
    that this covers the ops' buffers. The kernels' scratch memory does not come from torch; the sanitizer build
    covers it.
    """
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
    # Code compiled by torch.compile may have enabled flush-to-zero in this thread.
    torch.set_flush_denormal(False)


@pytest.fixture(scope="module")
def data() -> Synthetic:
    """Synthetic rows for the trainer."""
    from rec_kernels.dlrm.synthetic import Synthetic

    return Synthetic(3000, 300)


@pytest.fixture(scope="module")
def batch(data: Synthetic) -> Batch:
    """The first batch of ``data``, of 500 rows."""
    return next(data.batches("train", 500))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a stopped training run; copy it, do not change it."""
    from dlrm_stops import stopped_run

    return stopped_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not draw a run's curves, which takes longer than its training; test_dlrm_report.py tests them."""
    from rec_kernels.dlrm import report

    monkeypatch.setattr(report, "draw", lambda records: None)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the counts of a pytest-xdist worker to the controller."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["passed"] = dict(PASSED)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """Collect the counts of a pytest-xdist worker; a crashed worker has none."""
    PASSED.update(getattr(node, "workeroutput", {}).get("passed", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the passed comparisons per backend, to reveal a backend that silently ran none."""
    if PASSED:
        counts = ", ".join(f"{kind} {count:,}" for kind, count in PASSED.items())
        terminalreporter.write_line(f"comparisons passed by backend: {counts}")
