"""Helpers of the row files' tests: small files, their contents, scripts in subprocesses."""

from __future__ import annotations

import ctypes
import mmap
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from rec_kernels._library import host

BLOCK = 4096
LAYOUT = '{"tables": ["ä"]}'
_LIBC = ctypes.CDLL(None, use_errno=True)


def host_or_skip() -> ModuleType:
    """The compiled module; skips the calling module's tests if it was not built."""
    if mmap.PAGESIZE != BLOCK:
        pytest.skip(f"the tests are for pages of {BLOCK} bytes, not {mmap.PAGESIZE}", allow_module_level=True)
    try:
        return host()
    except ImportError as error:
        pytest.skip(str(error), allow_module_level=True)


def resident_blocks(window: np.ndarray) -> int:
    """Number of the window's resident pages, according to the kernel."""
    pages = -(-window.size // BLOCK)
    found = (ctypes.c_ubyte * pages)()
    address = ctypes.c_void_p(window.ctypes.data)
    assert _LIBC.mincore(address, ctypes.c_size_t(pages * BLOCK), found) == 0
    return sum(page & 1 for page in found)


def fill(file, first: int, values: np.ndarray) -> None:
    """Writes bytes from block ``first`` on, a few blocks at a time."""
    step = max(1, file.memory_budget // BLOCK) * BLOCK
    for start in range(first * BLOCK, first * BLOCK + values.size, step):
        size = min(step, first * BLOCK + values.size - start)
        file.load([start], size, write=True)
        file.window[start : start + size] = values[start - first * BLOCK :][:size]


def contents(file) -> np.ndarray:
    """All bytes, read a few blocks at a time."""
    step = max(1, file.memory_budget // BLOCK) * BLOCK
    whole = np.empty(file.num_bytes, np.uint8)
    for start in range(0, file.num_bytes, step):
        size = min(step, file.num_bytes - start)
        file.load([start], size)
        whole[start : start + size] = file.window[start : start + size]
    file.unpin()
    return whole


def noise(seed: int, size: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def flip(path: Path, place: int) -> None:
    """Flips one bit of a file."""
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 0x40]))


def run_script(script: str, *arguments: object, launcher: tuple[str, ...] = (), timeout: float = 120) -> str:
    """Runs a script with ``RowFile``, ``np`` and the helpers above, without importing torch; returns its output."""
    compiled = host().__file__
    prelude = f"""
import importlib.util, os, sys
spec = importlib.util.spec_from_file_location("_host", {compiled!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
RowFile = module.RowFile
import numpy as np
BLOCK, LAYOUT = {BLOCK}, {LAYOUT!r}
def noise(seed, size): return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
"""
    command = [*launcher, sys.executable, "-c", prelude + script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def open_file(path, **options):
    return host().RowFile.open(path, **{"layout": LAYOUT, "memory_budget": 4 * BLOCK} | options)


def log_of(path):
    return path.with_name(path.name + ".log")


def copied(path, name):
    """Copies the files, as a crash now would leave them."""
    copy = path.with_name(name)
    for source, target in ((path, copy), (log_of(path), log_of(copy))):
        shutil.copyfile(source, target)
    return copy


def assert_holds(path, expected, values, **options):
    with open_file(path, **options) as file:
        assert file.generation == expected
        assert np.array_equal(contents(file), values)
