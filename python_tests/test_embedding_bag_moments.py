"""Fused updates with elementwise state (Adagrad, Adam, row-wise Adam, LAMB) have the reference's bits."""

from __future__ import annotations

import pytest
import torch
from backends import every_backend
from embedding_bag_cases import make_case
from embedding_bag_checks import check_update, check_updates
from embedding_bag_format_cases import EncodedCase, encoded_cases
from embedding_bag_moment_cases import ELEMENTWISE, MomentCase, reference_step
from hypothesis import strategies as st
from tiers import drawn

from rec_kernels.testing import same_bits


@drawn(40, encoded_cases(), st.sampled_from(ELEMENTWISE))
def test_any_case_in_bfloat16(encoded: EncodedCase, optimizer: str) -> None:
    """bfloat16 state is rounded with separate noise."""
    check_updates(encoded, [optimizer], half=True)


@pytest.mark.parametrize("optimizer", ELEMENTWISE)
@pytest.mark.parametrize("dim", [1, 4, 33, 129, 300, 1030])
def test_widths_in_bfloat16(dim: int, optimizer: str) -> None:
    formats = ["fp32", "int8"]
    case = make_case([(2, dim)] * len(formats), [*range(len(formats))], [2] * len(formats), seed=dim)
    check_updates(EncodedCase(case, formats), [optimizer], half=True)


@pytest.mark.parametrize("optimizer", ELEMENTWISE)
@pytest.mark.parametrize("dim", [1, 4, 15, 16, 33, 128, 129, 256, 300, 513, 1030])
def test_widths(dim: int, optimizer: str) -> None:
    """Tails of vectors, and rows beyond a warp's registers, whose updates are computed more than once."""
    formats = ["fp32", "int8", "bf16", "mx6"] if dim < 513 else ["fp32", "int4"]
    case = make_case([(2, dim)] * len(formats), [*range(len(formats))], [2] * len(formats), seed=dim)
    check_updates(EncodedCase(case, formats), [optimizer])


@pytest.mark.parametrize("optimizer", ELEMENTWISE)
def test_one_table(optimizer: str) -> None:
    """Ops work without a layout: weights [E, D], and state from its first element on."""
    g = torch.Generator().manual_seed(1)
    weight, ids = torch.randn(6, 20, generator=g), torch.tensor([1, 4, 1])
    offsets, grad = torch.tensor([0, 2, 3]), torch.randn(2, 20, generator=g)
    gradients = {1: grad[0] + grad[1], 4: grad[0]}
    expected = weight.clone()
    state = _zero_state(optimizer, 6, 20)
    powers, betas = torch.tensor([0.9, 0.999]), (0.9, 0.999)
    reference_step(optimizer, expected, {k: t.clone() for k, t in state.items()}, gradients, 0.1, betas, powers)
    for backend in every_backend():
        found, mine = weight.clone(), {k: t.clone().flatten() for k, t in state.items()}
        backend.ops.embedding_bag_backward_fused_(
            found,
            mine.pop("sum", None),
            torch.tensor(0),
            torch.tensor(0.1),
            grad,
            ids,
            offsets,
            optimizer=optimizer,
            **mine,
        )
        assert same_bits(found, expected), backend.name


def _zero_state(optimizer: str, rows: int, columns: int) -> dict[str, torch.Tensor]:
    if optimizer == "adagrad":
        return {"sum": torch.zeros(rows, columns)}
    second = (rows,) if optimizer == "rowwise_adam" else (rows, columns)
    return {"exp_avg": torch.zeros(rows, columns), "exp_avg_sq": torch.zeros(second), "beta_powers": torch.ones(2)}


def test_norms_of_zero() -> None:
    """With LAMB, rows of zeros and gradients of zeros use lr itself."""
    case = make_case([(3, 20)], [0], [1, 1, 1], seed=2)
    case.values.copy_(torch.tensor([0, 1, 2]))
    case.split(case.weights)[0][0] = 0
    case.grad[1] = 0
    encoded = EncodedCase(case, ["fp32"])
    moments = MomentCase(encoded, "lamb")
    for view in moments.split(moments.state["exp_avg"]):
        view[1] = 0
    flat, _ = moments.expected("nearest")
    for backend in every_backend():
        assert encoded.same_tables(moments.update("nearest", backend.ops)[0], flat), backend.name


@pytest.mark.parametrize("optimizer", ELEMENTWISE)
def test_nan(optimizer: str) -> None:
    """A NaN in a gradient reaches its element, and with LAMB, whose norms are per row, its row."""
    case = make_case([(3, 20)], [0], [1, 1], seed=2)
    case.values.copy_(torch.tensor([0, 2]))
    case.grad[0, 7] = torch.nan
    encoded = EncodedCase(case, ["fp32"])
    flat, _ = MomentCase(encoded, optimizer).expected("nearest")
    rows = case.split(flat[encoded.starts[0] :][: 3 * 20 * 4].view(torch.float32))[0]
    is_nan_row = rows[0].isnan()
    assert is_nan_row[7]
    assert is_nan_row.all() == (optimizer in ("lamb", "rowwise_adam"))
    assert not rows[1:].isnan().any()
    check_update(encoded, optimizer, "nearest")
