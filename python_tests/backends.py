"""The backends that compute the same bits: CPU kernels of every instruction set, CUDA kernels emulated, and on a GPU.

``cuda_emulated`` are the kernels of csrc/*/cuda compiled by the C++ compiler (csrc/emulator); the library is built when
a test first asks for it. Their threads take turns in ascending, descending and random order: races show as other bits.
A copy of the tests without csrc beside it, as wheels/compatibility.py makes, tests the installed kernels only.
`pytest --backends=cuda` leaves the other kinds out (conftest.py).
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
from asks import asks, read
from filelock import FileLock
from layout_calls import OPS, InLists
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

import rec_kernels as rk
from rec_kernels import testing
from rec_kernels._library import keep_value_errors

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "csrc"
BUILD = ROOT / "build" / "emulated"
#: The kinds of backends; those that run.
KINDS = ("cpu", "cuda_emulated", "cuda")
CHOSEN = set(KINDS)
#: Number of comparisons that each kind of backend has passed; the test summary prints them.
PASSED: collections.Counter[str] = collections.Counter()


class Backend(NamedTuple):
    """A device or emulator on which a case runs, and its ops, which take CPU tensors."""

    name: str
    ops: object

    @property
    def kind(self) -> str:
        """ "cpu", "cuda_emulated" or "cuda"."""
        return self.name.split(",")[0]


def every_backend() -> Iterator[Backend]:
    """Runs the loop body with every backend of this machine, which is in effect meanwhile."""
    yield from _counted(CPU, EMULATED, CUDA)


def cpu_backends() -> Iterator[Backend]:
    """Every instruction set, with several numbers of threads."""
    yield from _counted(CPU)


def host_backends() -> Iterator[Backend]:
    """Backends that work on the tensors they are given: for memory that is too large to be copied to a GPU."""
    yield from _counted(CPU, EMULATED)


def device_backends() -> Iterator[Backend]:
    """Backends of the CUDA kernels, emulated and on a GPU where there is one; without any, the test is skipped."""
    if not (SOURCES.exists() or torch.cuda.is_available()):
        pytest.skip("there are no CUDA kernels to run: neither csrc nor a GPU")
    yield from _counted(EMULATED, CUDA)


def choose(kinds: str) -> None:
    """Has only some kinds of backends run from now on.

    Args:
        kinds: their names, separated by commas.

    Raises:
        ValueError: no such kind; or only "cuda", and there is no GPU, or no CUDA library for it.
    """
    wanted = set(kinds.split(","))
    if not wanted <= set(KINDS):
        raise ValueError(f"--backends is {kinds!r}: {', '.join(KINDS)} are allowed, separated by commas")
    missing = rk.build_info()["cuda_unavailable"] or (
        None if torch.cuda.is_available() else "torch sees no CUDA device"
    )
    if wanted == {"cuda"} and missing:
        raise ValueError(f"--backends is 'cuda', but {missing}")
    CHOSEN.clear()
    CHOSEN.update(wanted)


def left_out(file: Path, test: str | None = None) -> bool:
    """True if a test of a file (None: if each) asks for none of the chosen kinds (asks.py): it is the CPU's."""
    if "cpu" in CHOSEN:
        return False
    return not any(asks(file, name, frozenset(CHOSEN)) for name in ([test] if test else read(file).tests))


def _counted(*runs: tuple[str, Callable[[], Iterator[Backend]]]) -> Iterator[Backend]:
    wanted = [run for kind, run in runs if kind in CHOSEN]
    if not wanted:
        pytest.skip(f"--backends leaves out {', '.join(kind for kind, _ in runs)}")
    for run in wanted:
        for backend in run():
            yield backend
            PASSED[backend.kind] += 1


def _is_sanitized() -> bool:
    """True in a process of sanitized libraries. Sanitizers look at addresses: of the CPU, those of the most pieces of
    work; of the emulator, one order of threads. Races, which need more of them, are other bits."""
    return "libasan" in os.environ.get("LD_PRELOAD", "")


def _cpu() -> Iterator[Backend]:
    # The number of threads decides on the pieces of work, and instruction sets compute each in other registers.
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
        yield Backend("cuda", InLists(OnCuda()))
        yield Backend("cuda, unaligned", InLists(OnCuda(unaligned)))


