"""Comparison of the driver's version with the CUDA library's, with a fake libcuda."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from backends import ROOT
from process_cases import run_script

from rec_kernels import _cuda_driver, _library

COMPILER = os.environ.get("CXX", "c++").split()[0]
SOURCE = """
extern "C" int cuDriverGetVersion(int* version) {{
  *version = {};
  return {};
}}
"""


def driver(folder: Path, version: int, status: int = 0) -> str:
    """The folder of a libcuda.so.1 that supports a version of CUDA (12080 is 12.8), for LD_LIBRARY_PATH."""
    if shutil.which(COMPILER) is None:
        pytest.skip(f"{COMPILER} is not there to build a stand-in of libcuda")
    folder.mkdir()
    (folder / "cuda.cpp").write_text(SOURCE.format(version, status))
    command = [COMPILER, "-shared", "-fPIC", "-nostdlib", folder / "cuda.cpp", "-o", folder / "libcuda.so.1"]
    subprocess.run(command, check=True)
    return str(folder)


def test_drivers(tmp_path: Path) -> None:
    """A driver of an older major version is rejected; an older minor or unknown version is accepted."""
    (tmp_path / "cuda_version.txt").write_text("13.0\n")
    code = f"""
import runpy  # the file alone: it does without torch
from pathlib import Path
d = runpy.run_path({_cuda_driver.__file__!r})
print(d["installed"](), d["too_old"](Path({str(tmp_path)!r})))
"""
    expected = {
        12080: "(12, 8) the CUDA library of rec_kernels was built with CUDA 13.0 and needs a driver for CUDA 13 (580 "
        "or newer), but this machine's driver supports CUDA 12.8: update the driver, or install a wheel of rec_kernels "
        "for CUDA 12 (+cu12), or build it with nvcc 12",
        13000: "(13, 0) None",
        13020: "(13, 2) None",
    }
    for version, text in expected.items():
        done = run_script(code, LD_LIBRARY_PATH=driver(tmp_path / str(version), version))
        assert done.stdout.strip() == text, done.stderr
    done = run_script(code, LD_LIBRARY_PATH=driver(tmp_path / "broken", 12080, status=1))
    assert done.stdout.strip() == "None None", done.stderr


@pytest.mark.parametrize(("library", "allowed"), [("12.9", (12, 0)), ("13.1", (13, 0)), ("14.0", (14, 0))])
def test_oldest_driver(library: str, allowed: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Minor versions of CUDA share the oldest driver; a future CUDA has none."""
    (tmp_path / "cuda_version.txt").write_text(library)
    monkeypatch.setattr(_cuda_driver, "installed", lambda: allowed)
    assert _cuda_driver.too_old(tmp_path) is None
    monkeypatch.setattr(_cuda_driver, "installed", lambda: (allowed[0] - 1, 9))
    assert f"was built with CUDA {library} and needs a driver for CUDA {allowed[0]}" in _cuda_driver.too_old(tmp_path)


def test_the_oldest_driver_reads_the_kernels() -> None:
    """Drivers before 550 (CUDA 12.4) cannot read kernels that nvcc has compressed for size."""
    text = (ROOT / "CMakeLists.txt").read_text()
    first = re.search(r"VERSION_GREATER_EQUAL (\d+)\S*\)\n +set\(COMPRESS --compress-mode=size\)", text)
    assert all(driver >= 550 for major, driver in _cuda_driver._OLDEST.items() if major >= int(first[1]))


def test_library_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``import rec_kernels`` warns about the driver, does not load the library, and ``build_info`` has the reason."""
    for name in ("librec_kernels_cuda.so", "cuda_version.txt"):
        (tmp_path / name).write_text("13.0")
    monkeypatch.setattr(_library, "_FOLDER", tmp_path)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(_cuda_driver, "installed", lambda: (12, 4))
    with pytest.warns(RuntimeWarning, match=r"driver supports CUDA 12\.4: update"):
        reason = _library._load_cuda()
    assert "install a wheel of rec_kernels for CUDA 12" in reason
    monkeypatch.setattr(_cuda_driver, "installed", lambda: None)
    assert "cannot be loaded into torch" in _library._load_cuda()


def test_build_info_names_both_versions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both are None without a library or a driver."""
    monkeypatch.setattr(_cuda_driver, "installed", lambda: (12, 4))
    assert _library.build_info()["cuda_driver_version"] == "12.4"
    monkeypatch.setattr(_cuda_driver, "built_by", lambda package: None)
    monkeypatch.setattr(_cuda_driver, "installed", lambda: None)
    info = _library.build_info()
    assert (info["cuda_version"], info["cuda_driver_version"]) == (None, None)
