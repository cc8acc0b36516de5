"""Initial parameters and optimizers' defaults have the documented mean, variance and bounds."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import rec_kernels as rk


def assert_uniform(x: Tensor, bound: float) -> None:
    """Mean and variance are within five standard deviations of those of uniform values in +-bound."""
    x = x.detach().double().flatten()
    n, sd = x.numel(), bound / math.sqrt(3)
    assert x.abs().max() <= bound * (1 + 1e-6)
    assert x.abs().max() >= bound * 0.99
    assert abs(x.mean()) <= 5 * sd / math.sqrt(n)
    assert x.std() == pytest.approx(sd, rel=5 / math.sqrt(n))


def xavier(matrix: Tensor) -> float:
    """The bound of X. Glorot and Y. Bengio, 2010, of a matrix [outputs, inputs]."""
    return math.sqrt(6 / sum(matrix.shape))


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


def test_rows_and_projections_of_a_collection() -> None:
    """Rows are in +-1/sqrt(E); the matrix of a mixed dimension preserves the variance in both directions."""
    plain = rk.EmbeddingBagConfig(4096, 16, name="plain", feature_names=["a"])
    mixed = rk.EmbeddingBagConfig(
        10000, 128, name="mixed", feature_names=["b"], compression=rk.MixedDimension(32), format="fp32"
    )
    bags = rk.EmbeddingBagCollection([plain, mixed], optimizer=rk.SGD(lr=0.1)).embedding_bags
    assert_uniform(bags["plain"].weight, 1 / 64)
    assert_uniform(bags["mixed"].weight, 0.01)
    matrix = bags["mixed"].projection
    assert matrix.shape == (128, 32)
    assert_uniform(matrix, xavier(matrix))


def test_blocks_by_popularity() -> None:
    """Rows of every block have the bounds of the whole table; each narrow block has a matrix."""
    blocks = rk.MixedDimensionEmbeddingBag([100, 3996], [64, 16], 64)
    tables = blocks.blocks.embedding_bags
    for name in tables:
        assert_uniform(tables[name].weight, 1 / 64)
    assert blocks.projection.shape == (64, 16)
    assert_uniform(blocks.projection, xavier(blocks.projection))


@pytest.mark.parametrize("base_dim", [32, 64])
def test_linear_functions_of_path_embeddings(base_dim: int) -> None:
    """Functions are orthogonal, with a gain that preserves the variance of rows, and all different."""
    weights = rk.PathEmbeddingBag(1000, 64, 4, base_dim=base_dim).weight.detach()
    gain = 64 / base_dim
    for weight in weights:
        torch.testing.assert_close(weight.T @ weight, gain * torch.eye(base_dim), atol=1e-4, rtol=0)
    assert (weights[0] - weights[1]).abs().max() > 0.1


def test_functions_of_path_embeddings_with_a_hidden_layer() -> None:
    """Weights before the ReLU are He's, those after it Glorot's; biases are zero."""
    path = rk.PathEmbeddingBag(1000, 64, 4, hidden=128)
    for hidden, weight in zip(path.hidden_weight, path.weight, strict=True):
        assert_uniform(hidden, math.sqrt(6 / hidden.shape[1]))
        assert_uniform(weight, xavier(weight))
    assert not path.hidden_bias.any()
    assert not path.bias.any()


@pytest.mark.parametrize(
    ("make", "lr", "eps"),
    [
        (rk.SGD, 0.01, 0.0),
        (rk.Adagrad, 0.01, 1e-10),
        (rk.RowwiseAdagrad, 0.01, 1e-8),
        (rk.Adam, 0.001, 1e-8),
        (rk.RowwiseAdam, 0.001, 1e-8),
        (rk.LAMB, 0.001, 1e-8),
    ],
)
def test_defaults_of_optimizers(make: type, lr: float, eps: float) -> None:
    """Defaults of learning rate, eps and, with moments, betas are as documented."""
    optimizer = make()
    options = optimizer.options()
    assert (optimizer.lr, options["eps"]) == (lr, eps)
    assert (options.get("beta1", 0.9), options.get("beta2", 0.999)) == (0.9, 0.999)
