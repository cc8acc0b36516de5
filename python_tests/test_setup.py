"""Messages of setup.py: missing tools, built libraries. Tools and torch are fakes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "rec_kernels/_version.py")
TORCH = '__version__, __path__ = "{}", ["/torch"]\nclass version:\n    cuda = {}\n'
# The tests' virtual environment has scripts named cmake and ninja.
BEGIN = """
import runpy, sys, sysconfig, setuptools
paths = sysconfig.get_path
sysconfig.get_path = lambda name, *rest, **more: SCRIPTS if name == "scripts" else paths(name, *rest, **more)
SCRIPTS, sys.argv = "/no/scripts", ["setup.py", "-q", *sys.argv[1:]]
"""
END = "runpy.run_path('setup.py', run_name='__main__')"
NVCC = 'echo "Cuda compilation tools, release 12.9, V12.9.86"'

pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="these are tests of the checkout")


class Checkout:
    """The files that setup.py reads, and fakes of torch and of the tools that it calls."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tools = folder, folder / "tools"
        for name in FILES:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
        self.tools.mkdir()
        for name in ("cmake", "ninja", "c++"):
            self.tool(name)
        self.torch()

    def tool(self, name: str, does: str = "exit 0") -> None:
        """Writes a program of that name to the PATH."""
        path = self.tools / name
        path.write_text(f"#!/bin/sh\n{does}\n")
        path.chmod(0o755)

    def torch(self, version: str = "2.13.0", cuda: str | None = None) -> None:
        """Fakes a torch of that version, for that version of CUDA."""
        (self.folder / "torch.py").write_text(TORCH.format(version, repr(cuda)))

    def run(self, *arguments: str, begin: str = "", **environment: str) -> subprocess.CompletedProcess:
        """Runs setup.py with arguments (by default a build in place), after some lines of Python."""
        cleared = {k: v for k, v in os.environ.items() if k not in ("CXX", "CUDA_HOME") and "REC_KERNELS" not in k}
        return subprocess.run(
            [sys.executable, "-c", f"{BEGIN}{begin}\n{END}", *(arguments or ("build_ext", "--inplace"))],
            env=cleared | {"PATH": str(self.tools), "PYTHONPATH": str(self.folder)} | environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
        )


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def last_line(done: subprocess.CompletedProcess) -> str:
    """The last line of a failed build."""
    assert done.returncode == 1, done.stdout
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr.strip()


@pytest.mark.parametrize(
    ("begin", "expected"),
    [
        ("setuptools.__version__ = '76.1.0'", "setuptools 76.1.0 is too old to build rec_kernels, which needs 77 or"),
        ("sys.modules['torch'] = None", f"torch is not installed for {sys.executable}, and is needed"),
        ("sys.modules['libdep'] = None; open('torch.py', 'w').write('import libdep')", "torch cannot be imported by"),
        ("open('torch.py', 'w').write('raise OSError(\"libcudart\")')", f"imported by {sys.executable}: libcudart"),
    ],
)
def test_python_packages(checkout: Checkout, begin: str, expected: str) -> None:
    """An old setuptools, no torch, and torches that fail to import are reported."""
    assert expected in last_line(checkout.run(begin=begin, REC_KERNELS_CUDA="0"))


def test_old_torch(checkout: Checkout) -> None:
    """Versions are compared as numbers: 2.9 is older than 2.10."""
    checkout.torch("2.9.1+cpu")
    assert last_line(checkout.run()) == "torch 2.9.1+cpu is too old to build rec_kernels, which needs 2.10 or newer"


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        ("cmake", 'cmake is needed to build rec_kernels and is not on the PATH: run `pip install "cmake>=3.20"`'),
        ("ninja", "ninja is needed to build rec_kernels and is not on the PATH: run `pip install ninja`"),
        ("c++", "a C++ compiler is needed to build rec_kernels, and neither c++, g++ nor clang++ is on the PATH"),
    ],
)
@pytest.mark.parametrize("command", ["build_ext", "bdist_wheel", "editable_wheel"])
def test_tools(checkout: Checkout, missing: str, expected: str, command: str) -> None:
    """Every way to build reports the missing tool, and nothing else."""
    (checkout.tools / missing).unlink()
    assert last_line(checkout.run(command)).startswith(expected)


def test_source_distribution_needs_no_tools(checkout: Checkout) -> None:
    """It is packed without torch, a compiler or CMake."""
    shutil.rmtree(checkout.tools)
    for path in (ROOT / "rec_kernels").rglob("__init__.py"):
        (checkout.folder / path.parent.relative_to(ROOT)).mkdir(parents=True, exist_ok=True)
    done = checkout.run("sdist", begin="sys.modules['torch'] = None")
    assert done.returncode == 0, done.stderr
    assert list((checkout.folder / "dist").glob("*.tar.gz"))


def test_compiler_of_the_environment(checkout: Checkout) -> None:
    """CXX is a command with options; a missing program is named."""
    (checkout.tools / "c++").unlink()
    checkout.tool("g++-13")
    assert "and CXX=g++-99 does not exist" in last_line(checkout.run(CXX="g++-99 -m64"))
    assert checkout.run(CXX="g++-13 -m64").returncode == 0


def test_tools_among_the_scripts(checkout: Checkout) -> None:
    """cmake and ninja of an inactive virtual environment are found."""
    scripts = checkout.folder / "scripts"
    scripts.mkdir()
    for name in ("cmake", "ninja"):
        (checkout.tools / name).rename(scripts / name)
    assert checkout.run(begin=f"SCRIPTS = {str(scripts)!r}").returncode == 0


