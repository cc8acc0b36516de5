"""Effects of ``import rec_kernels`` on a process: avoided imports, and Python types of C++ exceptions."""

from __future__ import annotations

import inspect
import os
import pydoc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from process_cases import run_script
from tiers import full

import rec_kernels as rk
from rec_kernels import _library

#: Modules that take as long to import as rec_kernels itself, or much longer.
SLOW = ("torch._dynamo", "torch._inductor", "torch.utils.flop_counter", "triton", "matplotlib", "pandas")


def run(script: str) -> str:
    """Output of a script in a subprocess."""
    done = run_script(script)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_sources_newer_than_the_build_are_told(tmp_path: Path) -> None:
    """A checkout warns of sources newer than the libraries; a wheel does not, nor do other newer files."""
    package = tmp_path / "rec_kernels"
    for name in ("csrc/rows/cpu/a.cpp", "csrc/core/b.h", "csrc/emulator/c.h", "rec_kernels/lib.so", "CMakeLists.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (1000, 1000))
    assert _library.changed_source(package) is None
    os.utime(tmp_path / "csrc/emulator/c.h", (3000, 3000))
    assert _library.changed_source(package) is None
    os.utime(tmp_path / "csrc/core/b.h", (2000, 2000))
    assert _library.changed_source(package) == tmp_path / "csrc/core/b.h"
    (package / "cuda_architectures.txt").touch()  # a build without changes
    assert _library.changed_source(package) is None
    os.utime(package / "cuda_architectures.txt", (1000, 1000))
    (tmp_path / "CMakeLists.txt").unlink()
    assert _library.changed_source(package) is None


def test_changes_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """The warning has the command to run."""
    monkeypatch.setattr(_library, "changed_source", lambda folder: folder / "a.cpp")
    with pytest.warns(RuntimeWarning, match=r"a\.cpp has changed .* run `make build`"):
        _library._warn_if_stale()


def test_completion_shows_the_public_names() -> None:
    """``dir(rk)``, which consoles use for completion, has only public functions and classes; ``help(rk)`` works."""
    shown = {name for name in dir(rk) if not name.startswith("_")}
    assert {name for name in shown - set(rk.__all__) if not inspect.ismodule(getattr(rk, name))} == set()
    assert "EmbeddingBagCollection" in pydoc.render_doc(rk)


LOOKED_FOR = "rec_kernels, importlib.util; importlib.util.find_spec('torch.utils.flop_counter')"


@pytest.mark.parametrize("first", [LOOKED_FOR, *full("rec_kernels", "torch.utils.flop_counter")])
def test_slow_modules_are_left_out_and_operations_counted(first: str) -> None:
    """The import adds no slow module, and FLOPs are counted with torch's counter imported or found before or after."""
    script = f"""
import sys, torch
before = set(sys.modules)
import {first}
import rec_kernels as rk
print(*(set(sys.modules) - before))
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    rk.dot_interaction(torch.ones(2, 3), torch.ones(2, 1, 3))
print(counter.get_total_flops(), sum(type(f).__module__.startswith("rec_kernels") for f in sys.meta_path))
"""
    imported, counted = run(script).splitlines()
    assert "rec_kernels.ops.flops" in imported.split()
    if first != "torch.utils.flop_counter":
        assert not {*SLOW} & {*imported.split()}
    assert counted == "12 0"


def error_of(function: Callable[..., object], *arguments: object) -> str:
    """The type and the text of the error that a call raises."""
    try:
        function(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def wrong_arguments(is_compiled: bool = True) -> list[str]:
    """Errors of an op, of a public function, of its graph if ``is_compiled``, and of an id out of range."""

    def quantized(x: torch.Tensor) -> torch.Tensor:
        return rk.quantize_rows(x, "int8")

    if is_compiled:
        quantized = torch.compile(quantized, backend="aot_eager", fullgraph=True)
        quantized(torch.ones(2, 4))
    table, first = torch.ones(3, 4), torch.tensor([0])
    return [
        error_of(torch.ops.rec_kernels.scale_rows, torch.ones(3, 2), torch.ones(2)),
        error_of(rk.scale_rows, torch.ones(3, 2, requires_grad=True), torch.ones(2)),
        error_of(quantized, torch.full((2, 4), torch.nan)),
        error_of(rk.embedding_bag, torch.tensor([7]), table, first).partition(" (")[0],
    ]


WRONG = [
    "ValueError: scale must have shape [3], got [2]",
    "ValueError: scale must have shape [3], got [2]",
    'ValueError: x[0, 0] = nan: format "int8" holds finite numbers only',
    "IndexError: input[0] = 7",
]


def test_types_of_errors() -> None:
    """Errors have equal types with every torch; torch 2.15 needs _host for them."""
    if _library.torch_version() >= _library.RUNTIME_ERRORS_SINCE:
        needs_host()
    assert wrong_arguments() == WRONG


@pytest.mark.parametrize("is_compiled", [False, *full(True)])
def test_types_of_errors_by_host(is_compiled: bool) -> None:
    """_host's errors, for torch 2.15, have equal types with every torch."""
    needs_host()
    script = f"""
import rec_kernels
from test_import import wrong_arguments
from rec_kernels import _library
_library.keep_value_errors(rec_kernels.build_info()["cpu_library"])
print(*wrong_arguments({is_compiled}), sep="\\n")
"""
    assert run(script).splitlines() == WRONG


def needs_host() -> None:
    if rk.build_info()["host_library"] is None:
        pytest.skip("_host is not built")
