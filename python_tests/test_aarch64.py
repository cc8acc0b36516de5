"""CPU kernels compiled for aarch64 (NEON) and run on an emulated processor have this machine's bits."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import rec_kernels as rk

ROOT = Path(__file__).resolve().parent.parent
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
# Flags of CMakeLists.txt.
FLAGS = ["-std=c++17", "-O2", "-ffp-contract=off", "-fno-math-errno", "-DRK_ISA=baseline", f"-I{ROOT / 'csrc'}"]
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-maybe-uninitialized", "-Wno-uninitialized"]
CALLED = ("row_formats", "scale_rows", "dot_interaction", "factorization_machine")
KERNELS = sorted((ROOT / "csrc").glob("*/cpu/*_kernels.cpp"))
MISSING = [tool for tool in (COMPILER, EMULATOR) if shutil.which(tool) is None]

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not KERNELS, reason="the sources are not beside the tests"),
    pytest.mark.skipif(bool(MISSING), reason=f"{MISSING} missing (Debian: g++-aarch64-linux-gnu, qemu-user)"),
]


def compile_kernel(source: Path, folder: Path) -> Path:
    """Compiles a file of kernels, and returns the object."""
    target = folder / f"{source.stem}.o"
    subprocess.run([COMPILER, *FLAGS, *WARNINGS, "-c", source, "-o", target], check=True)
    return target


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program that calls the kernels."""
    folder = tmp_path_factory.mktemp("aarch64")
    objects = [compile_kernel(path, folder) for path in KERNELS if path.name.removesuffix("_kernels.cpp") in CALLED]
    source = Path(__file__).with_name("aarch64_kernels.cpp")
    subprocess.run([COMPILER, *FLAGS, *WARNINGS, "-static", source, *objects, "-o", folder / "program"], check=True)
    return folder / "program"


def sample(rows: int, columns: int) -> Tensor:
    """Rows of many magnitudes, with zeros, denormals and steps between a format's codes."""
    generator = torch.Generator().manual_seed(columns)
    x = torch.randn(rows, columns, generator=generator) * torch.logspace(-12, 4, rows)[:, None]
    x[1], x[2, ::3], x[3] = 0.0, -0.0, x[3].round()
    x[4] *= 1e-30
    return x


class Output:
    """Reads the program's output, in its order."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def take(self, like: Tensor, name: str) -> None:
        """Compares the next bytes with a tensor."""
        expected = like.detach().contiguous().numpy().tobytes()
        found, self.data = self.data[: len(expected)], self.data[len(expected) :]
        assert found == expected, f"{name} differs"


def run(program: Path, x: Tensor) -> Output:
    """The program's output for rows x."""
    sizes = np.array([*x.shape, *(rk.row_bytes(name, x.shape[1]) for name in rk.ROW_FORMATS)], np.int64)
    given = sizes.tobytes() + x.numpy().tobytes()
    return Output(subprocess.run([EMULATOR, program], input=given, capture_output=True, check=True).stdout)


@pytest.mark.parametrize("columns", [1, 5, 16, 33, 64, 130])
def test_bits(program: Path, columns: int) -> None:
    """Rows of every format, rounding and scale rule, and the interaction ops with gradients, have equal bits."""
    x = sample(23, columns)
    out = run(program, x)
    for name in rk.ROW_FORMATS:
        for rule in ("floor", "rceil"):
            for rounding in ("nearest", "stochastic"):
                noise = {"seed": 42, "step": 9, "table": 3, "first_row": 7} if rounding == "stochastic" else {}
                rows = rk.quantize_rows(x, name, rounding=rounding, scale_rule=rule, **noise)
                out.take(rows, f"{name}, {rounding}, {rule}")
                out.take(rk.dequantize_rows(rows, name, columns), f"decoded {name}")
    scaled = rk.scale_rows(x, x.flatten()[: len(x)])
    out.take(scaled, "scale_rows")
    out.take(torch.ops.rec_kernels.row_dot(x, scaled), "row_dot")
    check_interactions(out, x)
    check_factorizations(out, x)
    assert out.data == b""


def windows(x: Tensor) -> Tensor:
    """Overlapping samples of three rows; sample n begins at row n."""
    return torch.stack([x[n : n + 3] for n in range(len(x) - 2)]).requires_grad_()


def check_interactions(out: Output, x: Tensor) -> None:
    """Checks dot_interaction, and its gradients at its own result."""
    dense, sparse = x[:-2].clone().requires_grad_(), windows(x)
    result = rk.dot_interaction(dense, sparse)
    result.backward(result.detach())
    out.take(result, "dot_interaction")
    out.take(dense.grad, "its gradient of dense")
    out.take(sparse.grad, "its gradient of sparse")


def check_factorizations(out: Output, x: Tensor) -> None:
    """Checks factorization_machine, and its gradients at its own result."""
    rows, factors = windows(x), x.flatten()[:6].reshape(1, 3, 2).repeat(len(x) - 2, 1, 1).requires_grad_()
    result = rk.factorization_machine(rows, factors)
    result.backward(result.detach())
    out.take(result, "factorization_machine")
    out.take(rows.grad, "its gradient of x")
    out.take(factors.grad, "its gradient of y")


@pytest.mark.parametrize("source", [p for p in KERNELS if p.name.removesuffix("_kernels.cpp") not in CALLED], ids=str)
def test_compiles(source: Path, tmp_path: Path) -> None:
    """The other kernels compile without warnings."""
    compile_kernel(source, tmp_path)
