"""Row files without memory, in a program that fails each allocation in turn, built with the sanitizers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from backends import ROOT
from row_file_cases import host_or_skip

pytestmark = pytest.mark.full
host_or_skip()  # the module's system and headers


def test_every_allocation_can_fail(tmp_path: Path) -> None:
    """A call raises or succeeds, none hangs, and the bytes are those of a file without failures."""
    sources = [path for path in sorted((ROOT / "csrc" / "host").glob("*.cpp")) if path.name != "host.cpp"]
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-Og", "-g1", "-fsanitize=address,undefined"]
    program = [ROOT / "python_tests" / "row_file_memory.cpp", *sources, f"-I{ROOT / 'csrc'}", "-pthread"]
    subprocess.run([*command, "-fno-sanitize-recover=all", *program, "-o", tmp_path / "program"], check=True)
    for seed in range(2):
        folder = tmp_path / str(seed)
        folder.mkdir()
        ran = [tmp_path / "program", folder, str(10 * seed), "60"]
        printed = subprocess.run(ran, check=True, capture_output=True, text=True).stdout
        assert int(printed.split()[0]) > 1000
