"""`--backends` runs what it names and nothing else; conftest.py prepares torch for deterministic tests on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import backends
import conftest
import pytest
import torch
from backends import CHOSEN, Backend, choose, every_backend, left_out

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = set(CHOSEN)
    yield
    choose(",".join(before))


def test_a_wrong_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No such kind; CUDA's alone without a GPU, where every test would be skipped."""
    with pytest.raises(ValueError, match=r"--backends is 'cpu,gpu': cpu, cuda_emulated, cuda are allowed"):
        choose("cpu,gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="--backends is 'cuda', but "):
        choose("cuda")
    assert CHOSEN


def test_what_is_left_out_is_skipped() -> None:
    """The loops over backends run those that are chosen, and a test that has none left is skipped."""
    choose("cpu")
    assert {backend.kind for backend in every_backend()} == {"cpu"}
    for ask in (backends.device_backends, backends.emulated, lambda: backends.build("rec_kernels_emulated_asan")):
        with pytest.raises(pytest.skip.Exception, match="--backends leaves out cuda_emulated"):
            list(ask())


def test_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies in memory stand for the GPU: both placements of tensors run, and no backend of the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backends.rk, "build_info", lambda: {"cuda_unavailable": None})
    monkeypatch.setattr(torch.Tensor, "cuda", torch.Tensor.clone)
    monkeypatch.setattr(backends, "PASSED", Counter())
    choose("cuda")
    found: list[Backend] = list(every_backend())
    assert [backend.name for backend in found] == ["cuda", "cuda, unaligned"]
    x = torch.randn(3, 5)
    for backend in found:
        assert torch.equal(backend.ops.scale_rows(x, torch.ones(3)), x)
    with pytest.raises(pytest.skip.Exception, match="leaves out cpu"):
        list(backends.cpu_backends())


def test_files_that_ask_for_no_backend_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """They run on the CPU; a file whose cases ask, in a file beside it, stays."""
    names = [f"test_{name}.py" for name in ("house", "dlrm_train", "expand", "row_formats", "cuda_graph", "emulator")]
    choose("cpu,cuda_emulated")
    assert not any(left_out(HERE / name) for name in names)
    CHOSEN.clear()
    CHOSEN.add("cuda")
    assert [left_out(HERE / name) for name in names] == [True, True, False, False, False, True]


@pytest.mark.full
def test_the_option_reaches_the_tests() -> None:
    """Processes of pytest-xdist get the option, too; a wrong one ends pytest with its message."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "1", "-p", "no:cacheprovider", "--backends=cpu"]
    command += [str(HERE / "test_expand.py"), "-k", "no_rows"]
    done = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "comparisons passed by backend: cpu " in done.stdout
    assert "cuda" not in done.stdout
    with pytest.raises(pytest.UsageError, match="--backends is 'gpu'"):
        conftest.pytest_configure(SimpleNamespace(getoption={"--backends": "gpu"}.get))


def test_cublas_has_a_workspace() -> None:
    """torch refuses deterministic matrix products on a GPU without the workspace; conftest.py sets it."""
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] in (":4096:8", ":16:8")
