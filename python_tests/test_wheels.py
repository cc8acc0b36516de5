"""Contents of distributions: files, names and required symbols. wheels/check.py applies the rules to a built wheel."""

from __future__ import annotations

import importlib
import runpy
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest
import setuptools
import torch
from process_cases import run_script

import rec_kernels as rk

ROOT = Path(__file__).resolve().parent.parent
WHEEL = "rec_kernels-1.0{}-cp311-cp311-manylinux_2_28_x86_64.whl"
HOST = "rec_kernels/_host.cpython-311-x86_64-linux-gnu.so"

pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="these are tests of the checkout")


@pytest.fixture(scope="module")
def check() -> ModuleType:
    return importlib.import_module("wheels.check")


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """wheels/build.py with fake Pythons 3.11 and 3.13, and without builds."""
    module = importlib.import_module("wheels.build")
    monkeypatch.setattr(module, "find_python", {"3.11": "/bin/python3.11", "3.13": "/bin/python3.13"}.get)
    monkeypatch.setattr(module, "make", lambda python, options, folder: f"{python} {options.cuda} {folder.exists()}")
    monkeypatch.setattr(module.platform, "python_version_tuple", lambda: ("3", "13", "0"))
    return module


@pytest.fixture
def names(check: ModuleType) -> set[str]:
    """File names in a valid CPU wheel."""
    return check.python_files() | {
        check.CPU,
        HOST,
        "rec_kernels/cuda_architectures.txt",
        "rec_kernels/",
        "rec_kernels-1.0.dist-info/WHEEL",
    }


def test_every_package_is_installed() -> None:
    """pyproject.toml lists each folder of modules: a missing one would be absent from wheels only."""
    text = (ROOT / "pyproject.toml").read_text()
    for package in setuptools.find_packages(str(ROOT), include=["rec_kernels*"]):
        assert f'"{package}"' in text, package


def test_files_of_a_wheel(check: ModuleType, names: set[str]) -> None:
    """A wheel has all modules, the CPU library, one _host, a CUDA library according to its version, nothing else."""
    assert "rec_kernels/py.typed" in names
    assert check.wrong_names(WHEEL.format(""), names) == []
    assert check.wrong_names(WHEEL.format("+cu13"), names | check.CUDA) == []
    cuda = sorted(check.CUDA)
    assert check.wrong_names(WHEEL.format("+cu13"), names) == [f"{name} is missing" for name in cuda]
    assert check.wrong_names(WHEEL.format(""), names | check.CUDA) == [f"{name} does not belong there" for name in cuda]
    other = "rec_kernels/_host.cpython-312-x86_64-linux-gnu.so"
    assert check.wrong_names(WHEEL.format(""), names | {other}) == [f"{other} does not belong there"]
    assert "_host for cp311 is expected" in check.wrong_names(WHEEL.format(""), names - {HOST})[0]


@pytest.mark.parametrize(("label", "limit"), [("", 3), ("+cu12", 45), ("+cu13", 20), ("+cu14", 20)])
def test_sizes(label: str, limit: int, check: ModuleType) -> None:
    """Kernels for CUDA 12 drivers are uncompressed and may be larger."""
    assert check.limit_of(WHEEL.format(label)) == limit


def test_needs_of_a_library(check: ModuleType) -> None:
    """Symbol versions are compared as numbers, not as text."""
    good = "NEEDED libtorch_cpu.so\nNEEDED libstdc++.so.6\nGLIBC_2.3.4\nGLIBC_2.28\nGLIBCXX_3.4.9\nCXXABI_1.3.11\n"
    assert check.wrong_needs(good) == []
    assert check.newest_versions(good) == {"GLIBC": "2.28", "GLIBCXX": "3.4.9", "CXXABI": "1.3.11"}
    assert check.wrong_needs(good + "GLIBC_2.34") == ["needs GLIBC_2.34, newer than 2.28"]
    assert check.wrong_needs(good + "NEEDED libcudart.so.13") == ["needs libcudart.so.13"]


