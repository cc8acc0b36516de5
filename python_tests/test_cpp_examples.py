"""The C++ examples compile with the installed torch, and their results have Python's bits."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rec_kernels as rk
from rec_kernels.testing import same_bits

SOURCES = Path(__file__).parents[1] / "examples" / "cpp"
LIBRARY = rk.build_info()["cpu_library"]
MISSING = [tool for tool in ("cmake", "ninja", os.environ.get("CXX", "c++")) if shutil.which(tool) is None]
pytestmark = [pytest.mark.full, pytest.mark.skipif(bool(MISSING), reason=f"no {', '.join(MISSING)}")]


def run(*command: object) -> subprocess.CompletedProcess:
    """Runs a command; its output includes stderr."""
    return subprocess.run([str(c) for c in command], capture_output=True, text=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs, built without debug information, which halves the time for torch's headers."""
    folder = tmp_path_factory.mktemp("examples")
    options = [f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}", "-DCMAKE_BUILD_TYPE="]
    for command in (["cmake", "-G", "Ninja", "-S", SOURCES, "-B", folder, *options], ["cmake", "--build", folder]):
        done = run(*command)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder


def test_an_op_by_name(built: Path) -> None:
    """call_op.cpp prints three bags, and the error that Python raises."""
    done = run(built / "call_op", LIBRARY)
    assert done.returncode == 0, done.stderr
    weights, offsets = torch.arange(40.0).div(8).view(10, 4), torch.tensor([0, 2, 2, 6])
    values = torch.tensor([3, 1, 4, 1, 5, 9])
    expected = rk.embedding_bag(values, weights, offsets, mode="mean", include_last_offset=True)
    numbers = [float(n) for n in re.findall(r"-?\d+\.\d+", done.stdout.split("[ CPUFloatType{3,4} ]")[0])]
    assert numbers == expected.flatten().tolist()
    with pytest.raises(IndexError) as error:
        rk.embedding_bag(values + 6, weights, offsets, mode="mean", include_last_offset=True)
    assert str(error.value) == "input[2] = 10 (bag 2) is out of range: ids must be in [0, 10)"
    assert "values[2] = 10 (feature 0, bag 2) is out of range" in done.stdout  # the op's own message


def test_a_layout_of_tables(built: Path, tmp_path: Path) -> None:
    """call_op.cpp prints two tables' layout as Python does."""
    tables = tmp_path / "tables.pt"
    expected = run(sys.executable, SOURCES / "save_tables.py", tables)
    done = run(built / "call_op", LIBRARY, tables)
    assert (expected.returncode, done.returncode) == (0, 0), expected.stderr + done.stderr
    printed = done.stdout.split("[ CPUFloatType{3,4} ]")[1].split("[ CPUFloatType{2,6} ]")[0]
    numbers = [float(n) for n in re.findall(r"-?\d+\.\d+", printed)]
    assert numbers == [float(n) for n in re.findall(r"-?\d+\.\d*", expected.stdout)]
    assert len(numbers) == 12


def load_export() -> object:
    spec = importlib.util.spec_from_file_location("export", SOURCES / "export.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_compiled_model(built: Path, tmp_path: Path) -> None:
    """A model compiled by one process runs in a program without Python, with batches of several sizes."""
    export = load_export()
    torch.manual_seed(0)
    model = export.Model().eval()
    export.compile_model(model, str(tmp_path / "model.pt2"))
    for size in (5, 2, 300, 1, 0):
        inputs = export.batch(size, seed=size)
        torch.save(inputs, tmp_path / "inputs.pt")
        done = run(built / "serve", LIBRARY, tmp_path / "model.pt2", tmp_path / "inputs.pt", tmp_path / "outputs.pt")
        assert done.returncode == 0, done.stderr[-3000:]
        with torch.no_grad():
            assert same_bits(torch.load(tmp_path / "outputs.pt"), model(*inputs)), size


def test_what_is_missing_is_said(built: Path, tmp_path: Path) -> None:
    """The program reports missing arguments and a missing library."""
    for program in ("call_op", "serve"):
        done = run(built / program)
        assert done.returncode == 2
        assert done.stderr.startswith(f"usage: {program} path/to/librec_kernels_cpu.so")
    done = run(built / "call_op", tmp_path / "nothing.so")
    assert done.returncode == 1
    assert "nothing.so" in done.stderr
