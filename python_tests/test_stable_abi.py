"""Symbols that the built libraries need from torch, and that instruction sets share."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rec_kernels

PACKAGE = Path(rec_kernels.__file__).parent
ROOT = PACKAGE.parent
LIBRARIES = sorted(PACKAGE.glob("librec_kernels_*.so"))
# The C interfaces of the stable ABI; other symbols of torch may change between releases.
STABLE_PREFIXES = ("aoti_torch_", "torch_")
#: Their names in csrc, from the headers of torch 2.10.0; its STABLE_TORCH_LIBRARY expands no macro.
OF_TORCH_2_10 = {
    *("STABLE_TORCH_LIBRARY_FRAGMENT", "STABLE_TORCH_LIBRARY_IMPL", "TORCH_BOX"),
    *("AOTI_TORCH_SUCCESS", "TORCH_ERROR_CODE_CHECK", "aoti_torch_aten_new_empty", "aoti_torch_delete_tensor_object"),
    *("aoti_torch_get_current_cuda_stream", "aoti_torch_get_storage_offset", "aoti_torch_get_storage_size"),
    *("torch_delete_list", "torch_list_get_item", "torch_list_size"),
    *("torch_delete_string", "torch_string_c_str", "torch_string_length"),
}

pytestmark = pytest.mark.skipif(shutil.which("nm") is None, reason="binutils' nm is not installed")


def _symbols(path: Path, *options: str) -> list[str]:
    done = subprocess.run(["nm", *options, str(path)], capture_output=True, text=True, check=True)
    return [line.split()[-1] for line in done.stdout.splitlines() if line and not line.endswith(":")]


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda p: p.name)
def test_torch_symbols_are_stable(library: Path) -> None:
    """No mangled torch symbol of at::, c10:: or torch:: is undefined."""
    needed = _symbols(library, "-D", "--undefined-only")
    mangled = [s for s in needed if re.match(r"_ZN?K?(2at|3c10|5torch)", s)]
    assert not mangled, mangled
    assert any(s.startswith(STABLE_PREFIXES) for s in needed)


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda p: p.name)
def test_torch_abi_audit(library: Path) -> None:
    """torch-abi-audit finds the stable ABI only."""
    tool = Path(sys.executable).with_name("torch-abi-audit")
    if not tool.exists():
        pytest.skip("torch-abi-audit is not installed")
    done = subprocess.run([tool, "--check", "torch", str(library)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_cuda_library_finds_what_it_takes_from_the_cpu_library() -> None:
    """A missing export would otherwise be found only when the library is loaded, with a CUDA build of torch."""
    cpu, cuda = (PACKAGE / f"librec_kernels_{name}.so" for name in ("cpu", "cuda"))
    if not cuda.exists():
        pytest.skip("the CUDA library is not built here")
    needed = {s for s in _symbols(cuda, "-D", "--undefined-only") if "rec_kernels" in s}
    assert needed
    assert sorted(needed - set(_symbols(cpu, "-D", "--defined-only"))) == []


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda p: p.name)
def test_exports(library: Path) -> None:
    """Exported symbols are those marked RK_EXPORT, and no instantiations of the standard library."""
    exported = _symbols(library, "-D", "--defined-only")
    ours = [s for s in exported if re.match(r"_ZNK?11rec_kernels", s)]
    assert sorted(set(exported) - set(ours) - {"rec_kernels_throw_value_errors_by"}) == []


def test_cuda_library_takes_all_that_is_exported() -> None:
    """The CPU library exports only C++ functions that the CUDA library needs."""
    cpu, cuda = (PACKAGE / f"librec_kernels_{name}.so" for name in ("cpu", "cuda"))
    if not cuda.exists():
        pytest.skip("the CUDA library is not built here")
    unused = set(_symbols(cpu, "-D", "--defined-only")) - set(_symbols(cuda, "-D", "--undefined-only"))
    assert unused == {"rec_kernels_throw_value_errors_by"}


@pytest.mark.parametrize("library", [*LIBRARIES, *sorted(PACKAGE.glob("_host*.so"))], ids=lambda p: p.name)
def test_hardening(library: Path) -> None:
    """Symbols are bound before anything runs, then read-only; stacks and copies of known size are guarded."""
    if _has_asan(library):
        pytest.skip("sanitizers have checks of their own")
    read = subprocess.run(["readelf", "-dlW", library], capture_output=True, text=True, check=True).stdout
    assert "BIND_NOW" in read
    assert "GNU_RELRO" in read
    assert "__stack_chk_fail" in {s.split("@")[0] for s in _symbols(library, "-D", "--undefined-only")}


def _has_asan(library: Path) -> bool:
    return any("__asan" in s for s in _symbols(library, "-D", "--undefined-only"))


def test_no_python_symbols() -> None:
    """The op libraries do not use Python: one build serves every Python, and C++ programs."""
    for library in LIBRARIES:
        assert not [s for s in _symbols(library, "-D", "--undefined-only") if s.startswith(("Py", "_Py"))]


def test_instruction_sets_share_no_weak_symbol() -> None:
    """A weak symbol of two instruction sets would be merged: AVX-512 code on a machine without it."""
    builds = sorted(ROOT.glob("build/c*/CMakeFiles"), key=lambda p: p.stat().st_mtime)
    if not builds:
        pytest.skip("object files are not kept with this installation")
    weak: dict[str, set[str]] = {}
    for folder in builds[-1].glob("kernels_*.dir"):
        for path in folder.rglob("*.o"):
            lines = subprocess.run(["nm", str(path)], capture_output=True, text=True, check=True).stdout.splitlines()
            found = {line.split()[-1] for line in lines if re.search(r" [VWu] ", line)}
            weak.setdefault(folder.name, set()).update(found)
    names = sorted(weak)
    assert names
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            assert not weak[a] & weak[b], (a, b, sorted(weak[a] & weak[b]))


def test_sources_include_no_unstable_header() -> None:
    """No ATen or c10 include anywhere in csrc."""
    sources = [p for p in (ROOT / "csrc").rglob("*") if p.suffix in {".h", ".cpp", ".cu", ".cuh"}]
    assert sources
    for path in sources:
        assert not re.search(r'#include\s*[<"](ATen|c10|torch/extension|torch/torch)', path.read_text()), path


def test_sources_compile_with_the_oldest_torch() -> None:
    """Macros and C functions of torch in csrc are declared by the headers of torch 2.10."""
    files = [p for p in (ROOT / "csrc").rglob("*") if p.suffix in {".h", ".cpp", ".cu", ".cuh"}]
    name = r"\b(?:[A-Z_]*(?:TORCH|AOTI)_[A-Z_]+|(?:aoti_torch|torch)_[a-z0-9_]+)\b"
    used = {found for path in files for found in re.findall(name, re.sub("//.*", "", path.read_text()))}
    assert used <= OF_TORCH_2_10, "build with torch 2.10 before a name joins the list"


def test_kernel_sources_are_plain() -> None:
    """Files compiled once per instruction set use no std template and no torch header."""
    kernels = sorted((ROOT / "csrc").glob("*/cpu/*_kernels.cpp"))
    assert kernels
    for path in kernels:
        text = path.read_text()
        assert "std::" not in text, path
        assert not re.search(r'#include\s*(<torch|"core/stable.h"|<(?!immintrin|cstdint))', text), path


def test_build_info() -> None:
    """build_info has the libraries and versions."""
    info = rec_kernels.build_info()
    assert Path(info["cpu_library"]).exists()
    assert info["cpu_isa"] in {"baseline", "v3", "v4"}
    assert (info["cuda_library"] is None) == (not (PACKAGE / "librec_kernels_cuda.so").exists())
    assert info["cuda_unavailable"] is None or isinstance(info["cuda_unavailable"], str)
    assert info["host_library"] is None or Path(info["host_library"]).parent == PACKAGE
    assert (info["triton"] is None) == (importlib.util.find_spec("triton") is None)
    assert info["triton"] is None or info["triton"][0].isdigit()
    assert info["triton_in_use"] == (
        info["triton"] is not None and info["cuda_unavailable"] is not None and torch.cuda.is_available()
    )


def test_missing_library_says_so(tmp_path: Path) -> None:
    """A package without its library raises one sentence with the build command."""
    shutil.copytree(PACKAGE, tmp_path / "rec_kernels", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    done = subprocess.run([sys.executable, "-c", "import rec_kernels"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert "is not built; run `pip install --no-build-isolation .`" in done.stderr


def test_broken_library_says_why(tmp_path: Path) -> None:
    """The error has the system loader's reason; torch's has the file's name only."""
    shutil.copytree(PACKAGE, tmp_path / "rec_kernels", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (tmp_path / "rec_kernels" / "librec_kernels_cpu.so").write_text("no library")
    done = subprocess.run([sys.executable, "-c", "import rec_kernels"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert f"cannot be loaded into torch {torch.__version__}: {tmp_path}" in done.stderr
    assert "file too short" in done.stderr
