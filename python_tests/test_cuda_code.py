"""The compiled CUDA kernels, read with cuobjdump: no spills, 16-byte loads and stores. No GPU is needed."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import rec_kernels as rk

LIBRARY = rk.build_info()["cuda_library"]
ARCHITECTURE = "sm_90"
MAIN = "pool|pool_composed|sum_products|finish_short"  # kernels of rows of any width


def cuobjdump() -> str | None:
    """The CUDA toolkit's, or the one that the triton package carries."""
    found = shutil.which("cuobjdump")
    spec = importlib.util.find_spec("triton")
    if found or spec is None:
        return found
    carried = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return str(carried) if carried.exists() else None


pytestmark = [
    pytest.mark.skipif(LIBRARY is None, reason="the CUDA library is not built"),
    pytest.mark.skipif(cuobjdump() is None, reason="no cuobjdump"),
]


def dump(what: str) -> str:
    command = [cuobjdump(), "-arch", ARCHITECTURE, what, LIBRARY]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if "Function" not in text:
        pytest.skip(f"the library was not built for {ARCHITECTURE}")
    return text


def kernel(function: str) -> str | None:
    """A kernel of ours, what it works on and its widths, from its mangled name: "pool_kernel Fp32 32 1"."""
    match = re.search(r"11rec_kernels.*?\d+([a-z_]+_kernel)(?:I(.*))?", function)
    if not match:
        return None
    name, arguments = match[1], match[2] or ""
    widths = (
        re.search(r"Li(\d+)ELi(\d+)E(?=Lb|NS|$|E)", arguments) if name.startswith(("pool", "finish", "sum")) else None
    )
    subject = re.search(
        r"\d+(Fp32|Fp16|Bf16|Affine|SharedMicroexponents|(?:Encoded|Update|Dense|Sparse)Target)", arguments
    )
    parts = (name, subject and subject[1], *(widths.groups() if widths else ()))
    return " ".join(part for part in parts if part)


@pytest.fixture(scope="module")
def resources() -> list[tuple[str, dict[str, int]]]:
    """(kernel, its registers, stack and local memory in bytes)."""
    found = re.findall(r"Function (\S+):\s+(REG:.*)", dump("-res-usage"))
    usage = [(kernel(name), dict(re.findall(r"(\w+):(\d+)", text))) for name, text in found]
    return [(name, {key: int(value) for key, value in numbers.items()}) for name, numbers in usage if name]


def test_no_main_kernel_spills(resources) -> None:
    """Rows of up to 128 columns: nothing goes to local memory, and two blocks of 256 threads fit, at the least."""
    main = [(name, numbers) for name, numbers in resources if re.match(rf"({MAIN})_kernel \w+ \d+ 1$", name)]
    assert len(main) >= 4 * (2 * 8 + 4)
    for name, numbers in main:
        assert numbers["STACK"] == numbers["LOCAL"] == 0, name
        assert numbers["REG"] <= 128, name
    assert max(numbers["LOCAL"] for _, numbers in resources) == 0


def test_rows_move_sixteen_bytes_at_a_time() -> None:
    """Every row that a group has on its way is one 16-byte load per lane and block of columns; so is what it stores."""
    parts = re.split(r"\n[ \t]*Function : (\S+)\n", dump("-sass"))  # \s+ would try every blank of 400 MB
    checked = 0
    for function, code in zip(parts[1::2], parts[2::2], strict=True):
        floats = "Fp32|UpdateTarget|DenseTarget|SparseTarget"
        match = re.match(rf"({MAIN}|finish_long)_kernel ({floats}) (\d+) (\d+)$", kernel(function) or "")
        if not match:
            continue
        checked += 1
        blocks = int(match[4])
        pooled = 2 if blocks == 4 else 4
        in_flight = {"finish_short": 4, "finish_long": 1, "sum_products": 2 * 4 // blocks}
        loads = in_flight.get(match[1], pooled) * blocks
        assert len(re.findall(r"\bLDG\.E\.(?:\w+\.)*128", code)) >= loads, function
        assert len(re.findall(r"\bSTG\.E\.(?:\w+\.)*128", code)) >= blocks, function
    assert checked >= 40
