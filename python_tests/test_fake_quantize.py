"""fake_quantize on the CPU and in torch's own ops: the reference's bits, gradients, compilation, errors."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from backends import cpu_backends
from row_format_cases import PLACE, ROUNDINGS, WAYS, arguments, encoded_and_decoded, finite_rows, not_finite_rows
from tiers import full
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import metrics

import rec_kernels as rk
from rec_kernels.ops.fake_quantize import Traced, check_arguments
from rec_kernels.testing import same_bits

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
op = torch.ops.rec_kernels.fake_quantize


def hard_rows(columns: int, dtype: torch.dtype) -> Tensor:
    """Rows [N, D] of every magnitude, on ties, near the limits, not finite."""
    x = torch.cat([finite_rows(columns), not_finite_rows(columns)])
    if dtype == torch.float32:
        return x
    return torch.cat([x.to(dtype), torch.randint(0, 2**16, (8, columns)).to(torch.uint16).view(dtype)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("format", "rounding", "rule"), WAYS)
def test_matches_reference(format: str, rounding: str, rule: str | None, dtype: torch.dtype) -> None:
    """Every instruction set and number of threads has the reference's bits, as do torch's ops for "nearest"."""
    for columns in (1, 16, 33, 257):
        x = hard_rows(columns, dtype)
        expected = encoded_and_decoded(x, format, rounding, rule, **PLACE)
        for backend in cpu_backends():
            found = backend.ops.fake_quantize(x, *arguments(format, rounding, rule, PLACE))
            assert found.dtype == dtype
            assert same_bits(found, expected), (backend.name, columns)
        if rounding == "nearest":
            traced = Traced.apply(x, format, rule == "rceil")
            assert traced.dtype == dtype
            assert same_bits(traced, expected), columns


@pytest.mark.parametrize("format", rk.ROW_FORMATS)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_any_shape_and_stride(format: str, rounding: str) -> None:
    """Any rank and stride; the op's result is new and contiguous."""
    x = finite_rows(24)[:60]
    views = [x[7], x.view(3, 4, 5, 24), x.T, x[::3, 1:20], x[:1].expand(5, -1), x[:0], x.view(6, 10, 24)[:, :0]]
    for view in views:
        calls: list[Callable[[], Tensor]] = [lambda v=view: op(v, *arguments(format, rounding, None, PLACE))]
        if rounding == "nearest":
            calls.append(lambda v=view: Traced.apply(v, format, False))
        for call in calls:
            found = call()
            assert found.is_contiguous() or call is not calls[0]
            assert found.numel() == 0 or found.data_ptr() != view.data_ptr()
            assert same_bits(found, encoded_and_decoded(view, format, rounding, **PLACE))


def test_rows_are_numbered_in_memory_order() -> None:
    """The noise of x[i, j] is that of row first_row + i * J + j."""
    x, place = torch.randn(4, 6, 20), {"seed": 3, "step": 5, "table": 2, "first_row": 2**32 - 7}
    whole = rk.fake_quantize(x, "mx4", rounding="stochastic", **place)
    for i in range(4):
        part = place | {"first_row": place["first_row"] + 6 * i}
        assert same_bits(whole[i], rk.fake_quantize(x[i], "mx4", rounding="stochastic", **part))
    scalars = {"seed": torch.tensor(3), "step": torch.tensor(5)}
    assert same_bits(whole, rk.fake_quantize(x, "mx4", rounding="stochastic", **place | scalars))


def test_mapped_slices_are_rows_of_one_tensor() -> None:
    """Slices of torch.vmap have different noise."""
    x = torch.randn(256).expand(4, 1, 256)

    def rounded(t: torch.Tensor) -> torch.Tensor:
        return rk.fake_quantize(t, "int4", rounding="stochastic", seed=7)

    found = torch.vmap(rounded)(x)
    assert same_bits(found, rounded(x))
    assert not same_bits(found[0], found[1])
    assert same_bits(torch.vmap(rounded, in_dims=2)(x.permute(1, 2, 0)), rounded(x))
    with pytest.raises(NotImplementedError, match=r"does not support torch\.vmap over seed or step, only over x"):
        torch.vmap(lambda t, seed: rk.fake_quantize(t, "int4", rounding="stochastic", seed=seed))(x, torch.arange(4))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", ["fp32", "bf16", "int4", "mx6", "mxfp4_e2m1"])
