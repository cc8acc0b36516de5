"""Wukong: layers of factorization machines and linear compressions; each doubles the order of interactions.

Source: B. Zhang, L. Luo, Y. Chen et al., "Wukong: Towards a Scaling Law for Large-Scale Recommendation"
(arXiv:2403.02545), section 3; n, d, k, n_F and n_L are its letters.
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
    """``LN(concat(FMB(X), LCB(X)) + X)``: a layer of the interaction stack.

    With ``FMB(X) = reshape(MLP(LN(flatten(X X^T Y))))``, the factorization machine block in its optimized form
    (``rk.factorization_machine``; Y is learned and the same for all samples), and ``LCB(X) = W_L X``, the linear
    compression block. Where n_F + n_L is not n, what is added is not X but W_R X.

    Args:
        in_features: n, vectors of a sample.
        embedding_dim: d, their elements.
        fm_features: n_F, vectors that the FMB makes.
        linear_features: n_L, vectors that the LCB makes.
        factors: k, columns of Y.
        hidden: widths of the MLP's hidden layers, with a ReLU behind each; none by default.
        device: of the parameters.

    Parameters: ``factors`` [n, k], ``compression`` [n_L, n] and, if there is one, ``residual`` [n_F + n_L, n] start
    normal, with variance 1 / n; ``fm_norm``, ``mlp`` and ``norm`` as ``torch.nn`` starts them.

    Raises:
        ValueError: a size is no positive integer, or ``hidden`` no sequence of them; the message names it.
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
        made = positive_integer("fm_features", fm_features)
        kept = positive_integer("linear_features", linear_features)
        k = positive_integer("factors", factors)
        self.out_features = made + kept
        widths = [n * k, *positive_integers("hidden", hidden), made * d]
        self.factors = nn.Parameter(torch.empty(n, k, device=device))
        self.fm_norm = nn.LayerNorm(n * k, device=device)
        layers = [nn.Linear(*pair, device=device) for pair in itertools.pairwise(widths)]
        self.mlp = nn.Sequential(*itertools.chain(*((layer, nn.ReLU()) for layer in layers[:-1])), layers[-1])
        self.compression = nn.Parameter(torch.empty(kept, n, device=device))
        if n == self.out_features:
            self.register_parameter("residual", None)
        else:
            self.residual = nn.Parameter(torch.empty(self.out_features, n, device=device))
        self.norm = nn.LayerNorm(d, device=device)
        for matrix in (self.factors, self.compression, self.residual):
            if matrix is not None:
                nn.init.normal_(matrix, std=n**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """[B, n, d] -> [B, n_F + n_L, d]; differentiable once.

        Of float32, float16 or bfloat16, that of the parameters. Under autocast, of any of the three, with parameters of
        float32: then the result is what torch's layer norm makes of the sum, which has autocast's dtype if there is a
        ``residual`` or x has autocast's dtype, and else is float32. On the CPU the norm keeps that dtype; on a GPU it
        gives float32.

        Raises:
            ValueError: another shape or dtype.
        """
        check_layer_dtype("x", x, self.factors.dtype)
        if x.dim() != 3 or x.shape[1:] != (self.in_features, self.embedding_dim):
            allowed = f"[B, in_features = {self.in_features}, embedding_dim = {self.embedding_dim}]"
            raise ValueError(f"x must be {allowed}, got shape {list(x.shape)}")
        interactions = factorization_machine(x, self.factors).flatten(1)
        made = self.mlp(self.fm_norm(interactions)).unflatten(1, (-1, self.embedding_dim))
        both = torch.cat((made, _combinations(self.compression, x)), dim=1)
        return self.norm(both + (x if self.residual is None else _combinations(self.residual, x)))


def _combinations(weight: Tensor, x: Tensor) -> Tensor:
    """W X of each sample: weight [m, n], x [B, n, d] -> [B, m, d].

    ``weight @ x`` would copy x to make one product of it, and what it gives is transposed: slow to add to.
    """
    return torch.bmm(weight.expand(x.shape[0], -1, -1), x)


class Wukong(nn.Sequential):
    """The interaction stack: ``num_layers`` of ``rk.WukongLayer``, the first for the features' vectors.

    Layer l has interactions of up to 2^l vectors. A logit is an MLP's of the flattened result.

    Args:
        in_features: n, vectors of a sample: the pooled embeddings, and one that an MLP makes of the dense columns.
        embedding_dim, fm_features, linear_features, factors, hidden, device: as ``rk.WukongLayer``'s, of every layer.
        num_layers: at least 1.

    [B, in_features, embedding_dim] -> [B, out_features = fm_features + linear_features, embedding_dim]; dtypes as of
    ``rk.WukongLayer``, layer by layer.

    A slice is a ``torch.nn.Sequential`` of these layers, and what is appended or removed counts: ``out_features`` is
    that of the last layer, and a TypeError where it has none. A layer that does not fit the one before it raises
    ValueError in the forward.

    Raises:
        ValueError: a size is no positive integer, or ``hidden`` no sequence of them; the message names it.
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
        hidden = positive_integers("hidden", hidden)  # once: an iterator would be empty for the second layer
        sizes = {"fm_features": fm_features, "linear_features": linear_features, "factors": factors}
        layers: list[WukongLayer] = []
        for _ in range(num_layers):
            inputs = layers[-1].out_features if layers else in_features
            layers.append(WukongLayer(inputs, embedding_dim, **sizes, hidden=hidden, device=device))
        super().__init__(*layers)

    @property
    def out_features(self) -> int:
        """Vectors of a sample that the last layer gives.

        Raises:
            TypeError: the last layer, one that was appended, has no ``out_features``.
        """
        last: Any = self[-1]
        if not hasattr(last, "out_features"):  # its AttributeError would become one about this module, in torch
            raise TypeError(f"layer {len(self) - 1}, the last, is a {type(last).__name__}, which has no out_features")
        return last.out_features

    def __getitem__(self, index: int | slice) -> nn.Module:
        # torch's would make a stack of the slice's layers by this class's constructor, which takes sizes.
        return nn.Sequential(*list(self)[index]) if isinstance(index, slice) else super().__getitem__(index)
