"""The low-rank cross layers of DCN V2: each weight matrix is the product of two narrow matrices.

Source: R. Wang, R. Shivanna, D. Z. Cheng, S. Jain, D. Lin, L. Hong and E. H. Chi, "DCN V2: Improved Deep & Cross
Network and Practical Lessons for Web-scale Learning to Rank Systems" (arXiv:2008.13535).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from rec_kernels.nn.arguments import check_layer_dtype, positive_integer


class LowRankCrossNet(nn.Module):
    """``x_{l+1} = x_0 * (W_l (V_l x_l) + b_l) + x_l``: crosses of up to ``num_layers + 1`` input columns.

    The parameters have the names and shapes of TorchRec's ``LowRankCrossNet``: the two state dicts are interchangeable.
    The paper's stacked structure is ``torch.nn.Sequential(rk.LowRankCrossNet(...), mlp)``. Its parallel structure feeds
    the input to both modules and the concatenation of their outputs to the final layer.

    Args:
        in_features: N, number of input columns.
        num_layers: number of cross layers, at least 1.
        low_rank: r, rank of the weight matrices, at least 1. A layer takes 2 N r multiplications per sample, fewer than
            a full matrix if r is below N / 2.
        device: device of the parameters.

    Each layer has a matrix [N, r] in ``W_kernels``, a matrix [r, N] in ``V_kernels`` and a vector [N] in ``bias``.
    Matrices are initialized from a normal distribution with variance 2 / (N + r), biases with zeros.

    Raises:
        ValueError: a size is not a positive integer; the message names it.
    """

    def __init__(
        self, in_features: int, num_layers: int, low_rank: int = 1, *, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.in_features = positive_integer("in_features", in_features)
        self.num_layers = positive_integer("num_layers", num_layers)
        self.low_rank = positive_integer("low_rank", low_rank)

        def parameters(*shape: int) -> nn.ParameterList:
            return nn.ParameterList(nn.Parameter(torch.empty(shape, device=device)) for _ in range(self.num_layers))

        self.W_kernels = parameters(self.in_features, self.low_rank)
        self.V_kernels = parameters(self.low_rank, self.in_features)
        self.bias = parameters(self.in_features)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reinitialize all parameters from torch's default generator."""
        for matrix in (*self.W_kernels, *self.V_kernels):
            nn.init.xavier_normal_(matrix)
        for bias in self.bias:
            nn.init.zeros_(bias)

    def forward(self, input: Tensor) -> Tensor:
        """Applies all cross layers, [B, N] -> [B, N]; differentiable any number of times.

        The input must have the parameters' dtype. Under autocast it may be float32, float16 or bfloat16: the matrix
        products use the autocast dtype, and the result has that dtype only if the input has it, else float32.

        Raises:
            ValueError: the input has another shape or dtype.
        """
        check_layer_dtype("input", input, self.bias[0].dtype)
        if input.dim() != 2 or input.shape[1] != self.in_features:
            raise ValueError(f"input must be [B, in_features = {self.in_features}], got shape {list(input.shape)}")
        x = input
        for w, v, bias in zip(self.W_kernels, self.V_kernels, self.bias, strict=True):
            # Add in place: the backward does not need the sum, and this saves an allocation.
            # ``torch.addcmul`` would save a pass here, but its backward costs more because it multiplies by 1.
            x = (input * functional.linear(functional.linear(x, v), w, bias)).add_(x)
        return x

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, num_layers={self.num_layers}, low_rank={self.low_rank}"
