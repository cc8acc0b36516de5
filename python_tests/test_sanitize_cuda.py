"""sanitize_cuda.py without a GPU: complete and correct calls, compute-sanitizer's results, the fuzz."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import jagged_fuzz
import pytest
import sanitize_cuda
import torch
from backends import Backend, OnCuda, OnDevice, device_backends, emulated, unaligned
from layout_calls import OPS
from sanitize_cuda import TOOLS, UNSUPPORTED, check, find_sanitizer, ops_with_kernels, run_under_sanitizer
from triton_calls import triton_calls

import rec_kernels as rk


def test_every_cuda_op_is_called_and_right() -> None:
    """Every op that csrc/*/cuda registers is called, and the emulated kernels have the CPU's bits in every order."""
    emulated()
    required = ops_with_kernels("rec_kernels_emulated", "CPU")
    assert {"scale_rows", "embedding_bag.layout", "embedding_bag_backward_fused_.layout"} <= required
    for backend in device_backends():
        assert check(backend.ops, required) > 30, backend.name


def test_every_op_in_triton_is_called() -> None:
    """Ops registered by Python for GPUs are called separately; wrong sums and wrong bits are found."""
    in_triton = ops_with_kernels("rec_kernels", "CUDA", compiled=False)
    assert {"dot_interaction_backward", "fake_quantize"} <= in_triton
    assert not in_triton & ops_with_kernels("rec_kernels", "CUDA")
    assert not in_triton & ops_with_kernels("rec_kernels_emulated", "CPU")
    assert check(OPS, in_triton, some=triton_calls()) == 8

    class Off:
        def __getattr__(self, name: str):
            op = getattr(torch.ops.rec_kernels, name)
            return (lambda *args: op(*args) * 1.001) if name in ("grouped_projection", "fake_quantize") else op

    with pytest.raises(AssertionError) as wrong:
        check(Off(), in_triton | {"new"}, some=triton_calls())
    sums, bits, missing = str(wrong.value).splitlines()
    assert sums.startswith("grouped_projection: grouped_projection_backward_weights raises AssertionError")
    assert re.search(r"\(product_checks\.py:\d+: assert bool", sums)
    assert bits.startswith("fake_quantize: tensors [0, 1, 2, 3, 4, 5, 6, 7] of 8 differ")
    assert missing == "no call of ['new']: add it to triton_calls.py"


def _cut(t: torch.Tensor) -> torch.Tensor:
    """Float32 cut to the 11 significant bits of TF32."""
    return (t.view(torch.int32) & ~0x1FFF).view(torch.float32)


class _OnTensorCores:
    """factorization_machine with a shared y as on an NVIDIA GPU, where half-precision products are TF32's."""

    def factorization_machine(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x.float() @ self._inner(x, y)).to(x.dtype)

    def factorization_machine_backward(self, grad: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple:
        of_y, of_grad = self._inner(x, y), self._inner(x, grad)
        grad_x = grad.float() @ of_y.mT + y.float() @ of_grad.mT
        return grad_x.to(x.dtype), (x.float() @ of_grad).sum(0).to(x.dtype)

    def _inner(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        inner = x.float().mT @ y.float()
        return inner if x.dtype == torch.float32 else _cut(inner)


def test_products_of_tensor_cores() -> None:
    """Calls allow the error of docs/numerics.md: P and Q of half-precision inputs are cut to TF32."""
    some = {"factorization_machine": triton_calls()["factorization_machine"]}
    assert check(_OnTensorCores(), set(), some=some) == 0


def test_ops_in_triton_wait_for_a_triton(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Without a supported Triton, the CUDA library's ops are called and nothing is missing."""
    for version in ("3.5.1", None):
        monkeypatch.setattr(sanitize_cuda._triton_versions, "installed", lambda found=version: found)
        assert sanitize_cuda.on_gpu({"a": torch.ops.rec_kernels}) == 0
        assert "in Triton are not called: they need Triton 3.6" in capsys.readouterr().out
    monkeypatch.setattr(sanitize_cuda._triton_versions, "installed", lambda: "3.6.0")
    assert sanitize_cuda.on_gpu({"a": torch.ops.rec_kernels}) == 0
    assert "\na, Triton: 8 tensors have the CPU's bits\n" in capsys.readouterr().out


def test_what_is_missing_or_wrong_is_said() -> None:
    """An op without a call, and a result with other bits, are reported."""
    with pytest.raises(AssertionError, match=r"no call of \['a_new_op'\]"):
        check(torch.ops.rec_kernels, {"a_new_op"})

    class Wrong:
        def __getattr__(self, name: str):
            op = getattr(torch.ops.rec_kernels, name)
            return (lambda *args: op(*args) + 1) if name == "scale_rows" else op

    with pytest.raises(AssertionError, match=r"scale_rows and row_dot: tensors \[0\] of \d+ differ") as wrong:
        check(Wrong(), set())
    assert len(str(wrong.value).splitlines()) == 1


def test_an_error_does_not_end_the_rest() -> None:
    """A failing call is named, and all others are still made."""

    class Broken:
        def __getattr__(self, name: str):
            return getattr(torch.ops.rec_kernels, name if name != "row_dot" else "no_such_op")

    required = {"scale_rows", "embedding_bag.layout", "row_cache_flush_.layout", "jagged_dedup"}
    with pytest.raises(AssertionError, match=r"^scale_rows and row_dot: row_dot raises AttributeError: .*$"):
        check(Broken(), required)


def test_unaligned_tensors() -> None:
    """The emulated kernels have equal bits with every tensor one element past an address aligned to 64 bytes."""
    assert {unaligned(torch.empty(3, dtype=d)).data_ptr() % 64 for d in (torch.int8, torch.float32)} == {1, 4}
    assert check(OnDevice(emulated().ops, unaligned, torch.Tensor.clone), set()) > 30


def test_what_is_compared_is_printed(capsys: pytest.CaptureFixture) -> None:
    """A failing way does not end the next one."""
    assert sanitize_cuda.compare({"a": torch.ops.rec_kernels, "b": object(), "c": torch.ops.rec_kernels}, set()) == 1
    found = capsys.readouterr().out
    for way in "ac":
        assert re.search(rf"^{way}: \d+ tensors have the CPU's bits$", found, re.MULTILINE)
    assert re.search(r"^  scale_rows and row_dot: \d+ tensors$", found, re.MULTILINE)  # printed immediately
    assert "\nb:\nscale_rows and row_dot: scale_rows raises Attr" in found


def test_copies_to_the_gpu_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """With copies in memory as the GPU's, tensors changed in place are copied back, also in lists."""
    monkeypatch.setattr(torch.Tensor, "cuda", torch.Tensor.clone)
    monkeypatch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)
    assert check(OnCuda(), set()) > 30


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """The command fails with a reason if nothing can be checked."""
    monkeypatch.setattr(sys, "argv", ["sanitize_cuda.py"])
    if torch.cuda.is_available() and rk.build_info()["cuda_unavailable"] is None:
        assert sanitize_cuda.main() == 0
        assert "have the CPU's bits" in capsys.readouterr().out
    else:
        with pytest.raises(SystemExit, match="there is nothing to check: "):
            sanitize_cuda.main()


def test_the_cases_reach_long_and_short_runs() -> None:
    """Rows with more than 64 occurrences are summed by other kernels than the rest."""
    for case in sanitize_cuda._cases():
        counts = case.offsets.diff().view(len(case.features), -1).sum(1)
        assert counts[case.features.index(2)] > 2 * 64


def fake_tool(folder: Path, code: str) -> Path:
    """A fake compute-sanitizer that records its arguments and runs ``code``."""
    tool = folder / "compute-sanitizer"
    note = f"open({str(folder / 'calls')!r}, 'a').write(os.environ['PYTORCH_NO_CUDA_MEMORY_CACHING'] + str(sys.argv))"
    tool.write_text(f"#!{sys.executable}\nimport os, sys\n{note}\n{code}\n")
    tool.chmod(0o755)
    return tool


@pytest.mark.parametrize(
    ("code", "status", "tools"), [("", 0, 3), ("sys.exit(1)", 1, 1), (f"print({UNSUPPORTED!r})", 0, 1)]
)
def test_each_tool_is_run_until_one_fails(
    code: str, status: int, tools: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    tool = fake_tool(tmp_path, code)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert find_sanitizer() == str(tool)
    assert run_under_sanitizer(TOOLS) == status
    calls = (tmp_path / "calls").read_text()
    assert [name in calls for name in TOOLS] == [True] * tools + [False] * (len(TOOLS) - tools)
    assert calls.count("'--error-exitcode', '1'") == calls.count("sanitize_cuda.py") == tools
    assert calls.startswith("1[")
    assert ("cannot look into" in capsys.readouterr().out) == (UNSUPPORTED in code)


def test_the_tool_is_found_beside_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tool is found through the symbolic link that distributions put on the PATH."""
    toolkit, path = tmp_path / "cuda", tmp_path / "bin"
    toolkit.mkdir()
    path.mkdir()
    (toolkit / "nvcc").write_text("")
    (toolkit / "nvcc").chmod(0o755)
    (path / "nvcc").symlink_to(toolkit / "nvcc")
    monkeypatch.setenv("PATH", str(path))
    assert find_sanitizer() is None
    tool = fake_tool(toolkit, "")
    assert find_sanitizer() == str(tool)


def test_a_machine_without_the_tool_gets_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    assert run_under_sanitizer(["synccheck"]) == 0
    assert "synccheck left out" in capsys.readouterr().out


@pytest.mark.full
def test_wrong_offsets_and_ids_under_the_sanitizers() -> None:
    """No kernel accesses memory outside of a tensor, for any bags; seeds differ from those of other tests."""
    command = [sys.executable, sanitize_cuda.__file__, "--fuzz", "150", "--seed", "1000"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert done.stdout.startswith("300 calls, ")


def test_a_fault_that_is_not_noted_ends_the_fuzz(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's ops, which raise instead of setting status, end the fuzz."""
    monkeypatch.setenv("REC_KERNELS_TEST_LIBRARY", "not asked for")
    monkeypatch.setattr(sanitize_cuda, "emulated", lambda: torch.ops.rec_kernels)
    with pytest.raises(AssertionError, match=r"cuda_emulated: BadCall\(sample=Sample\("):
        sanitize_cuda.fuzz(30, 0)
    with pytest.raises(AssertionError, match=r"cpu: seed 0 of jagged_fuzz: "):
        jagged_fuzz.check(0, Backend("cpu", torch.ops.rec_kernels))
