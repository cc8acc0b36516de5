"""Triton, each time in a process of its own: the interpreter, the compilers, and what importing rec_kernels does."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch
from backends import PASSED, ROOT

pytest.importorskip("triton")


def run(*arguments: str, interpret: bool = False) -> str:
    """What a Python process prints; it must succeed."""
    environment = os.environ | {"TRITON_INTERPRET": str(int(interpret)), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *arguments], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    return done.stdout


def test_kernels_in_the_interpreter() -> None:
    """test_embedding_bag_triton.py, on CPU tensors; its comparisons count here."""
    tests = "python_tests/test_embedding_bag_triton.py"
    printed = run("-m", "pytest", "-q", "-p", "no:cacheprovider", tests, interpret=True)
    passed = int(re.search(r"triton ([\d,]+)", printed)[1].replace(",", ""))
    assert passed > 200
    assert "skipped" not in printed
    PASSED["triton"] += passed


def test_kernels_compile(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For an NVIDIA and an AMD GPU; for NVIDIA, nothing is fused or divided inexactly, and rows round to nearest."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    counts: dict[tuple[str, str], list[int]] = {}
    for line in run("python_tests/compile_triton.py").splitlines():
        target, kernel, *numbers = line.split()
        before = counts.get((target, kernel), [0, 0, 0])
        counts[target, kernel] = [a + int(b) for a, b in zip(before, numbers, strict=True)]
    kernels = ["start", "pool", "factor_gradient", "occurrences", "finish_rows", "advance_step"]
    assert counts.keys() == {(target, f"{kernel}_kernel") for target in ("cuda", "hip") for kernel in kernels}
    assert all(fused == 0 for fused, _, _ in counts.values())
    divides = {kernel for (target, kernel), (_, divisions, _) in counts.items() if divisions}
    assert divides == {f"{kernel}_kernel" for kernel in ("pool", "factor_gradient", "occurrences", "finish_rows")}
    assert counts["cuda", "finish_rows_kernel"][2] > 0


@pytest.mark.skipif(torch.version.cuda is not None, reason="the compiled library may be in use")
@pytest.mark.parametrize("gpu", [False, True])
def test_import_registers_where_it_must(gpu: bool) -> None:
    """Not without a GPU, where the kernels are not even imported; with one and no compiled library, for CUDA."""
    code = (
        f"import sys, torch; torch.cuda.is_available = lambda: {gpu}; import rec_kernels\n"
        "ops = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith('rec_kernels::embedding_bag')]\n"
        "has = torch._C._dispatch_has_kernel_for_dispatch_key\n"
        "print('rec_kernels.triton' in sys.modules, len(ops), {has(op, 'CUDA') for op in ops})\n"
        "print(rec_kernels.build_info()['triton_in_use'])"
    )
    assert run("-c", code).split() == [str(gpu), "7", f"{{{gpu}}}", str(gpu)]
