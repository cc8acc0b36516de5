"""The cross layers of DCN V2, whose matrices are products of two narrow ones.

Source: R. Wang, R. Shivanna, D. Z. Cheng, S. Jain, D. Lin, L. Hong and E. H. Chi, "DCN V2: Improved Deep & Cross
Network and Practical Lessons for Web-scale Learning to Rank Systems" (arXiv:2008.13535).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from rec_kernels.nn.arguments import check_layer_dtype, positive_integer


class LowRankCrossNet(nn.Module):
    """``x_{l+1} = x_0 * (W_l (V_l x_l) + b_l) + x_l``: products of up to ``num_layers + 1`` columns of the input.

    TorchRec's ``LowRankCrossNet`` with its parameters, so that a state of one is a state of the other. What the paper
    calls the stacked structure is ``torch.nn.Sequential(rk.LowRankCrossNet(...), mlp)``; in the parallel one the input
    goes to both, and their results side by side to the last layer.

    Args:
        in_features: N, columns of the input.
        num_layers: cross layers, at least 1.
        low_rank: r, columns of the narrow matrices, at least 1. A layer multiplies 2 N r times for a sample, less often
            than with a full matrix where r is below N / 2.
        device: of the parameters.

    ``W_kernels`` are matrices [N, r], ``V_kernels`` [r, N] and ``bias`` vectors [N], one of each layer. Matrices start
    normal, with variance 2 / (N + r); biases start as zeros.

    Raises:
        ValueError: a size is no positive integer; the message names it.
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
        """The numbers to start with, drawn anew from torch's generator."""
        for matrix in (*self.W_kernels, *self.V_kernels):
            nn.init.xavier_normal_(matrix)
        for bias in self.bias:
            nn.init.zeros_(bias)

    def forward(self, input: Tensor) -> Tensor:
        """[B, N] -> [B, N]; differentiable any number of times.

        Of the parameters' dtype. Under autocast of float32, float16 or bfloat16: the products are of autocast's dtype,
        and the result, to which the input is added, is of it only if the input is; else it is float32.

        Raises:
            ValueError: another shape or dtype.
        """
        check_layer_dtype("input", input, self.bias[0].dtype)
        if input.dim() != 2 or input.shape[1] != self.in_features:
            raise ValueError(f"input must be [B, in_features = {self.in_features}], got shape {list(input.shape)}")
        x = input
        for w, v, bias in zip(self.W_kernels, self.V_kernels, self.bias, strict=True):
            # In place: the backward needs nothing of the sum, and no other tensor of this size is allocated for it.
            # ``torch.addcmul`` would save a pass here, and costs more in its backward, which multiplies by 1.
            x = (input * functional.linear(functional.linear(x, v), w, bias)).add_(x)
        return x

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, num_layers={self.num_layers}, low_rank={self.low_rank}"
