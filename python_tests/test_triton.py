"""Triton in subprocesses: the interpreter, the compilers, and the effects of importing rec_kernels."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from backends import PASSED, ROOT
from tiers import fewer, full

from rec_kernels import ROW_FORMATS, _triton_versions

pytest.importorskip("triton")

INTEGER_ROWS = {"long_row_kernel", *(f"tile_kernel-{format}" for format in ("int8", "int4", "int2"))}
PRODUCTS = {f"{kernel}-tf32x3-fp32" for kernel in ("product_kernel", "weight_gradient_kernel")}
INTERACTIONS = {
    f"{kernel}-{kind}"
    for kernel in ("interaction_kernel", "interaction_gradient_kernel")
    for kind in ("tf32x3-fp32", "tf32-fp32", "ieee-fp16", "ieee-bf16")
}
FACTORIZATIONS = {
    f"{kernel}-{kind}"
    for kernel in (
        *("factorization_kernel", "factorization_gradients_kernel"),
        *("factorization_x_gradient_kernel", "factorization_y_gradient_kernel"),
    )
    for kind in ("tf32x3-fp32", "tf32-fp32", "tf32-fp16", "tf32-bf16")
}
NVIDIA, AMD = ("sm_80", "sm_90", "sm_100"), "gfx942"
#: Bytes of shared memory per program on every NVIDIA GPU from 8.0 on: 8.6, 8.9 and 12.0 have the least.
SHARED_BYTES = 99 * 1024
#: The oldest supported Triton, of torch 2.10 and 2.11; `make test-all` installs it beside the environment.
OLDEST = "3.6.0"
FAKE_QUANTIZE = INTEGER_ROWS | {f"tile_kernel-{format}" for format in ROW_FORMATS}


def run(*arguments: str, interpret: bool = False, before: Path | None = None) -> str:
    """Output of a Python process, which must succeed. Packages in the folder ``before`` have precedence."""
    path = os.pathsep.join(str(folder) for folder in (ROOT, before, os.environ.get("PYTHONPATH")) if folder)
    environment = os.environ | {"TRITON_INTERPRET": str(int(interpret)), "PYTHONPATH": path}
    done = subprocess.run([sys.executable, *arguments], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    return done.stdout


#: The fewest comparisons of each test_<op>_triton.py, in either tier.
COMPARISONS = {
    "dot_interaction": 50,
    "embedding_bag": 50,
    "embedding_bag_options": 25,
    "expand": 30,
    "factorization_machine": 40,
    "fake_quantize": 100,
    "grouped_projection": 30,
    "products": 30,
}
COUNT_PER_FILE = """
import collections, pytest, sys
found = collections.Counter()
class PerFile:
    def pytest_runtest_teardown(self, item):
        from backends import PASSED
        found[item.path.stem] += PASSED["triton"] - found.total()
