"""`--backends` selects backends and tests; conftest.py prepares torch for deterministic tests on a GPU."""

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
from backend_use import uses_backend
from backends import SELECTED, Backend, every_backend, is_deselected, select

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = set(SELECTED)
    yield
    select(",".join(before))


def test_a_wrong_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown kind is refused, as is CUDA alone without a GPU, where every test would be skipped."""
    with pytest.raises(ValueError, match=r"--backends is 'cpu,gpu': cpu, cuda_emulated, cuda are allowed"):
        select("cpu,gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="--backends is 'cuda', but "):
        select("cuda")
    assert SELECTED


def test_what_is_left_out_is_skipped() -> None:
    """Loops over backends run the selected ones; a test without a selected backend is skipped."""
    select("cpu")
    assert {backend.kind for backend in every_backend()} == {"cpu"}
    for ask in (backends.device_backends, backends.emulated, lambda: backends.build("rec_kernels_emulated_asan")):
        with pytest.raises(pytest.skip.Exception, match="--backends leaves out cuda_emulated"):
            list(ask())


def test_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a copy in memory as the GPU, both placements of tensors run, and no CPU backend."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backends.rk, "build_info", lambda: {"cuda_unavailable": None})
    monkeypatch.setattr(torch.Tensor, "cuda", torch.Tensor.clone)
    monkeypatch.setattr(backends, "PASSED", Counter())
    select("cuda")
    found: list[Backend] = list(every_backend())
    assert [backend.name for backend in found] == ["cuda", "cuda, unaligned"]
    x = torch.randn(3, 5)
    for backend in found:
        assert torch.equal(backend.ops.scale_rows(x, torch.ones(3)), x)
    with pytest.raises(pytest.skip.Exception, match="leaves out cpu"):
        list(backends.cpu_backends())


def test_strides_stay_on_another_device() -> None:
    """Copies, aligned or not, keep the strides of columns, strided and expanded tensors."""
    x = torch.arange(24.0).view(4, 6)
    for each in (x[:, 1], x.flatten()[::2], x[1].expand(3, 6), x.t(), x[1:1], x[:, 2:4].byte(), torch.tensor(3.0)):
        for place in (torch.Tensor.clone, backends.unaligned):
            found = backends.moved(each, place)
            assert torch.equal(found, each)
            assert found.stride() == each.stride()
            assert found.data_ptr() != each.data_ptr() or each.numel() == 0


def test_the_trainer_needs_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one of the trainer's packages exactly its files are skipped, and the report header names the package."""
    monkeypatch.setattr(conftest, "_missing", lambda: ["pandas"])
    assert conftest.pytest_report_header().endswith("skipped: pandas not installed")
    names = ("test_dlrm_data.py", "test_studies_compare.py", "test_scale_rows.py")
    assert [conftest.pytest_ignore_collect(HERE / name) for name in names] == [True, True, None]


def test_tests_that_ask_for_no_backend_are_left_out() -> None:
    """Imported names, nested helpers, fixtures and arguments select a test; without any it is deselected."""
    SELECTED.clear()
    SELECTED.add("cuda")
    using = {
        "learning_rates": "test_wrong_rates",
        "every_id": "test_row_is_the_remainder",
        "row_formats": "test_matches_reference",
        "cuda_graph": "test_torch_sees_no_wait",
    }
    for name, test in using.items():
        assert not is_deselected(HERE / f"test_{name}.py", test), test
    for name, test in {"row_cache_disk_state": "test_killed", "grad_scaler_state": "test_compiled"}.items():
        assert is_deselected(HERE / f"test_{name}.py", test), test

    def item(name: str) -> SimpleNamespace:
        return SimpleNamespace(path=HERE / "test_learning_rates.py", cls=None, originalname=name, name=f"{name}[0]")

    names, removed = ["test_groups", "test_wrong_rates"], []
    hook = SimpleNamespace(pytest_deselected=lambda items: removed.extend(items))
    for argument, left in ((HERE, names[1:]), (HERE / "test_learning_rates.py::test_groups", names)):
        items = [item(name) for name in names]
        conftest.pytest_collection_modifyitems(SimpleNamespace(args=[str(argument)], hook=hook), items)
        assert [each.originalname for each in items] == left
    assert [each.originalname for each in removed] == names[:1]


def test_what_asks_is_found_in_its_source(tmp_path: Path) -> None:
    """Arguments, fixtures, imported names and modules, and code in strings are found; docstrings are not."""
    (tmp_path / "beside.py").write_text("def deep():\n    return device_backends()\ndef check(): return deep()\n")
    tests = {
        "test_plain": 'def test_plain():\n    "every_backend is not called."\n',
        "test_own": "def test_own():\n    for b in every_backend(): pass\n",
        "test_argument": "def test_argument():\n    run(every_backend)\n",
        "test_fixture": "@pytest.fixture\ndef gpu():\n    return OnCuda()\ndef test_fixture(gpu): pass\n",
        "test_helper": "from beside import check\ndef test_helper():\n    check()\n",
        "test_module": "import beside as b\ndef test_module():\n    b.check()\n",
        "test_star": "from beside import *\ndef test_star():\n    check()\n",
        "test_string": "def test_string():\n    run('-c', 'every_backend()')\n",
        "test_mark": "GPU = torch.cuda.is_available()\n@skip(not GPU)\ndef test_mark(): pass\n",
    }
    for name, text in tests.items():
        file = tmp_path / f"{name}.py"
        file.write_text(text)
        assert uses_backend(file, name, frozenset({"cuda"})) == (name != "test_plain"), name
    everywhere = tmp_path / "test_all.py"
    everywhere.write_text("pytestmark = skip(not is_available())\ndef test_one(): pass\n")
    assert uses_backend(everywhere, "test_one", frozenset({"cuda"}))
    assert not uses_backend(everywhere, "test_one", frozenset({"cuda_emulated"}))


def test_files_that_ask_for_no_backend_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU-only files are deselected; a file stays if its imported cases use a selected backend."""
    names = [f"test_{name}.py" for name in ("house", "dlrm_train", "expand", "row_formats", "cuda_graph", "emulator")]
    names += ["test_row_formats_compile.py", "test_fake_quantize.py"]
    select("cpu,cuda_emulated")
    assert not any(is_deselected(HERE / name) for name in names)
    SELECTED.clear()
    SELECTED.add("cuda")
    assert [is_deselected(HERE / name) for name in names] == [True, True, False, False, False, True, True, False]
    # Within a file, only the tests that use the backend stay.
    assert not is_deselected(HERE / names[-1], "test_traced_ops_compile_for_a_gpu")
    assert is_deselected(HERE / names[-1], "test_traced_ops_compile")


@pytest.mark.full
def test_the_option_reaches_the_tests() -> None:
    """Processes of pytest-xdist receive the option; an invalid value ends pytest with its message."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "1", "-p", "no:cacheprovider", "--backends=cpu"]
    command += [str(HERE / "test_expand.py"), "-k", "no_rows"]
    done = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "comparisons passed by backend: cpu " in done.stdout
    assert "cuda" not in done.stdout
    with pytest.raises(pytest.UsageError, match="--backends is 'gpu'"):
        conftest.pytest_configure(SimpleNamespace(getoption={"--backends": "gpu"}.get))


def test_cublas_has_a_workspace() -> None:
    """conftest.py sets the workspace without which torch rejects deterministic matrix products on a GPU."""
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] in (":4096:8", ":16:8")