def test_gradient_is_that_of_the_identity(format: str, dtype: torch.dtype) -> None:
    """The gradient passes unchanged, also for NaN."""
    x = hard_rows(19, dtype).requires_grad_()
    grad = torch.randn(x.shape).to(dtype)
    for rounding in ROUNDINGS:
        y = rk.fake_quantize(x, format, rounding=rounding)
        assert torch.equal(torch.autograd.grad(y, x, grad)[0], grad)
    assert torch.equal(torch.autograd.grad(Traced.apply(x, format, False), x, grad)[0], grad)


def test_a_network_trains_through_it() -> None:
    """With activations of two bits per column and weights of four, the loss falls."""
    torch.manual_seed(0)
    x, hidden, out = torch.randn(64, 16), torch.nn.Linear(16, 32), torch.nn.Linear(32, 1)
    target = x[:, :1] * x[:, 1:2]
    optimizer = torch.optim.Adam([*hidden.parameters(), *out.parameters()], lr=0.01)
    losses = []
    for step in range(150):
        weight = rk.fake_quantize(hidden.weight, "int4")
        features = torch.relu(torch.nn.functional.linear(x, weight, hidden.bias))
        features = rk.fake_quantize(features, "mx4", rounding="stochastic", seed=1, step=step)
        losses.append(torch.nn.functional.mse_loss(out(features), target))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])


@pytest.mark.parametrize("backend", ["aot_eager", *full("inductor")])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_compiles_once(backend: str, rounding: str) -> None:
    """New steps and, after the second, new shapes need no compilation; bits and gradients are eager's."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)

    def layer(x: Tensor, step: Tensor) -> Tensor:
        return rk.fake_quantize(x * 2, "mx6", rounding=rounding, seed=7, step=step).square()

    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for number, shape in enumerate(((4, 20), (6, 33), (9, 64), (11, 7))):
        x = torch.randn(shape, requires_grad=True)
        for step in (torch.tensor(number), torch.tensor(number + 50)):
            y, expected = compiled(x, step), layer(x, step)
            assert same_bits(y, expected)
            assert torch.equal(*(torch.autograd.grad(v.sum(), x)[0] for v in (y, expected)))
    assert counter.frame_count <= 2


# One format of each family, and those with other limits; dtypes exercise reading and writing rows, rules the block
# scale. Inductor takes seconds for each.
FAMILIES = ("bf16", "int8", "mx6", "mxfp6_e3m2")
OTHERS = ("fp16", "mxfp8_e4m3", "mxfp4_e2m1", "mxint8")


@pytest.mark.parametrize(
    ("format", "dtype", "columns", "rule"),
    [
        *((format, torch.float32, 48, "floor") for format in FAMILIES[:3]),
        *full((FAMILIES[3], torch.float32, 48, "floor")),
        *full(*((format, torch.bfloat16, 33, "floor") for format in FAMILIES[:2])),
        *full(*((format, torch.bfloat16, 64, "rceil") for format in FAMILIES[2:])),
        *full(*((format, torch.float32, 48, "floor") for format in OTHERS)),
    ],
)
def test_traced_ops_compile(format: str, dtype: torch.dtype, columns: int, rule: str) -> None:
    """torch's own ops compile in Inductor."""
    # Inductor's CPU code may omit the last columns if a fixed width is no multiple of the block (torch 2.13):
    # 33 columns in any dtype, 48 in bfloat16 with blocks of 32.
    check_traced_ops(hard_rows(columns, dtype), format, rule, dynamic=True if columns % 16 else None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="Inductor's code for GPUs needs one")
@pytest.mark.parametrize("format", [*FAMILIES, *OTHERS])
@pytest.mark.parametrize("columns", [33, 48, 64])
def test_traced_ops_compile_for_a_gpu(format: str, columns: int) -> None:
    """Fixed widths of all kinds compile on a GPU."""
    for dtype in (torch.float32, torch.bfloat16):
        check_traced_ops(hard_rows(columns, dtype).cuda(), format, "floor")


