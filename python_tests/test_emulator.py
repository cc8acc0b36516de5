"""The emulator of CUDA kernels finds the documented errors, and the real kernels run clean under the sanitizers."""

import re
import subprocess
import sys

import pytest
import torch
from backends import ROOT, build, sanitized_environment

NONE, LANE_MISSING, OTHER_COLLECTIVE, LANE_NOT_IN_MASK, BARRIER_MISSED = range(5)
MISALIGNED, UNWRITTEN_SHARED, RACE, SHUFFLE_FOR_BARRIER, WRITE_OF_TWO_BLOCKS, WRITE_BESIDE_ATOMIC = range(5, 11)
RACE_WITHOUT_EXCUSE, OUTSIDE, OUTSIDE_SHARED, OTHER_STREAM, NO_GUARD = range(11, 16)


@pytest.fixture(scope="module")
def planted():
    torch.ops.load_library(build("rec_kernels_planted"))
    return torch.ops.rec_kernels_planted


@pytest.fixture(scope="module")
def asan() -> dict[str, str]:
    """The environment of a process that loads sanitized libraries."""
    return sanitized_environment()


def run(code: str, environment: dict[str, str]) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True)


def test_a_kernel_without_bugs(planted) -> None:
    x = torch.randn(65)
    for order in range(3):
        planted._set_order(order, 5)
        expected = x[:64][torch.arange(64) ^ 33 ^ 1]
        assert torch.equal(planted.planted(NONE, x), expected)
    planted._set_order(0, 0)


@pytest.mark.parametrize(
    ("bug", "message"),
    [
        (LANE_MISSING, "waits at __shfl_sync for lanes 0xffffffff, of which 0xffffff7f have arrived"),
        (OTHER_COLLECTIVE, "__ballot_sync while other lanes of the mask are at __shfl_sync"),
        (LANE_NOT_IN_MASK, "__shfl_sync with mask 0xffff0000, which excludes the calling lane"),
        (BARRIER_MISSED, "waits at __syncthreads, which 32 of 64 threads have reached"),
        (MISALIGNED, "access of 16 bytes at .* is not aligned"),
    ],
)
def test_forbidden_steps_are_named(bug: int, message: str, planted) -> None:
    """The error has the block, the thread and the operation; the next launch works."""
    with pytest.raises(RuntimeError, match=rf"block 0: thread \d+:? {message}"):
        planted.planted(bug, torch.randn(65))
    assert planted.planted(NONE, torch.randn(65)).isfinite().all()


@pytest.mark.parametrize(
    ("bug", "message"),
    [(OTHER_STREAM, "on a stream that is not torch's"), (NO_GUARD, "without an OnDeviceOf in scope")],
)
def test_launches_are_on_torchs_stream_and_device(bug: int, message: str, planted) -> None:
    """Such a kernel would run on a GPU too early or on another GPU; the next launch works."""
    with pytest.raises(RuntimeError, match=f"a kernel is launched {message}"):
        planted.planted(bug, torch.randn(65))
    assert planted.planted(NONE, torch.randn(65)).isfinite().all()


def test_unwritten_shared_memory_is_nan(planted) -> None:
    assert planted.planted(UNWRITTEN_SHARED, torch.randn(65)).isnan().nonzero().flatten().tolist() == [5 ^ 33]


@pytest.mark.parametrize(
    ("bug", "memory"),
    [
        (RACE, "shared"),
        (SHUFFLE_FOR_BARRIER, "shared"),
        (WRITE_OF_TWO_BLOCKS, "global"),
        (WRITE_BESIDE_ATOMIC, "global"),
        (RACE_WITHOUT_EXCUSE, "global"),
    ],
)
def test_races_are_named(bug: int, memory: str, planted) -> None:
    """In every order of threads: both accesses, with lines of the kernel; the next launch works again."""
    access, other = r"(reads|writes|changes)", r"which thread \d+ of block \d"
    message = rf"race: {access} {memory} memory at \+0x\w+, {other} {access} at \+0x\w+ with no barrier between"
    for order in range(3):
        planted._set_order(order, 5)
        with pytest.raises(RuntimeError, match=rf"^(block \d: thread \d+: )?{message}") as error:
            planted.planted(bug, torch.randn(65))
        places = re.findall(r"\+(0x\w+)", str(error.value).splitlines()[0])
        command = ["addr2line", "-e", build("rec_kernels_planted"), *places]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert len(re.findall(r"planted_bugs\.cu:\d+", lines)) == 2, lines
        assert planted.planted(NONE, torch.randn(65)).isfinite().all()
    planted._set_order(0, 0)


@pytest.mark.full
@pytest.mark.parametrize("bug", [OUTSIDE, OUTSIDE_SHARED])
def test_accesses_outside_of_memory_end_a_sanitized_run(bug: int, asan: dict[str, str]) -> None:
    """An invalid access ends the process; a correct kernel does not."""
    library = build("rec_kernels_planted_asan")
    code = f"import torch; torch.ops.load_library({str(library)!r}); planted = torch.ops.rec_kernels_planted.planted\n"
    code += f"x = torch.randn(64); planted({NONE}, x); print('clean', flush=True)\n"
    done = run(code + f"planted({bug}, x)", asan)
    assert done.stdout == "clean\n", done.stderr
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr
    assert "planted_bugs.cu" in done.stderr


@pytest.mark.full
def test_the_kernels_run_clean_under_the_sanitizers(asan: dict[str, str]) -> None:
    """The comparisons with the reference, and bad input on the device, pass with the sanitized library."""
    environment = asan | {"REC_KERNELS_TEST_LIBRARY": str(build("rec_kernels_emulated_asan"))}
    bags = [f"embedding_bag{part}" for part in ("", "_device", "_fused", "_moments", "_partitions_device")]
    tests = [f"python_tests/test_{name}.py" for name in (*bags, "scale_rows")]
    left_out = "not flush_denormal and not (moments and (any_case or widths))"  # to save time
    options = ["-q", "-m", "not full", "--backends=cuda_emulated", "-k", left_out]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "cuda_emulated" in done.stdout