CPU, EMULATED, CUDA = zip(KINDS, (_cpu, _emulated, _cuda), strict=True)


def _skip_without(kind: str) -> None:
    if kind not in CHOSEN:
        pytest.skip(f"--backends leaves out {kind}")


def build(target: str, **options: str) -> Path:
    """Builds one of the emulator's libraries where it is not up to date; returns its path.

    Args:
        target: "rec_kernels_emulated" or "rec_kernels_emulated_asan".
        options: CMake definitions.
    """
    _skip_without("cuda_emulated")
    definitions = {"REC_KERNELS_EMULATE": "ON", "REC_KERNELS_TORCH": torch.__path__[0]} | options
    flags = [f"-D{name}={value}" for name, value in definitions.items()]
    # A folder and a lock each: who needs one library does not wait while another process builds the sanitized one.
    folder = BUILD / target
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        # cmake starts the ninja that it has found: another version of it would build everything again.
        build_it = ["cmake", "--build", folder, "--target", target]
        for command in (["cmake", "-G", "Ninja", "-S", ROOT, "-B", folder, *flags], build_it):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{target} cannot be built:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return folder / f"lib{target}.so"


def sanitized_environment() -> dict[str, str]:
    """The environment of a process that loads libraries built with AddressSanitizer.

    Raises:
        FileNotFoundError: the compiler has no such sanitizer.
    """
    compiler = os.environ.get("CXX", "c++")
    found = []
    for name in ("libasan.so", "libubsan.so"):
        done = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True)
        found.append(done.stdout.strip())
        if not Path(found[-1]).is_absolute():
            raise FileNotFoundError(f"{compiler} has no {name}")
    return os.environ | {"LD_PRELOAD": " ".join(found), "ASAN_OPTIONS": "detect_leaks=0"}


def emulated() -> InLists:
    """The ops of the emulated CUDA kernels: ``torch.ops.rec_kernels_emulated``, on CPU tensors."""
    _skip_without("cuda_emulated")
    return InLists(_load_emulated())


@functools.cache
def _load_emulated() -> object:
    # The sanitized library only loads into a process that has the sanitizers, as test_emulator.py starts one.
    library = Path(os.environ.get("REC_KERNELS_TEST_LIBRARY") or build("rec_kernels_emulated"))
    torch.ops.load_library(library)
    with suppress(ImportError):  # what the package does for its own library with torch 2.15; tested with any torch here
        keep_value_errors(library)
    return torch.ops.rec_kernels_emulated


def moved(x: Tensor, to: Callable[[Tensor], Tensor]) -> Tensor:
    """``x`` as ``to`` copies it, with its strides: ``to`` copies the memory from its first to its last element.

    ``Tensor.to`` and ``Tensor.clone`` make a tensor contiguous that has gaps, or one element in many places.
    """
    if x.is_contiguous():
        return to(x)
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return to(x.as_strided((span,), (1,))).as_strided(x.shape, x.stride())


def unaligned(x: Tensor) -> Tensor:
    """``x`` in new memory on its device, one element behind an aligned place, with its strides.

    Four, of flat bytes: they may be tables, of which some have rows of float32.
    """
    past = 4 if x.dtype == torch.uint8 and x.dim() == 1 else 1
    return moved(x, lambda flat: torch.cat([x.new_zeros(past), flat.flatten()])[past:].view(flat.shape))


class OnDevice:
    """``ops`` for CPU tensors: they are copied to the device, strides and all, and back what an op returns and changes.

    Args:
        ops: torch.ops.rec_kernels, or the emulated ones.
        to: copies a tensor to the device.
        back: copies one from there.
    """

    def __init__(self, ops: object, to: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> None:
        self._ops, self._to, self._back = ops, to, back

    def __getattr__(self, name: str) -> _OpOnDevice:
        return _OpOnDevice(getattr(self._ops, name), name.endswith("_"), self._to, self._back)


class _OpOnDevice:
    """An op, or the overloads of one, of ``OnDevice``."""

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
    """torch.ops.rec_kernels on the GPU, for CPU tensors; ``place``: ``unaligned``, or nothing to do there."""

    def __init__(self, place: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__(torch.ops.rec_kernels, lambda x: place(x.cuda()), lambda x: x.cpu())