def test_source_distribution(tmp_path: Path) -> None:
    """The source distribution has all sources of a wheel, and no build output."""
    command = [sys.executable, "setup.py", "-q", "egg_info", "-e", tmp_path, "sdist", "-d", tmp_path]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    native = {str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*") if p.is_file()}
    assert native | {"CMakeLists.txt", "setup.py", "pyproject.toml", "LICENSE", "python_tests/conftest.py"} <= names
    assert not [name for name in names if name.startswith("build/") or name.endswith((".so", ".o", ".pyc"))]


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ([], "9.0"),
        ([(8, 6)], "8.6"),
        ([(9, 0), (8, 0), (9, 0)], "8.0;9.0"),
        ([(12, 1)], "12.1"),
        ([(7, 5)], "9.0"),
        ([(7, 5), (8, 0)], "8.0"),
    ],
)
def test_architectures(gpus: list[tuple[int, int]], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds in place use the machine's architectures from 8.0 on, wheels a fixed list."""
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: gpus[gpu])
    setup = runpy.run_path(str(ROOT / "setup.py"))
    default = setup["default_architectures"]
    assert default(inplace=True) == expected
    assert default(inplace=False) == "8.0;9.0;10.0;12.0+PTX"
    with pytest.raises(SystemExit, match=r"TORCH_CUDA_ARCH_LIST: '7\.5' is older than 8\.0"):
        setup["cmake_architectures"]("8.0;7.5")


def test_pythons_of_wheels(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wheels are built for all installed Pythons, with CUDA for the running one; missing ones are named."""
    monkeypatch.setattr(sys, "argv", ["build"])
    build.main()
    output = capsys.readouterr().out
    assert "Python 3.11: /bin/python3.11\n  /bin/python3.11 False True\n" in output
    assert "Python 3.12: no wheel, as there is no python3.12 with its headers\n" in output
    assert "/bin/python3.13 False True" in output
    monkeypatch.setattr(sys, "argv", ["build", "--cuda"])
    build.main()
    assert capsys.readouterr().out == "Python 3.13: /bin/python3.13\n  /bin/python3.13 True True\n"
    monkeypatch.setattr(sys, "argv", ["build", "--python", "3.11", "3.12"])
    with pytest.raises(SystemExit, match=r"Python 3\.12 is not there"):
        build.main()


def test_wheel_that_fails(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing command ends the build with its output."""

    def fail(*_: object) -> None:
        raise RuntimeError("pip wheel failed:\nreasons")

    monkeypatch.setattr(build, "make", fail)
    monkeypatch.setattr(sys, "argv", ["build"])
    with pytest.raises(SystemExit, match=r"no wheel for Python 3\.11: pip wheel failed:\nreasons"):
        build.main()


def test_versions_of_what_builds_wheels(build: ModuleType) -> None:
    """All packages have a version from a requirements file, without its comment."""
    found = build.pinned(*build.TOOLS, "torch", "numpy")
    assert len(found) == len(build.TOOLS) + 3  # NumPy has a line for older Pythons
    assert not [line for line in found if "#" in line or "==" not in line]
    with pytest.raises(ValueError, match="no requirements file has a version of no_such, none_such"):
        build.pinned("torch", "none_such", "no_such")


@pytest.mark.skipif(rk.build_info()["host_library"] is None, reason="_host is not built")
def test_trial_of_a_wheel(build: ModuleType) -> None:
    """The script that tests a wheel passes with this package, and finds a wrong sum."""
    done = run_script(build.TRIAL)
    assert done.returncode == 0, done.stderr
    assert '"host_library": "' in done.stdout
    wrong = build.TRIAL.replace("out = rk.embedding_bag(", "out = 2 * rk.embedding_bag(")
    assert "AssertionError" in run_script(wrong).stderr
