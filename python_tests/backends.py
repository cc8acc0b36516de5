"""Backends that must compute the same bits: CPU kernels of every instruction set, CUDA kernels emulated and on a GPU.

``cuda_emulated`` are the kernels of csrc/*/cuda compiled by the C++ compiler (csrc/emulator); the library is built on
first use, and detects races. Threads run in ascending, descending and random order. Tests without csrc, as
wheels/compatibility.py copies them, use only the installed kernels. `pytest --backends=cuda` deselects the other kinds.
"""

from __future__ import annotations

import collections
import functools
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from backend_use import read, uses_backend
from filelock import FileLock
from layout_calls import OPS, ListOps
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

import rec_kernels as rk
from rec_kernels import testing
from rec_kernels._library import keep_value_errors

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "csrc"
BUILD = ROOT / "build" / "emulated"
#: All kinds of backends, and the selected ones.
KINDS = ("cpu", "cuda_emulated", "cuda")
SELECTED = set(KINDS)
#: Passed comparisons per kind of backend, for the test summary.
PASSED: collections.Counter[str] = collections.Counter()


class Backend(NamedTuple):
    """A device or emulator that runs a case, and its ops, which take CPU tensors."""

    name: str
    ops: object

    @property
    def kind(self) -> str:
        """ "cpu", "cuda_emulated" or "cuda"."""
        return self.name.split(",")[0]


def every_backend() -> Iterator[Backend]:
    """Yields every backend of this machine; its settings are in effect during the loop body."""
    yield from _counted(CPU, EMULATED, CUDA)


def cpu_backends() -> Iterator[Backend]:
    """Yields every instruction set, with several numbers of threads."""
    yield from _counted(CPU)


def host_backends() -> Iterator[Backend]:
    """Yields the backends that do not copy their arguments, for tensors too large to copy to a GPU."""
    yield from _counted(CPU, EMULATED)


def device_backends() -> Iterator[Backend]:
    """Yields the CUDA kernels, emulated and on a GPU; skips the test if neither exists."""
    if not (SOURCES.exists() or torch.cuda.is_available()):
        pytest.skip("there are no CUDA kernels to run: neither csrc nor a GPU")
    yield from _counted(EMULATED, CUDA)


def select(kinds: str) -> None:
    """Selects the kinds of backends that run.

    Args:
        kinds: names, separated by commas.

    Raises:
        ValueError: unknown kind; or only "cuda" without a GPU or a CUDA library for it.
    """
    selected = set(kinds.split(","))
    if not selected <= set(KINDS):
        raise ValueError(f"--backends is {kinds!r}: {', '.join(KINDS)} are allowed, separated by commas")
    missing = rk.build_info()["cuda_unavailable"] or (
        None if torch.cuda.is_available() else "torch sees no CUDA device"
    )
    if selected == {"cuda"} and missing:
        raise ValueError(f"--backends is 'cuda', but {missing}")
    SELECTED.clear()
    SELECTED.update(selected)


def is_deselected(file: Path, test: str | None = None) -> bool:
    """Returns True if a test (None: every test of the file) uses no selected kind of backend (backend_use.py)."""
    if "cpu" in SELECTED:
        return False
    return not any(uses_backend(file, name, frozenset(SELECTED)) for name in ([test] if test else read(file).tests))


def _counted(*runs: tuple[str, Callable[[], Iterator[Backend]]]) -> Iterator[Backend]:
    selected = [run for kind, run in runs if kind in SELECTED]
    if not selected:
        pytest.skip(f"--backends leaves out {', '.join(kind for kind, _ in runs)}")
    for run in selected:
        for backend in run():
            yield backend
            PASSED[backend.kind] += 1


def _is_sanitized() -> bool:
    """True if libraries are sanitized. Sanitizers check addresses: the most threads and one order are enough."""
    return "libasan" in os.environ.get("LD_PRELOAD", "")


def _cpu() -> Iterator[Backend]:
    # The number of threads determines the split of the work; each instruction set has its own vector width.
    *older, newest = testing.cpu_isas()
    some = (3,) if _is_sanitized() else (1, 2, 3)
    for isa, threads in [*((isa, 2 + i % 2) for i, isa in enumerate(older)), *((newest, n) for n in some)]:
        with testing.use_cpu_isa(isa), testing.use_threads(threads):
            yield Backend(f"cpu, {isa}, {threads} thread(s)", OPS)


def _emulated() -> Iterator[Backend]:
    if not SOURCES.exists():
        return
    ops = emulated()
    orders = list(enumerate(("ascending", "descending", "random")))
    for number, order in orders[-1:] if _is_sanitized() else orders:
        with _order(number):
            yield Backend(f"cuda_emulated, {order} order", ops)


@contextmanager
def _order(number: int) -> Iterator[None]:
    emulated()._set_order(number, 1)
    try:
        yield
    finally:
        emulated()._set_order(0, 0)


def _cuda() -> Iterator[Backend]:
    if torch.cuda.is_available():
        yield Backend("cuda", ListOps(OnCuda()))
        yield Backend("cuda, unaligned", ListOps(OnCuda(unaligned)))


