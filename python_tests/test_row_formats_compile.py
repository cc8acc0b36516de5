"""quantize_rows and dequantize_rows under torch.compile, and their fake kernels."""

from __future__ import annotations

import pytest
import torch
from row_format_bytes import INTEGERS
from tiers import cross
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import rec_kernels as rk
from rec_kernels import testing

STEPS = 50
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ops = torch.ops.rec_kernels


def store_and_load(x: Tensor, format: str, seed: int | Tensor, step: int | Tensor) -> tuple[Tensor, Tensor]:
    """Changes rows; returns their new bytes and the decoded values."""
    rows = rk.quantize_rows(x * 1.25, format, rounding="stochastic", seed=seed, step=step, table=1)
    return rows, rk.dequantize_rows(rows, format, x.shape[1])


@pytest.mark.parametrize(
    ("backend", "format"), cross(["aot_eager", "inductor"], ["bf16", "int8", "mx6", "mxfp4_e2m1"], "int8")
)
def test_steps_compile_once(format: str, backend: str) -> None:
    """With tensors as seed and step, 50 steps compile once, with eager's bits."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(store_and_load, backend=counter, fullgraph=True)
    x, seed, step = torch.randn(7, 37), torch.tensor(5), torch.tensor(0)
    seen = set()
    for _ in range(STEPS):
        rows, numbers = compiled(x, format, seed, step)
        expected = store_and_load(x, format, 5, int(step))
        assert torch.equal(rows, expected[0])
        assert testing.same_bits(numbers, expected[1])
        seen.add(bytes(rows.flatten().tolist()))
        step += 1
    assert counter.frame_count == 1
    assert len(seen) == STEPS


@pytest.mark.parametrize("format", ["fp16", "int4", "mx9", "mxfp6_e3m2"])
def test_sizes_compile_once_more(format: str) -> None:
    """A second shape recompiles with symbolic sizes, including D; further ones never."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(store_and_load, backend=counter, fullgraph=True)
    step = torch.tensor(3)
    for shape in ((4, 20), (6, 33), (9, 64), (11, 7)):
        x = torch.randn(shape)
        expected = store_and_load(x, format, 5, step)
        assert all(map(testing.same_bits, compiled(x, format, 5, step), expected))
    assert counter.frame_count <= 2


def test_numbers_may_change_between_calls() -> None:
    """first_row and an int step become symbols, too."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def shard(x: Tensor, first_row: int, step: int) -> Tensor:
        return rk.quantize_rows(x, "mx4", rounding="stochastic", step=step, first_row=first_row)

    compiled, x = torch.compile(shard, backend=counter, fullgraph=True), torch.randn(5, 9)
    for n in range(2, 8):
        assert torch.equal(compiled(x, 2**33 * n, n), shard(x, 2**33 * n, n))
    assert counter.frame_count <= 3


@pytest.mark.parametrize("format", INTEGERS)
def test_compiled_calls_raise_on_the_cpu(format: str) -> None:
    """A non-finite value raises when the compiled function runs."""
    torch._dynamo.reset()
    compiled = torch.compile(rk.quantize_rows, backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 8)
    assert torch.equal(compiled(x, format), rk.quantize_rows(x, format))
    x[1, 2] = torch.inf
    with pytest.raises(ValueError, match=r"x\[1, 2\] = inf"):
        compiled(x, format)


@pytest.mark.parametrize("format", rk.ROW_FORMATS)
def test_fakes_of_strided_rows(format: str) -> None:
    """Fake results have the real strides, also on meta and in fake mode; test_opcheck.py checks the rest."""
    for shape, dtype in (((4, 33), torch.float32), ((0, 1), torch.float16), ((3, 16), torch.bfloat16)):
        strided = torch.ones(shape, dtype=dtype).T.contiguous().T
        real, _ = ops.quantize_rows(strided, format)
        with FakeTensorMode() as mode:
            fakes = [ops.quantize_rows(mode.from_tensor(strided), format)]
        fakes.append(ops.quantize_rows(strided.to("meta"), format))
        for rows, status in fakes:
            back = ops.dequantize_rows(rows, format, shape[1], dtype)
            assert (rows.shape, rows.dtype, rows.stride()) == (real.shape, real.dtype, real.stride())
            assert (status.shape, status.dtype, status.device) == ((1,), torch.int64, rows.device)
            assert (back.shape, back.dtype, back.is_contiguous()) == (shape, dtype, True)


def test_fakes_refuse() -> None:
    """Unknown formats, rows without columns, tensors on two devices."""
    x = torch.ones(2, 3, device="meta")
    with pytest.raises(ValueError, match="format must be one of fp32, fp16"):
        rk.quantize_rows(x, "fp8")
    with pytest.raises(ValueError, match="format must be one of fp32, fp16"):
        rk.dequantize_rows(x.byte(), "fp8", 3)
    with pytest.raises(ValueError, match="embedding_dim = 0 must be at least 1"):
        rk.quantize_rows(x[:, :0], "fp32")
    with pytest.raises(ValueError, match="same device"):
        rk.quantize_rows(x, "fp32", seed=torch.tensor(3))


def test_results_need_no_gradient() -> None:
    """Encoding a tensor that requires a gradient returns results without one."""
    x = torch.randn(2, 5, requires_grad=True)
    rows = rk.quantize_rows(x, "mx6")
    assert not rows.requires_grad
    assert not rk.dequantize_rows(rows, "mx6", 5).requires_grad
