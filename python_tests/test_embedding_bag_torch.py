"""rk.embedding_bag replaces torch.nn.functional.embedding_bag: arguments, results and gradients."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from layout_calls import OPS
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

import rec_kernels as rk
from rec_kernels.testing import assert_same_sum, jagged_batch, same_bits

ROWS, DIM, BATCH = 40, 37, 24
LONGEST = 16


def _input(kind: str) -> dict[str, Tensor | bool]:
    """input, offsets and include_last_offset: bags of up to 16 ids, some empty; or 2-D without offsets."""
    if kind == "2-D":
        return {"input": torch.randint(ROWS, (BATCH, 5))}
    values, offsets = jagged_batch([ROWS], BATCH, mean_length=LONGEST / 2, ids="zipf", seed=3)
    last = kind == "include_last_offset"
    return {"input": values, "offsets": offsets if last else offsets[:-1], "include_last_offset": last}


def _call(function, arguments: dict, weight: Tensor, factors: Tensor | None) -> Tensor:
    # torch takes its tensors by position in the order that both have.
    rest = {k: v for k, v in arguments.items() if k != "input"}
    return function(arguments["input"], weight, **rest, per_sample_weights=factors)


COMBINATIONS = [
    (kind, mode, weighted, padding, sparse)
    for kind, mode, weighted, padding, sparse in itertools.product(
        ["offsets", "include_last_offset", "2-D"], ["sum", "mean"], [False, True], [None, 3, -4], [False, True]
    )
    if not (weighted and mode == "mean")  # torch rejects it
]


@pytest.mark.parametrize(("kind", "mode", "weighted", "padding", "sparse"), COMBINATIONS)
def test_every_combination(kind: str, mode: str, weighted: bool, padding: int | None, sparse: bool) -> None:
    """Output, gradient of weight (dense or sparse) and of per_sample_weights, within the rounding of the sums."""
    arguments = _input(kind) | {"mode": mode, "padding_idx": padding, "sparse": sparse}
    weight = torch.randn(ROWS, DIM)
    factors = torch.randn(arguments["input"].shape) if weighted else None
    grad = torch.randn(BATCH, DIM)
    results = []
    for function, to in ((rk.embedding_bag, torch.float32), (F.embedding_bag, torch.float64)):
        mine = weight.detach().to(to).requires_grad_()
        by = None if factors is None else factors.detach().to(to).requires_grad_()
        # torch's sparse gradient lacks padding_idx, and float64 in some cases: compare with its dense gradient.
        output = _call(function, arguments | {"sparse": sparse and to == torch.float32}, mine, by)
        output.backward(grad.to(to))
        assert mine.grad.is_sparse == (sparse and to == torch.float32)
        results.append([output, mine.grad.to_dense(), None if by is None else by.grad])
    magnitude = weight.double().abs().requires_grad_()
    by = None if factors is None else factors.double().abs().requires_grad_()
    output = _call(F.embedding_bag, arguments | {"sparse": False}, magnitude, by)
    output.backward(grad.double().abs())
    (found, expected), terms = results, LONGEST + 3
    assert_same_sum(found[0], expected[0], output, terms)
    assert_same_sum(found[1], expected[1], magnitude.grad, terms=arguments["input"].numel() + 3)
    if by is not None:
        assert_same_sum(found[2], expected[2], by.grad, terms=DIM)


@pytest.mark.parametrize("kind", ["offsets", "2-D"])
def test_sparse_gradient_is_coalesced(kind: str) -> None:
    """Each row occurs once, in ascending order: the gradient is coalesced."""
    arguments, weight = _input(kind), torch.randn(ROWS, DIM, requires_grad=True)
    (grad,) = torch.autograd.grad(_call(rk.embedding_bag, arguments | {"sparse": True}, weight, None).sum(), weight)
    assert grad.is_coalesced()
    assert torch.equal(grad.indices()[0], arguments["input"].unique())
    assert grad.shape == weight.shape
    # torch uses the rows as they are; whether it keeps the flag of a coalesced tensor does not matter.
    _call(rk.embedding_bag, arguments | {"sparse": True}, weight, None).sum().backward()
    assert torch.equal(weight.grad._indices(), grad.indices())
    assert torch.equal(weight.grad._values(), grad.values())
    assert torch.equal(weight.grad.coalesce().values(), grad.values())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("kind", ["offsets", "include_last_offset", "2-D"])
def test_integer_widths(kind: str, dtype: torch.dtype) -> None:
    """int32 and int64 give equal bits, also mixed, which torch does not allow."""
    weight, arguments = torch.randn(ROWS, DIM), _input(kind)
    expected = _call(rk.embedding_bag, arguments, weight, None)
    arguments["input"] = arguments["input"].to(dtype)
    assert same_bits(_call(rk.embedding_bag, arguments, weight, None), expected)


def test_weighted_mean() -> None:
    """The weighted mean, which torch rejects, is the weighted sum divided by the number of ids."""
    arguments, weight = _input("include_last_offset"), torch.randn(ROWS, DIM)
    factors = torch.randn(len(arguments["input"]))
    found = _call(rk.embedding_bag, arguments | {"mode": "mean"}, weight, factors)
    counts = arguments["offsets"].diff().clamp(min=1)[:, None]
    assert same_bits(found, _call(rk.embedding_bag, arguments | {"mode": "sum"}, weight, factors) / counts)


def test_signature_is_torchs() -> None:
    """Names, order and defaults are torch's; further arguments are keyword-only."""
    ours, theirs = (inspect.signature(f).parameters.values() for f in (rk.embedding_bag, F.embedding_bag))
    positional = [p for p in ours if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [(p.name, p.default) for p in positional] == [(p.name, p.default) for p in theirs]


def test_expanded_and_transposed_gradients() -> None:
    """The gradient may be expanded, as of out.sum(), or strided, as of a transpose."""
    arguments = _input("offsets") | {"mode": "sum"}
    for use, grad in (
        (lambda out: out.sum(), torch.ones(BATCH, DIM)),
        (lambda out: (out.t() * torch.arange(BATCH)).sum(), torch.arange(float(BATCH))[:, None].expand(BATCH, DIM)),
    ):
        for sparse in (False, True):
            weight = torch.randn(ROWS, DIM, requires_grad=True)
            use(_call(rk.embedding_bag, arguments | {"sparse": sparse}, weight, None)).backward()
            other = weight.detach().clone().requires_grad_()
            _call(rk.embedding_bag, arguments, other, None).backward(grad.contiguous())
            assert same_bits(weight.grad.to_dense(), other.grad)


@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_ids_behind_the_last_offset(mode: str, padding: int | None) -> None:
    """With include_last_offset, ids after the last offset are in no bag and change nothing."""
    ids, last = torch.arange(12) % 6, torch.tensor([0, 4, 4, 9])
    weight = torch.randn(ROWS, DIM)
    options = {"mode": mode, "padding_idx": padding, "include_last_offset": True}
    results = []
    for function, given in ((rk.embedding_bag, ids), (F.embedding_bag, ids[:9])):
        mine = weight.clone().requires_grad_()
        output = function(given, mine, last, **options)
        output.square().sum().backward()
        results.append((output.detach(), mine.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_sparse_gradient_trains() -> None:
    """torch.optim.SparseAdam accepts the sparse gradient; other rows stay."""
    arguments = _input("offsets") | {"mode": "sum", "sparse": True}
    weight = torch.nn.Parameter(torch.randn(ROWS + 1, DIM))
    before = weight.detach().clone()
    optimizer = torch.optim.SparseAdam([weight])
    _call(rk.embedding_bag, arguments, weight, None).square().sum().backward()
    optimizer.step()
    touched = torch.zeros(ROWS + 1, dtype=torch.bool).index_fill(0, arguments["input"], True)
    assert same_bits(weight.detach()[~touched], before[~touched])
    assert (weight.detach() != before)[touched].any(dim=1).all()


NO_SECOND = "has no second derivative: its op is differentiable once"


def test_no_second_derivative() -> None:
    """Second derivatives raise, as in torch, instead of being zero."""
    weight = torch.randn(ROWS, DIM, requires_grad=True)
    output = _call(rk.embedding_bag, _input("offsets"), weight, None)
    (grad,) = torch.autograd.grad(output.square().sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match=NO_SECOND):
        grad.sum().backward()


@pytest.mark.parametrize("of", ["weight", "factors"])
@pytest.mark.parametrize("lookup", ["function", "sparse", "tables"])
def test_no_second_derivative_in_what_was_looked_up(lookup: str, of: str) -> None:
    """Rows and weights depend on each other's gradient even if the incoming gradient is constant."""
    ids, offsets = torch.tensor([0, 1, 1]), torch.tensor([0, 2, 3])
    weight, factors = torch.randn(5, 4, requires_grad=True), torch.ones(3, requires_grad=True)
    if lookup == "tables":
        layout = {name: torch.tensor([n]) for name, n in {"num_embeddings": 5, "embedding_dims": 4}.items()}
        zeros = dict.fromkeys(("weight_offsets", "row_offsets"), torch.tensor([0]))
        flat = torch.nn.functional.pad(weight.detach().reshape(-1), (0, 12))  # a table starts at multiples of 16
        output, _ = OPS.embedding_bag_tables(flat, [weight], ids, offsets, factors, **layout, **zeros)
    else:
        options = {"mode": "sum", "per_sample_weights": factors, "sparse": lookup == "sparse"}
        output = rk.embedding_bag(ids, weight, offsets, include_last_offset=True, **options)
    (grad,) = torch.autograd.grad(output.sum(), {"weight": weight, "factors": factors}[of], create_graph=True)
    assert grad.requires_grad
    with pytest.raises(RuntimeError, match=NO_SECOND):
        grad.to_dense().square().sum().backward()


def test_a_gradient_that_depends_on_nothing() -> None:
    """The table's gradient of plain sums is a constant, also under ``create_graph``."""
    weight = torch.randn(5, 4, requires_grad=True)
    output = rk.embedding_bag(torch.tensor([0, 1]), weight, torch.tensor([0]), mode="sum")
    (grad,) = torch.autograd.grad(output.sum(), weight, create_graph=True)
    assert not grad.requires_grad
    assert grad.tolist() == [[1.0] * 4] * 2 + [[0.0] * 4] * 3


@pytest.mark.parametrize(
    ("input", "weight", "message"),
    [
        (torch.ones(3), torch.ones(5, 4), "input must be int32 or int64 ids, got torch.float32"),
        (torch.ones(3).long(), torch.ones(5), "weight must have two dimensions and be contiguous, got shape [5]"),
        (torch.ones(3).long(), torch.ones(4, 5).T, "got shape [5, 4] and strides [1, 5]"),
        (torch.ones(3).long(), torch.ones(4, 5).half().T, "got shape [5, 4] and strides [1, 5]"),
    ],
)
def test_arguments_by_their_own_names(input: Tensor, weight: Tensor, message: str) -> None:
    """Errors have the function's argument names, not the op's."""
    with pytest.raises(ValueError, match=re.escape(message)):
        rk.embedding_bag(input, weight, torch.tensor([0, 2]))


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
def test_no_forward_mode_derivative(grad: bool) -> None:
    """Tangents of tables and weights raise instead of being ignored; tangents of other arguments are ignored."""
    weight, factors = torch.randn(5, 3), torch.ones(3)
    ids, offsets = torch.tensor([0, 4, 4]), torch.tensor([0, 1])

    def lookup(weight: Tensor, factors: Tensor) -> Tensor:
        return rk.embedding_bag(ids, weight, offsets, mode="sum", per_sample_weights=factors)

    with torch.set_grad_enabled(grad):
        for f, x in ((lambda w: lookup(w, factors), weight), (lambda s: lookup(weight, s), factors)):
            with pytest.raises(NotImplementedError, match=r"embedding_bag\.table has no forward-mode derivative"):
                torch.func.jvp(f, (x,), (torch.ones_like(x),))
            with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivative"):
                f(forward_ad.make_dual(x, torch.ones_like(x)))
        right = lookup(weight, factors)
        with forward_ad.dual_level():
            assert torch.equal(lookup(weight, factors), right)


def test_only_wanted_gradients() -> None:
    """Either the table or the weights may be frozen."""
    arguments = _input("offsets") | {"mode": "sum"}
    count = len(arguments["input"])
    for trained in (0, 1):
        tensors = [torch.randn(ROWS, DIM), torch.randn(count)]
        both = [t.clone().requires_grad_() for t in tensors]
        tensors[trained].requires_grad_()
        for pair in (tensors, both):
            _call(rk.embedding_bag, arguments, *pair).sum().backward()
        assert tensors[1 - trained].grad is None
        assert same_bits(tensors[trained].grad, both[trained].grad)


@pytest.mark.parametrize("sparse", [False, True])
def test_only_wanted_tables(sparse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables without a gradient run no backward and keep no memory for it."""
    sizes = [(50, 8), (0, 8), (6, 4), (9, 4)]
    lookup = OPS.embedding_bag_tables
    starts = [0, 400, 400, 432]
    factors = torch.rand(8, requires_grad=True)

    def train(trained: list[bool]) -> list[Tensor | None]:
        weights = torch.arange(480.0) / 480
        tables = [weights[s : s + r * d].view(r, d) for s, (r, d) in zip(starts, sizes, strict=True)]
        tables = [t.detach().requires_grad_(want) for t, want in zip(tables, trained, strict=True)]
        output, _ = lookup(
            weights, tables, torch.tensor([1, 1, 49, 5, 0, 0, 8, 3]), torch.tensor([0, 2, 3, 3, 3, 4, 6, 7, 8]),
            factors, weight_offsets=torch.tensor(starts), row_offsets=torch.tensor([0, 50, 50, 56]),
            num_embeddings=torch.tensor([r for r, _ in sizes]), embedding_dims=torch.tensor([d for _, d in sizes]),
            num_rows=65, sparse=sparse,
        )  # fmt: skip
        factors.grad = None
        output.square().sum().backward()
        return [factors.grad, *(t.grad for t in tables)]

    every = train([True] * 4)
    some = train([False, True, True, False])
    for mine, right, want in zip(some, every, [True, False, True, True, False], strict=True):
        assert (mine is not None) == want
        if mine is not None and right is not None:
            assert same_bits(mine.to_dense(), right.to_dense())
    if not sparse:
        assert some[3].untyped_storage().nbytes() == some[3].numel() * 4
    with monkeypatch.context() as patch:
        for op in ("dense", "sparse"):
            patch.setattr(OPS, f"embedding_bag_backward_{op}", None)
        assert same_bits(train([False] * 4)[0], every[0])


def test_changed_table_is_noticed() -> None:
    """Changing a table that a gradient needs before the backward raises, as in torch's ops."""
    weight, factors = torch.randn(ROWS, DIM, requires_grad=True), torch.randn(BATCH, 5, requires_grad=True)
    output = _call(rk.embedding_bag, _input("2-D") | {"mode": "sum"}, weight, factors)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_norm": 1.0}, NotImplementedError, "max_norm"),
        ({"norm_type": 1.0}, NotImplementedError, "norm_type"),
        ({"scale_grad_by_freq": True}, NotImplementedError, "scale_grad_by_freq"),
        ({"format": "int8"}, ValueError, "format must be None or 'fp32', got 'int8'"),
        ({"embedding_dim": 4}, ValueError, "embedding_dim None, got 4"),
        ({"output_dtype": torch.float64}, ValueError, "output_dtype must be"),
        ({"mode": "max"}, ValueError, "mode must be 'sum' or 'mean', got 'max'"),
        ({"offsets": None}, ValueError, "offsets must be given"),
        ({"padding_idx": ROWS}, ValueError, r"padding_idx = 40 must be in \[-40, 40\)"),
        ({"padding_idx": -ROWS - 1}, ValueError, r"padding_idx = -41 must be in \[-40, 40\)"),
        ({"input": torch.zeros(2, 2, dtype=torch.int64)}, ValueError, "offsets must be None"),
        ({"input": torch.tensor(1)}, ValueError, "input must have one or two dimensions"),
        ({"weight": torch.zeros(3)}, ValueError, "weight must have two dimensions"),
    ],
)
def test_refused(options: dict, error: type[Exception], message: str) -> None:
    """Unsupported options of torch, and unknown ones, are rejected."""
    arguments = _input("offsets") | {"weight": torch.randn(ROWS, DIM)} | options
    with pytest.raises(error, match=message):
        rk.embedding_bag(**arguments)


def test_refused_2d_weights() -> None:
    """per_sample_weights of another shape than the ids are rejected."""
    with pytest.raises(ValueError, match=r"per_sample_weights must have input's shape \[24, 5\], got \[120\]"):
        rk.embedding_bag(_input("2-D")["input"], torch.randn(ROWS, DIM), per_sample_weights=torch.ones(BATCH * 5))


def _lookup_of(weight: Tensor, factors: Tensor | None = None) -> Tensor:
    options = {"mode": "sum", "per_sample_weights": factors}
    return rk.embedding_bag(torch.tensor([1, 2]), weight, torch.tensor([0]), **options)


def _twice(function: Callable, args: tuple, kwargs: dict | None) -> object:
    """The doubled output of the lookup's op."""
    found = function(*args, **(kwargs or {}))
    return (found[0] * 2, *found[1:]) if "embedding_bag" in str(function) and isinstance(found, tuple) else found


class _TwiceMode(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return _twice(function, args, kwargs)


class _TwiceTensor(Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return _twice(function, args, kwargs)


@pytest.mark.parametrize("of", ["mode", "weight", "factors"])
def test_torch_function_sees_the_op(of: str) -> None:
    """A mode or tensor class receives the call; its result has a gradient exactly if one is required."""
    weight, factors = torch.ones(3, 4), torch.ones(2)
    if of == "weight":
        weight = weight.as_subclass(_TwiceTensor)
    elif of == "factors":
        factors = factors.as_subclass(_TwiceTensor)
    weight.requires_grad_()
    with _TwiceMode() if of == "mode" else contextlib.nullcontext():
        with torch.no_grad():
            plain = _lookup_of(weight, factors)
        output = _lookup_of(weight, factors)
    output.as_subclass(Tensor).sum().backward()
    assert plain.tolist() == output.tolist() == [[4.0] * 4]
    assert weight.grad.tolist() == [[0.0] * 4] + [[2.0] * 4] * 2