CPU, EMULATED, CUDA = zip(KINDS, (_cpu, _emulated, _cuda), strict=True)


def _skip_without(kind: str) -> None:
    if kind not in SELECTED:
        pytest.skip(f"--backends leaves out {kind}")


def build(target: str, **options: str) -> Path:
    """Builds one of the emulator's libraries, and returns its path.

    Args:
        target: "rec_kernels_emulated" or "rec_kernels_emulated_asan".
        options: CMake definitions.
    """
    _skip_without("cuda_emulated")
    definitions = {"REC_KERNELS_EMULATE": "ON", "REC_KERNELS_TORCH": torch.__path__[0]} | options
    flags = [f"-D{name}={value}" for name, value in definitions.items()]
    # One folder and lock per library: a process does not wait while another one builds the sanitized library.
    folder = BUILD / target
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        # `cmake --build` runs the ninja of the configuration: another version of ninja would rebuild everything.
        build_it = ["cmake", "--build", folder, "--target", target]
        for command in (["cmake", "-G", "Ninja", "-S", ROOT, "-B", folder, *flags], build_it):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{target} cannot be built:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return folder / f"lib{target}.so"


def sanitized_environment() -> dict[str, str]:
    """The environment of a process that loads libraries built with AddressSanitizer.

    Raises:
        FileNotFoundError: the compiler has no sanitizer runtime.
    """
    compiler = os.environ.get("CXX", "c++")
    found = []
    for name in ("libasan.so", "libubsan.so"):
        done = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True)
        found.append(done.stdout.strip())
        if not Path(found[-1]).is_absolute():
            raise FileNotFoundError(f"{compiler} has no {name}")
    return os.environ | {"LD_PRELOAD": " ".join(found), "ASAN_OPTIONS": "detect_leaks=0"}


def emulated() -> ListOps:
    """The ops of the emulated CUDA kernels, ``torch.ops.rec_kernels_emulated``, on CPU tensors."""
    _skip_without("cuda_emulated")
    return ListOps(_load_emulated())


@functools.cache
def _load_emulated() -> object:
    # The sanitized library loads only into a process with preloaded sanitizers (test_emulator.py).
    library = Path(os.environ.get("REC_KERNELS_TEST_LIBRARY") or build("rec_kernels_emulated"))
    torch.ops.load_library(library)
    with suppress(ImportError):  # as _library.py does with torch 2.15; tested with every version
        keep_value_errors(library)
    return torch.ops.rec_kernels_emulated


def moved(x: Tensor, to: Callable[[Tensor], Tensor]) -> Tensor:
    """Copies ``x`` by ``to``, from its first to its last element, and keeps the strides.

    ``Tensor.to`` and ``Tensor.clone`` make a tensor with gaps or overlapping elements contiguous.
    """
    if x.is_contiguous():
        return to(x)
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return to(x.as_strided((span,), (1,))).as_strided(x.shape, x.stride())


def unaligned(x: Tensor) -> Tensor:
    """Copies ``x`` on its device to an address one element past an aligned one, with its strides.

    Flat bytes move by four: they may be tables with float32 rows.
    """
    past = 4 if x.dtype == torch.uint8 and x.dim() == 1 else 1
    return moved(x, lambda flat: torch.cat([x.new_zeros(past), flat.flatten()])[past:].view(flat.shape))


class OnDevice:
    """``ops`` for CPU tensors: copies arguments with their strides to the device, results and changed arguments back.

    Args:
        ops: torch.ops.rec_kernels, or the emulated ones.
        to: copies a tensor to the device.
        back: copies a tensor from the device.
    """

    def __init__(self, ops: object, to: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> None:
        self._ops, self._to, self._back = ops, to, back

    def __getattr__(self, name: str) -> _OpOnDevice:
        return _OpOnDevice(getattr(self._ops, name), name.endswith("_"), self._to, self._back)


class _OpOnDevice:
    """An op of ``OnDevice``, or one of its overloads."""

    def __init__(self, op: Callable, changes: bool, to: Callable, back: Callable) -> None:
        self._op, self._changes, self._to, self._back = op, changes, to, back

    def __getattr__(self, overload: str) -> _OpOnDevice:
        return _OpOnDevice(getattr(self._op, overload), self._changes, self._to, self._back)

    def __call__(self, *args, **kwargs):
        given = (args, kwargs)
        there = tree_map_only(Tensor, lambda x: moved(x, self._to), given)
        result = self._op(*there[0], **there[1])
        for mine, other in zip(tree_leaves(given), tree_leaves(there), strict=True):
            if self._changes and isinstance(mine, Tensor):
                mine.copy_(other)
        return tree_map_only(Tensor, self._back, result)


class OnCuda(OnDevice):
    """torch.ops.rec_kernels on the GPU, for CPU tensors; ``place`` is applied to the copies."""

    def __init__(self, place: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__(torch.ops.rec_kernels, lambda x: place(x.cuda()), lambda x: x.cpu())