def test_nvcc(checkout: Checkout) -> None:
    """A required CUDA library without nvcc is an error; CUDA_HOME has precedence over the PATH."""
    assert "CUDA library, but nvcc is not on the PATH: install" in last_line(checkout.run(REC_KERNELS_CUDA="1"))
    checkout.tool("nvcc")
    home = str(checkout.folder)
    done = checkout.run(REC_KERNELS_CUDA="1", CUDA_HOME=home)
    assert f"there is no bin/nvcc in CUDA_HOME={home}: install" in last_line(done)
    assert last_line(checkout.run(REC_KERNELS_CUDA="2")) == "REC_KERNELS_CUDA must be 0, 1 or unset, got '2'"


@pytest.mark.parametrize("step", ["-G", "--build"])
def test_cmake_fails(checkout: Checkout, step: str) -> None:
    """One line follows CMake's output, without a traceback."""
    checkout.tool("cmake", f'echo "reasons"; [ "$1" != {step} ] || exit 3')
    done = checkout.run()
    assert last_line(done) == f"rec_kernels is not built: `cmake {step}` failed with status 3 for the reason above"
    assert "reasons" in done.stdout


def test_what_was_built(checkout: Checkout) -> None:
    """Each library is built, or left out for a reason; an earlier build's files are removed."""
    cuda = checkout.folder / "rec_kernels" / "librec_kernels_cuda.so"
    cuda.touch()
    done = checkout.run(begin="import importlib.util; importlib.util.find_spec = lambda name: None")
    assert done.returncode == 0, done.stderr
    assert not cuda.exists()
    assert "CUDA library: left out: torch 2.13.0 is a build without CUDA; REC_KERNELS_CUDA=1" in done.stdout
    assert "host library, for tables in files: left out: pybind11 is not installed" in done.stdout
    assert (checkout.folder / "build" / "built.txt").read_text() in done.stdout
    assert "CUDA library: left out: REC_KERNELS_CUDA=0\n" in checkout.run(REC_KERNELS_CUDA="0").stdout
    checkout.torch(cuda="13.0")
    assert "CUDA library: left out: nvcc is not on the PATH; CUDA_HOME" in checkout.run().stdout
    checkout.tool("nvcc", NVCC)
    built = f"CUDA library: built by {checkout.tools / 'nvcc'} for 80-real 90-real\n"
    assert built in checkout.run(TORCH_CUDA_ARCH_LIST="8.0 9.0").stdout
    assert {p.name for p in (checkout.folder / "build").glob("*-torch2.13.0")} == {
        "cpu-torch2.13.0",
        "cuda-12.9-torch2.13.0",
    }
    checkout.tool("nvcc", "echo nothing")
    assert last_line(checkout.run()) == f"`{checkout.tools / 'nvcc'} --version` names no release of CUDA: 'nothing\\n'"


def test_label_of_a_cuda_wheel(checkout: Checkout) -> None:
    """A wheel's version has nvcc's major version of CUDA; a local build's has not."""
    checkout.tool("nvcc", NVCC)
    wheel = {"REC_KERNELS_CUDA": "1", "REC_KERNELS_PORTABLE": "1"}
    assert checkout.run("--version", **wheel).stdout.strip().endswith("+cu12")
    assert "+cu" not in checkout.run("--version", **wheel | {"REC_KERNELS_CUDA": "0"}).stdout
    assert "+cu" not in checkout.run("--version", REC_KERNELS_CUDA="1").stdout


def install_editable(checkout: Checkout) -> Path:
    """Unpacks the wheel of an editable install into a new virtual environment; returns its Python."""
    shutil.copytree(
        ROOT / "rec_kernels",
        checkout.folder / "rec_kernels",
        dirs_exist_ok=True,
        ignore=shutil.ignore_patterns("*.so", "__pycache__"),
    )
    done = checkout.run("editable_wheel", "--dist-dir", "dist")
    assert done.returncode == 0, done.stderr
    environment = checkout.folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (site,) = environment.glob("lib/python*/site-packages")
    with zipfile.ZipFile(next((checkout.folder / "dist").glob("*.whl"))) as wheel:
        wheel.extractall(site)
    return environment / "bin" / "python"


def test_editable_install_is_a_path(checkout: Checkout) -> None:
    """Type checkers and editors follow paths in .pth files; they do not follow import hooks."""
    python = install_editable(checkout)
    found = subprocess.run(
        [python, "-c", "import sys; print(*sys.meta_path); print(*sys.path)"],
        capture_output=True,
        text=True,
        check=True,
    )
    hooks, paths = found.stdout.splitlines()
    assert "editable" not in hooks.lower()
    assert str(checkout.folder) in paths.split()


@pytest.mark.full
def test_editable_install_has_types(checkout: Checkout) -> None:
    """Mypy finds the types of an editable install, not Any."""
    pytest.importorskip("mypy")
    python, script = install_editable(checkout), checkout.folder / "dist" / "script.py"
    script.write_text(
        "import rec_kernels as rk\n"
        'reveal_type(rk.EmbeddingBagConfig(9, 4, name="t", feature_names=["f"]).embedding_dim)\n'
        "reveal_type(rk.build_info())\n"
    )
    command = [sys.executable, "-m", "mypy", "--ignore-missing-imports", "--python-executable", python, script]
    cleared = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    output = subprocess.run(command, cwd=script.parent, env=cleared, capture_output=True, text=True).stdout
    assert 'script.py:2: note: Revealed type is "int"' in output.replace("builtins.", ""), output
    assert 'script.py:3: note: Revealed type is "dict[str, object]"' in output.replace("builtins.", ""), output