def check_traced_ops(x: torch.Tensor, format: str, rule: str, dynamic: bool | None = None) -> None:
    """Compares with the op's bits, integers within a rounding of their last addition."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda v, up: Traced.apply(v, format, up), fullgraph=True, dynamic=dynamic)
    found, x = compiled(x, rule == "rceil").cpu(), x.cpu()
    expected = encoded_and_decoded(x, format, rule=rule)
    if not format.startswith("int"):
        assert same_bits(found, expected)
        return
    assert torch.equal(found.isnan(), expected.isnan())
    most = x.float().abs().amax(1, keepdim=True).double()
    distance = (found.double() - expected.double()).abs() / torch.finfo(x.dtype).eps
    assert bool((expected.isnan() | (distance <= 4 * most)).all())


@pytest.mark.parametrize("format", ["bf16", *full("fp16")])
def test_traced_ops_are_fused(format: str) -> None:
    """Adjacent ops are in one kernel, which keeps the conversion to the format and back."""
    torch._dynamo.reset()
    metrics.reset()
    compiled = torch.compile(lambda v, w: Traced.apply(torch.relu(v) * w, format, False) + 1, fullgraph=True)
    x, w = torch.randn(64, 48), torch.randn(48)
    assert same_bits(compiled(x, w), rk.fake_quantize(torch.relu(x) * w, format) + 1)
    assert metrics.generated_kernel_count == 1


def test_eager_and_compiled_calls_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler gets torch's own ops for a GPU's "nearest", and the op for everything else."""
    chosen = []
    monkeypatch.setattr(Traced, "apply", lambda *arguments: chosen.append(arguments[1:]))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    x = torch.empty(3, 8, device="meta")
    rk.fake_quantize(x, "mx6")
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    rk.fake_quantize(x, "mx6", rounding="stochastic")
    assert not chosen
    rk.fake_quantize(x, "mx6")
    rk.fake_quantize(x, "int8", scale_rule="rceil")
    assert chosen == [("mx6", False), ("int8", True)]
    with pytest.raises(ValueError, match="format must be one of"):
        rk.fake_quantize(x, "mx5")


X = torch.ones(2, 3)
BAD = {
    "x must have at least one column, got shape []": {"x": torch.tensor(1.0)},
    "x must have at least one column, got shape [4, 0]": {"x": torch.ones(4, 0)},
    "x must be float32, float16 or bfloat16, got float64": {"x": X.double()},
    "x must be float32, float16 or bfloat16, got int64": {"x": X.long()},
    "format must be one of fp32, fp16, bf16, int8, int4, int2, mx9, mx6, mx4, mxfp8_e4m3, mxfp8_e5m2, mxfp6_e3m2, "
    'mxfp6_e2m3, mxfp4_e2m1, mxint8; got "mx5"': {"format": "mx5"},
    'rounding must be "nearest" or "stochastic", got "up"': {"rounding": "up"},
    'scale_rule must be "floor", "rceil" or None, got "ceil"': {"scale_rule": "ceil"},
    "table = 65536 must be in [0, 65536)": {"table": 2**16},
    "table = -1 must be in [0, 65536)": {"table": -1},
    "first_row = -1 must be in [0, 2^44 - 2]": {"first_row": -1},
    f"first_row = {2**44} must be in [0, 2^44 - 2]": {"first_row": 2**44},
    "seed must have 0 dimension(s), got shape [1]": {"seed": torch.zeros(1, dtype=torch.int64)},
    "step must be int64, got int32": {"step": torch.tensor(1, dtype=torch.int32)},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments(message: str) -> None:
    """The CPU's op and the check of the other implementations raise equal errors."""
    names = ("x", "format", "rounding", "seed", "step", "table", "first_row", "scale_rule")
    good = dict(zip(names, (X, "mx6", "stochastic", torch.tensor(1), torch.tensor(2), 0, 0, None), strict=True))
    for call in (op, check_arguments):
        call(*good.values())
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            call(*(good | BAD[message]).values())
