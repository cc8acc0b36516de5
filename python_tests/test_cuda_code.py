"""The machine code of CUDA kernels, read with cuobjdump: no spills, 16-byte accesses, several rows in flight.

No GPU is needed.
"""

from __future__ import annotations

import re

import pytest

import rec_kernels as rk
from bench.gpu import code_paths, machine_code

LIBRARY = rk.build_info()["cuda_library"]
MAIN = "pool|pool_composed|sum_products|finish"  # kernels of rows of any width


MISSING = machine_code.missing()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


def dump(what: str) -> str:
    text = machine_code.dump(what, LIBRARY)
    if "Function" not in text:
        pytest.skip(f"the library was not built for {machine_code.ARCHITECTURE}")
    return text


def kernel(function: str) -> str | None:
    """Name, subject and widths of a kernel, from its mangled name: "pool_kernel Affine8 32 1"."""
    match = re.search(r"11rec_kernels.*?\d+([a-z_]+_kernel)(?:I(.*))?", function)
    if not match:
        return None
    name, arguments = match[1], match[2] or ""
    widths = (
        re.search(r"Li(\d+)ELi(\d+)E(?=Lb|NS|$|E)", arguments) if name.startswith(("pool", "finish", "sum")) else None
    )
    targets = "(?:Encoded|Update|Stored)Target|HalfGradients"
    subject = re.search(rf"\d+(?:(Fp32|Fp16|Bf16|{targets})|(Affine|SharedMicroexponents)ILi(\d))", arguments)
    parts = (name, "".join(subject.groups("")) if subject else None, *(widths.groups() if widths else ()))
    return " ".join(part for part in parts if part)


@pytest.fixture(scope="module")
def usage() -> dict[str, str]:
    """Registers, stack and local memory in bytes, by mangled name: "REG:72 STACK:0 ..."."""
    return dict(re.findall(r"Function (\S+):\s+(REG:.*)", dump("-res-usage")))


@pytest.fixture(scope="module")
def resources(usage) -> list[tuple[str, dict[str, int]]]:
    """(kernel, its registers, stack and local memory in bytes)."""
    usage = [(kernel(name), dict(re.findall(r"(\w+):(\d+)", text))) for name, text in usage.items()]
    return [(name, {key: int(value) for key, value in numbers.items()}) for name, numbers in usage if name]


def test_no_main_kernel_spills(resources) -> None:
    """Kernels of up to 128 columns have no stack or local memory, and two blocks of 256 threads are resident."""
    widths = r"(\d+ 1|(4|8|16) 2|8 4)"
    main = [(name, numbers) for name, numbers in resources if re.match(rf"({MAIN})_kernel \w+ {widths}$", name)]
    assert len(main) >= 4 * (2 * 8 + 4)
    assert {"EncodedTarget", "UpdateTarget", "StoredTarget", "HalfGradients"} <= {name.split()[1] for name, _ in main}
    for name, numbers in main:
        assert numbers["STACK"] == 0, name
        assert numbers["LOCAL"] == 0, name
        assert numbers["REG"] <= 128, name
    assert max(numbers["LOCAL"] for _, numbers in resources) == 0