status = pytest.main(sys.argv[1:], plugins=[PerFile()])
print(*(f"compared: {name} {count}" for name, count in found.items()), sep="\\n")
sys.exit(status)
"""


@pytest.mark.parametrize("tier", [fewer("not full"), *full("not fewer")])
def test_kernels_in_the_interpreter(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test_<op>_triton.py passes on CPU tensors, in one process per tier; their comparisons count here."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    try:
        _triton_versions.check(importlib.metadata.version("triton"))
    except _triton_versions.UnsupportedTritonError as error:
        pytest.skip(str(error))
    files = [f"python_tests/test_{op}_triton.py" for op in COMPARISONS]
    printed = run("-c", COUNT_PER_FILE, "-q", "-p", "no:cacheprovider", "-m", tier, *files, interpret=True)
    counted = re.findall(r"^compared: test_(\w+)_triton (\d+)$", printed, re.MULTILINE)
    found = {op: int(comparisons) for op, comparisons in counted}
    PASSED["triton"] += sum(found.values())
    assert found
    assert not re.search(r"\b\d+ skipped", printed)
    assert {op: n for op, n in COMPARISONS.items() if found.get(op, 0) < n} == {}


def installed_beside(version: str) -> Path | None:
    """The folder of a Triton version; None for the installed one."""
    if version in ("installed", importlib.metadata.version("triton")):
        return None
    folder = Path(sys.prefix) / f"triton-{version}"
    if not folder.exists():
        pytest.skip(f"Triton {version} is not in {folder}: `make test-all` installs it where a wheel is found")
    return folder


@pytest.fixture(scope="module", params=["installed", OLDEST])
def compiled(request: pytest.FixtureRequest) -> dict[tuple[str, str], list[int]]:
    """Sums of compile_triton.py's counts per target and kernel, for two Triton versions; maximum shared memory last.

    Triton caches compiled kernels in build/, by their source, their options and its own files.
    """
    folder = installed_beside(request.param)
    counts: dict[tuple[str, str], list[int]] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(ROOT / "build" / "triton-cache"))
        version, *lines = run("python_tests/compile_triton.py", before=folder).splitlines()
    assert version == f"triton {importlib.metadata.version('triton') if folder is None else request.param}"
    for line in lines:
        target, kernel, *numbers, shared = line.split()
        *before, most = counts.get((target, kernel), [0] * (len(numbers) + 1))
        sums = [a + int(b) for a, b in zip(before, numbers, strict=True)]
        counts[target, kernel] = [*sums, max(most, int(shared))]
    # compile_triton.architectures: some products on all NVIDIA GPUs, other kernels on one; AMD only with the newest.
    kernels = {kernel for target, kernel in counts if target == "sm_90"}
    everywhere = {kernel for kernel in kernels if kernel.endswith(("-tf32x3-fp32", "-fp16"))} - FAKE_QUANTIZE
    common = ("sm_90",) if version == f"triton {OLDEST}" else ("sm_90", AMD)
    assert counts.keys() == {(t, k) for t in common for k in kernels} | {(t, k) for t in NVIDIA for k in everywhere}
    return counts


@pytest.mark.full
def test_kernels_compile(compiled: dict[tuple[str, str], list[int]]) -> None:
    """Kernels compile for NVIDIA and AMD GPUs; NVIDIA's neither fuse nor divide inexactly, and round to nearest."""
    targets = [target for target in ("sm_90", AMD) if (target, "start_kernel") in compiled]
    counts = {k: v for k, v in compiled.items() if k[1] not in FAKE_QUANTIZE | PRODUCTS | INTERACTIONS | FACTORIZATIONS}
    kernels = ["start", "pool", "factor_gradient", "occurrences", "finish_rows", "advance_step", "expand"]
    assert counts.keys() == {(target, f"{kernel}_kernel") for target in targets for kernel in kernels}
    assert all(fused == 0 and inexact == 0 for fused, _, _, inexact, *_ in counts.values())
    divides = {(target, kernel) for (target, kernel), (_, divisions, *_) in counts.items() if divisions}
    dividing = [f"{kernel}_kernel" for kernel in ("pool", "factor_gradient", "occurrences", "finish_rows")]
    assert divides == {("sm_90", kernel) for kernel in dividing}
    assert counts["sm_90", "finish_rows_kernel"][2] > 0


@pytest.mark.full
def test_shared_memory(compiled: dict[tuple[str, str], list[int]]) -> None:
    """Programs fit into the shared memory of every NVIDIA GPU; otherwise launches would fail there."""
    taken = {key: shared for key, (*_, shared) in compiled.items() if key[0] in NVIDIA}
    assert max(taken.values()) > 48 * 1024
    assert {key: shared for key, shared in taken.items() if shared > SHARED_BYTES} == {}


def nvidia_counts(compiled: dict[tuple[str, str], list[int]], kernels: set[str]) -> list[tuple[str, list[int]]]:
    """Yields each kernel with its counts, for NVIDIA's architectures."""
    assert {kernel for target, kernel in compiled if target == "sm_90"} >= kernels
    return [
        (kernel, compiled[target, kernel]) for target in NVIDIA for kernel in kernels if (target, kernel) in compiled
    ]


