"""Wukong: stacked factorization machine and linear compression layers; each doubles the interaction order.

Source: B. Zhang, L. Luo, Y. Chen et al., "Wukong: Towards a Scaling Law for Large-Scale Recommendation"
(arXiv:2403.02545), section 3; n, d, k, n_F and n_L are the paper's symbols.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rec_kernels.nn.arguments import check_layer_dtype, positive_integer, positive_integers
from rec_kernels.ops.factorization_machine import factorization_machine


class WukongLayer(nn.Module):
    """One layer of the interaction stack: ``LN(concat(FMB(X), LCB(X)) + X)``.

    ``FMB(X) = reshape(MLP(LN(flatten(X X^T Y))))`` is the factorization machine block in its optimized form
    (``rk.factorization_machine``; the learned Y is shared by all samples), and ``LCB(X) = W_L X`` is the linear
    compression block. If n_F + n_L is not n, the residual connection adds W_R X instead of X.

    Args:
        in_features: n, input vectors per sample.
        embedding_dim: d, elements per vector.
        fm_features: n_F, output vectors of the FMB.
        linear_features: n_L, output vectors of the LCB.
        factors: k, columns of Y.
        hidden: widths of the MLP's hidden layers, each followed by a ReLU; none by default.
        device: device of the parameters.

    The parameters ``factors`` [n, k], ``compression`` [n_L, n] and, if n_F + n_L is not n, ``residual`` [n_F + n_L, n]
    are initialized from a normal distribution with variance 1 / n; ``fm_norm``, ``mlp`` and ``norm`` use ``torch.nn``'s
    defaults.

    Raises:
        ValueError: a size is not a positive integer, or ``hidden`` not a sequence of them; the message names it.
    """

    residual: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        embedding_dim: int,
        *,
        fm_features: int,
        linear_features: int,
        factors: int,
        hidden: Sequence[int] = (),
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        n = self.in_features = positive_integer("in_features", in_features)
        d = self.embedding_dim = positive_integer("embedding_dim", embedding_dim)
        fm_size = positive_integer("fm_features", fm_features)
        linear_size = positive_integer("linear_features", linear_features)
        k = positive_integer("factors", factors)
        self.out_features = fm_size + linear_size
        widths = [n * k, *positive_integers("hidden", hidden), fm_size * d]
        self.factors = nn.Parameter(torch.empty(n, k, device=device))
        self.fm_norm = nn.LayerNorm(n * k, device=device)
        layers = [nn.Linear(*pair, device=device) for pair in itertools.pairwise(widths)]
        self.mlp = nn.Sequential(*itertools.chain(*((layer, nn.ReLU()) for layer in layers[:-1])), layers[-1])
        self.compression = nn.Parameter(torch.empty(linear_size, n, device=device))
        if n == self.out_features:
            self.register_parameter("residual", None)
        else:
            self.residual = nn.Parameter(torch.empty(self.out_features, n, device=device))
        self.norm = nn.LayerNorm(d, device=device)
        for matrix in (self.factors, self.compression, self.residual):
            if matrix is not None:
                nn.init.normal_(matrix, std=n**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Applies the layer, [B, n, d] -> [B, n_F + n_L, d]; differentiable once.

        x must have the parameters' dtype: float32, float16 or bfloat16. Under autocast, x may have any of the three and
        the parameters must be float32. The sum before the final layer norm then has the autocast dtype if ``residual``
        exists or x has the autocast dtype, and is float32 otherwise; torch's layer norm keeps that dtype on the CPU and
        returns float32 on a GPU.

        Raises:
            ValueError: x has another shape or dtype.
        """
        check_layer_dtype("x", x, self.factors.dtype)
        if x.dim() != 3 or x.shape[1:] != (self.in_features, self.embedding_dim):
            allowed = f"[B, in_features = {self.in_features}, embedding_dim = {self.embedding_dim}]"
            raise ValueError(f"x must be {allowed}, got shape {list(x.shape)}")
        interactions = factorization_machine(x, self.factors).flatten(1)
        fm_block = self.mlp(self.fm_norm(interactions)).unflatten(1, (-1, self.embedding_dim))
        both = torch.cat((fm_block, _linear_combinations(self.compression, x)), dim=1)
        return self.norm(both + (x if self.residual is None else _linear_combinations(self.residual, x)))


def _linear_combinations(weight: Tensor, x: Tensor) -> Tensor:
    """Multiplies each sample by the weight, [m, n] x [B, n, d] -> [B, m, d].

    ``weight @ x`` would copy x to fold the batch into one product, and its transposed result is slow to add to.
    """
    return torch.bmm(weight.expand(x.shape[0], -1, -1), x)


class Wukong(nn.Sequential):
    """The Wukong interaction stack: a sequence of ``num_layers`` ``rk.WukongLayer``.

    Layer l captures interactions of up to 2^l vectors. To compute a logit, flatten the output and apply an MLP.

    Args:
        in_features: n, input vectors per sample: the pooled embeddings and the dense MLP's output.
        embedding_dim, fm_features, linear_features, factors, hidden, device: as in ``rk.WukongLayer``, for every layer.
        num_layers: number of layers, at least 1.

    The forward maps [B, in_features, embedding_dim] to [B, out_features = fm_features + linear_features,
    embedding_dim]. The dtype rules of ``rk.WukongLayer`` apply to each layer.

    A slice of the stack is a ``torch.nn.Sequential``. Layers may be appended or removed: ``out_features`` is read from
    the last layer, and raises TypeError if that layer has none. A layer whose size does not match the previous layer's
    output raises ValueError in the forward.

    Raises:
        ValueError: a size is not a positive integer, or ``hidden`` not a sequence of them; the message names it.
    """

    def __init__(
        self,
        in_features: int,
        embedding_dim: int,
        num_layers: int,
        *,
        fm_features: int,
        linear_features: int,
        factors: int,
        hidden: Sequence[int] = (),
        device: torch.device | str | None = None,
    ) -> None:
        num_layers = positive_integer("num_layers", num_layers)
        hidden = positive_integers("hidden", hidden)  # convert once: the first layer would exhaust an iterator
        sizes = {"fm_features": fm_features, "linear_features": linear_features, "factors": factors}
        layers: list[WukongLayer] = []
        for _ in range(num_layers):
            inputs = layers[-1].out_features if layers else in_features
            layers.append(WukongLayer(inputs, embedding_dim, **sizes, hidden=hidden, device=device))
        super().__init__(*layers)

    @property
    def out_features(self) -> int:
        """Output vectors per sample of the last layer.

        Raises:
            TypeError: the last layer, appended by the caller, has no ``out_features``.
        """
        last: Any = self[-1]
        if not hasattr(last, "out_features"):  # torch would blame its AttributeError on this module
            raise TypeError(f"layer {len(self) - 1}, the last, is a {type(last).__name__}, which has no out_features")
        return last.out_features

    def __getitem__(self, index: int | slice) -> nn.Module:
        # nn.Sequential would pass the slice's layers to this class's constructor, which takes sizes.
        return nn.Sequential(*list(self)[index]) if isinstance(index, slice) else super().__getitem__(index)