@pytest.fixture(scope="module")
def functions() -> list[tuple[str, str]]:
    """(mangled name, code) of every function."""
    parts = re.split(r"\n[ \t]*Function : (\S+)\n", dump("-sass"))  # \s+ would match every blank of 400 MB
    return list(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.full
def test_rows_move_sixteen_bytes_at_a_time(functions) -> None:
    """Each row in flight is one 16-byte load per lane and column block, as is each store."""
    checked, subjects = 0, set()
    for function, code in functions:
        floats = "Fp32|UpdateTarget|StoredTarget"
        match = re.match(rf"({MAIN})_kernel ({floats}) (\d+) (\d+)$", kernel(function) or "")
        if not match:
            continue
        checked += 1
        subjects.add(match[2])
        blocks = int(match[4])
        pooled = 2 if blocks == 4 else 4
        in_flight = {"sum_products": 2 * 4 // blocks}
        loads = in_flight.get(match[1], pooled) * blocks
        assert len(re.findall(r"\bLDG\.E\.(?:\w+\.)*128", code)) >= loads, function
        assert len(re.findall(r"\bSTG\.E\.(?:\w+\.)*128", code)) >= blocks, function
    assert checked >= 35
    assert subjects == {"Fp32", "UpdateTarget", "StoredTarget"}


def max_loads_in_flight(code: str) -> int:
    """The maximum number of consecutive loads before an instruction reads a loaded register."""
    most = count = 0
    coming: set[int] = set()
    for instruction in re.findall(r"^\s+/\*[0-9a-f]{4,6}\*/\s+(.*?);", code, re.MULTILINE):
        sources = {int(number) for number in re.findall(r"\bR(\d+)\b", instruction.partition(",")[2])}
        if coming & sources:
            coming, count = set(), 0
        load = re.search(r"\bLDG\.E\.?(\S*) R(\d+),", instruction)
        if load:
            words = 4 if "128" in load[1] else 2 if "64" in load[1] else 1
            coming |= set(range(int(load[2]), int(load[2]) + words))
            count += 1
            most = max(most, count)
    return most


@pytest.mark.full
def test_several_encoded_rows_are_on_their_way(functions) -> None:
    """A lane issues the loads of all its rows in flight except one before it decodes the first."""
    row = {"Fp16": (1, 0), "Bf16": (1, 0), "Affine8": (1, 1), "Affine4": (1, 2)}  # loads of four columns, and of a row
    row |= {"SharedMicroexponents7": (3, 0), "SharedMicroexponents4": (4, 0), "SharedMicroexponents2": (4, 0)}
    checked = 0
    for function, code in functions:
        match = re.match(r"(pool|pool_composed|pool_cached)_kernel (\w+) (\d+) (\d+)$", kernel(function) or "")
        if not match or match[2] not in row or (match[1] == "pool_cached" and match[4] == "4"):
            continue
        checked += 1
        columns, grid = row[match[2]]
        loads = columns * int(match[4]) + grid
        if match[2].startswith("Shared") and match[4] == "2":
            loads = 4  # of eight neighbouring columns
        rows = 2 if match[1] == "pool_cached" or match[4] == "4" else 4
        assert max_loads_in_flight(code) >= max((rows - 1) * loads, loads + 1), function
        assert not re.search(r"\bLD\.E", code), function  # generic addresses
    assert checked >= 4 * 11 + 3 * 7 + 7 * (3 + 2)


# pool_kernel<FORMAT, 32, column blocks, weighted> with one, two and four blocks of 128 columns, or 16 lanes with two:
# the most instructions per round of rows, the fewest resident blocks, and bytes per lane before the first wait. Some
# formats have no kernel for bags without weights (kAlwaysWeighted in pool_table.cu).
HALF_THE_LANES = (
    "Affine<8>",
    "Affine<4>",
    "SharedMicroexponents<7>",
    "SharedMicroexponents<4>",
    "SharedMicroexponents<2>",
)
LOOKUPS = {
    ("Fp32", "false"): ((50, 4, 64), (78, 3, 128), (80, 2, 128)),
    ("Fp32", "true"): ((54, 3, 64), (76, 2, 128), (82, 2, 128)),
    ("Fp16", "false"): ((156, 4, 64), (142, 4, 64)),
    ("Fp16", "true"): ((164, 4, 64), (146, 4, 64), (262, 2, 128)),
    ("Bf16", "false"): ((126, 4, 64), (112, 4, 64)),
    ("Bf16", "true"): ((134, 4, 64), (116, 4, 64), (206, 2, 128)),
    ("Affine<8>", "false"): ((210, 4, 64), (208, 4, 64)),
    ("Affine<8>", "true"): ((214, 3, 64), (212, 3, 64), (398, 2, 96)),
    ("Affine<4>", "false"): ((219, 4, 32), (216, 4, 32)),
    ("Affine<4>", "true"): ((223, 3, 32), (220, 3, 32), (406, 2, 48)),
    ("SharedMicroexponents<7>", "true"): ((364, 3, 40), (359, 3, 40), (500, 2, 48)),
    ("SharedMicroexponents<4>", "true"): ((378, 3, 28), (375, 3, 28), (558, 2, 40)),
    ("SharedMicroexponents<2>", "true"): ((378, 3, 20), (375, 3, 20), (574, 2, 32)),
}
# pool_short_kernel<FORMAT, 32, weighted>: the most instructions for four bags of one id each.
SHORT_BAGS = {
    ("Fp32", "false"): 421,
    ("Fp32", "true"): 439,
    ("Fp16", "false"): 456,
    ("Fp16", "true"): 463,
    ("Bf16", "false"): 442,
    ("Bf16", "true"): 448,
}
# Updates, or gradients, of rows that a lane group sums: the fewest resident blocks, by kernel without its format.
# Elementwise updates of 257 or more columns are not listed: one block, and 64 bytes of stack.
UPDATES = {
    r"<4, 1, StoredTarget>": 4,
    r"<4, 1, UpdateTarget>": 3,
    r"<[48], 2, (StoredTarget|UpdateTarget)>": 2,
    r"<(8|16|32), 4, (StoredTarget|UpdateTarget)>": 2,
    r"<(8|32), 1, (EncodedTarget<.*>|HalfGradients)>": 3,
    r"<32, 4, (EncodedTarget<.*>|HalfGradients)>": 2,
    r"<4, 1, ElementwiseTarget<UpdateTarget>>": 2,
    r"<(4|8|16|32), 2, ElementwiseTarget<UpdateTarget>>": 2,
    r"<(8|32), 1, ElementwiseTarget<EncodedTarget<.*>>>": 2,
    r"<(8|32), 1, ElementwiseTarget<EncodedTarget<(Fp16|Bf16)>>>": 3,
}


@pytest.mark.full
def test_lookups_stay_as_fast_as_they_were(functions, usage) -> None:
    """Lookups stay within their limits; a change that exceeds one updates this table and docs/gpu-results.md."""
    pattern = re.compile(r"11pool_kernel.*(Li32ELi[124]|Li16ELi2)ELb")
    kernels = [machine_code.compiled(s, usage[s], code) for s, code in functions if pattern.search(s)]
    for (format, weighted), widths in LOOKUPS.items():
        narrow = "16, 2" if format in HALF_THE_LANES else "32, 1"
        for columns, (instructions, blocks, waited) in zip((narrow, "32, 2", "32, 4"), widths, strict=False):
            k = machine_code.find(kernels, f"pool_kernel<{format}, {columns}, {weighted}>")
            assert k.loop.instructions <= instructions, k
            assert k.blocks >= blocks, k
            assert k.loop.first_wait_bytes >= waited, k


def test_no_lookup_spills(usage) -> None:
    """Neither lookups nor the gradient of per_sample_weights, with as many rows in flight, spill."""
    pattern = re.compile(r"\d(pool_\w*|(composed_)?weight_gradient_)kernel")
    kernels = [machine_code.compiled(s, text, "") for s, text in usage.items() if pattern.search(s)]
    assert len(kernels) >= 12 + 4 * 11 + 3 * 7 + 3 * 4 * 2 + 2 * (6 + 7 * 3) + 2
    for k in kernels:
        assert k.stack == 0, k


@pytest.mark.full
def test_short_bags_are_taken_together(functions, usage) -> None:
    """Four rows of 16 or 8 bytes per lane are loaded in a round, and three blocks are resident, for every width."""
    found = {}
    for symbol, code in functions:
        if "17pool_short_kernel" in symbol:
            k = machine_code.compiled(symbol, usage[symbol], code)
            assert (k.stack, k.spills) == (0, 0), k
            assert k.registers <= 80, k
            assert k.blocks >= 3, k
            instructions = machine_code.instructions_of(code)
            found[k.name] = code_paths.paths_of(k.name, k.registers, k.shared, instructions)
    assert len(found) == len(SHORT_BAGS) * len((4, 8, 16, 32))
    for (format, weighted), ceiling in SHORT_BAGS.items():
        paths = found[f"pool_short_kernel<{format}, 32, {weighted}>"]
        assert paths.rows == 4, paths
        assert paths.before + paths.round + paths.after <= ceiling, paths


def test_updates_share_a_multiprocessor(usage) -> None:
    checked = set()
    for symbol, text in usage.items():
        if "13finish_kernel" not in symbol:
            continue
        k = machine_code.compiled(symbol, text, "")
        for pattern, blocks in UPDATES.items():
            if re.fullmatch("finish_kernel" + pattern, k.name):
                checked.add(pattern)
                assert k.blocks >= blocks, k
                assert k.stack == 0, k
    assert checked == set(UPDATES)


# Kernels with groups of lanes in step (Pace of csrc/core/cuda/group.cuh).
IN_STEP = (
    "pool_kernel",
    "pool_short_kernel",
    "pool_cached_kernel",
    "finish_kernel",
    "sum_chunks_kernel",
    "sum_chunk_sums_kernel",
    "quantize_kernel",
    "row_dot_kernel",
)


@pytest.mark.full
def test_groups_in_step_know_who_is_there(functions) -> None:
    """Kernels with groups in step exchange values without MATCH instructions."""
    seen = set()
    for symbol, code in functions:
        name = (machine_code.kernel_name(symbol) or "").partition("<")[0]
        if name in IN_STEP:
            seen.add(name)
            assert "MATCH." not in code, symbol
    assert seen == set(IN_STEP)


# Updates of a row with one gradient: the most instructions before its second gradient and after it, and those of the
# common search of several rows. A warp has four rows of 128 columns at once, two with elementwise state, eight of 16
# columns.
UPDATE_PATHS = {
    "finish_kernel<8, 4, UpdateTarget>": (382, 87),
    "finish_kernel<4, 1, UpdateTarget>": (283, 88),
    "finish_kernel<16, 2, ElementwiseTarget<UpdateTarget>>": (423, 87),
}


@pytest.mark.full
def test_updates_look_up_several_rows_together(functions, usage) -> None:
    """A group of lanes searches several runs together before it sums the first."""
    checked = set()
    for symbol, code in functions:
        name = machine_code.kernel_name(symbol) if "13finish_kernel" in symbol else None
        if name not in UPDATE_PATHS:
            continue
        checked.add(name)
        k = machine_code.compiled(symbol, usage[symbol], "")
        paths = code_paths.paths_of(name, k.registers, k.shared, machine_code.instructions_of(code))
        alone, together = UPDATE_PATHS[name]
        assert paths.before + paths.after <= alone, paths
        assert 0 < paths.ahead <= together, paths
    assert checked == set(UPDATE_PATHS)