@pytest.mark.full
def test_fake_quantize_compiles(compiled: dict[tuple[str, str], list[int]]) -> None:
    """Every format compiles: only integer rows have divisions and fused operations; denormals are not flushed."""
    for kernel, (fused, divisions, _, inexact, *_) in nvidia_counts(compiled, FAKE_QUANTIZE):
        has_grid = kernel in INTEGER_ROWS
        assert (fused > 0, divisions > 0, inexact) == (has_grid, has_grid, 0), kernel


@pytest.mark.full
def test_products_compile(compiled: dict[tuple[str, str], list[int]]) -> None:
    """On NVIDIA GPUs, tiles are multiplied by tensor cores in three passes, and by nothing else."""
    for kernel, (fused, divisions, _, _, products, halves, _) in nvidia_counts(compiled, PRODUCTS):
        assert (fused, divisions, halves) == (0, 0, 0), kernel
        assert products > 0
        assert products % 3 == 0


@pytest.mark.full
def test_interactions_compile(compiled: dict[tuple[str, str], list[int]]) -> None:
    """On NVIDIA GPUs, tiles are multiplied by tensor cores: float32 in one TF32 pass or three, halves as they are."""
    for kernel, (_, _, _, inexact, tf32, halves, _) in nvidia_counts(compiled, INTERACTIONS):
        assert (tf32 > 0, halves > 0) == ("tf32" in kernel, "16" in kernel), kernel
        assert inexact == 0, kernel
        assert tf32 % 3 == 0 or "tf32x3" not in kernel, kernel


@pytest.mark.full
def test_factorizations_compile(compiled: dict[tuple[str, str], list[int]]) -> None:
    """On NVIDIA GPUs, all products are TF32's, in three passes for float32."""
    for kernel, (fused, _, _, inexact, tf32, halves, _) in nvidia_counts(compiled, FACTORIZATIONS):
        assert (fused, tf32 > 0, halves, inexact) == (0, True, 0, 0), kernel
        assert tf32 % 3 == 0 or "tf32x3" not in kernel, kernel


@pytest.mark.skipif(torch.version.cuda is not None, reason="the compiled library may be in use")
@pytest.mark.parametrize("gpu", [False, True])
def test_import_registers_where_it_must(gpu: bool) -> None:
    """Kernels are registered for CUDA only with a GPU and without the compiled library. Triton is never imported."""
    code = (
        f"import sys, torch; torch.cuda.is_available = lambda: {gpu}; import rec_kernels\n"
        "ops = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith('rec_kernels::embedding_bag')]\n"
        "has = torch._C._dispatch_has_kernel_for_dispatch_key\n"
        "print('triton' in sys.modules, len(ops), {has(op, 'CUDA') for op in ops})\n"
        "print(rec_kernels.build_info()['triton_in_use'])"
    )
    assert run("-c", code).split() == ["False", "11", f"{{{gpu}}}", str(gpu)]


@pytest.mark.filterwarnings("ignore:.*[Oo]verrid")
def test_old_versions_are_refused_in_use() -> None:
    """rec_kernels can be imported; each op with a Triton kernel raises with the reason, and build_info reports none."""
    code = """
import torch, triton
torch.cuda.is_available = lambda: True
triton.__version__ = "3.5.1"
import rec_kernels as rk
from rec_kernels import _triton_versions
from rec_kernels.ops import in_triton
library = torch.library.Library("rec_kernels", "IMPL")
in_triton.register_stand_ins(library, "CPU")
library.impl("fake_quantize", in_triton._kernel("fake_quantize", "fake_quantize"), "CPU")
one, first = torch.ones(1, 16), torch.tensor([0])
calls = [(rk.embedding_bag, first, one, first), (rk.expand, one, first), (rk.fake_quantize, one, "int8")]
for op, *arguments in calls:
    try:
        op(*arguments)
    except ImportError as error:
        print(error)
_triton_versions.installed = lambda: "3.5.1"
print(rk.build_info()["triton_in_use"])
"""
    *errors, in_use = run("-W", "ignore", "-c", code).splitlines()
    assert len(errors) == 3
    assert all("need Triton 3.6 to 3.9, found Triton 3.5.1: install" in error for error in errors)
    assert in_use == "False"
