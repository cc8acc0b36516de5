"""What stands between the pooled embeddings and the top MLP in the trainer's models; what a forward costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import rec_kernels as rk
from rec_kernels.dlrm.config import TrainConfig
from rec_kernels.dlrm.data import Batch, Feature
from rec_kernels.dlrm.model import DLRM, DotInteraction


class CrossInteraction(nn.Module):
    """DCN V2's low-rank cross layers over the dense vector and the pooled embeddings: its stacked structure.

    Source: R. Wang et al. (arXiv:2008.13535); with DLRM's bottom MLP in front, as MLPerf's DLRM-DCNv2 has it.

    Args:
        num_features: F. embedding_dim: D.
        num_layers, low_rank: as ``rk.LowRankCrossNet``'s.

    Attributes:
        out_features: numbers of a row, (F + 1) D.
    """

    def __init__(self, num_features: int, embedding_dim: int, num_layers: int, low_rank: int):
        super().__init__()
        self.out_features = (num_features + 1) * embedding_dim
        self.cross = rk.LowRankCrossNet(self.out_features, num_layers, low_rank)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        """[B, ``out_features``] of dense [B, D] and sparse [B, F, D]."""
        return self.cross(torch.cat((dense, sparse.flatten(1)), dim=1))


class WukongInteraction(nn.Module):
    """Wukong's interaction stack over the dense vector and the pooled embeddings (B. Zhang et al., arXiv:2403.02545).

    Args:
        num_features: F. embedding_dim: D.
        num_layers: of the stack.
        features: vectors that either block of a layer makes.
        factors, hidden: as ``rk.WukongLayer``'s.

    Attributes:
        out_features: numbers of a row, 2 ``features`` D.
    """

    def __init__(
        self, num_features: int, embedding_dim: int, num_layers: int, features: int, factors: int, hidden: Sequence[int]
    ):
        super().__init__()
        blocks: dict[str, Any] = {
            "fm_features": features,
            "linear_features": features,
            "factors": factors,
            "hidden": hidden,
        }
        self.stack = rk.Wukong(num_features + 1, embedding_dim, num_layers, **blocks)
        self.out_features = self.stack.out_features * embedding_dim

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        """[B, ``out_features``] of dense [B, D] and sparse [B, F, D]."""
        return self.stack(torch.cat((dense.unsqueeze(1), sparse), dim=1)).flatten(1)


def interaction_of(config: TrainConfig) -> Callable[[int, int], nn.Module]:
    """What makes the interaction of the model that ``config.model`` names, from the number of features and D."""
    c = config
    return {
        "dlrm": DotInteraction,
        "dcnv2": lambda features, dim: CrossInteraction(features, dim, c.cross_layers, c.cross_rank),
        "wukong": lambda features, dim: WukongInteraction(
            features, dim, c.wukong_layers, c.wukong_features, c.wukong_factors, c.wukong_hidden
        ),
    }[config.model]


def flops_per_example(model: DLRM, features: Sequence[Feature], num_dense: int) -> int:
    """Of the products of matrices of a forward, two for a multiplication with its addition, as ``FlopCounterMode``.

    Counted on ``model``, of a row without ids: what a lookup adds up is not counted, and no counter of a cache moves.
    """

    def without_ids(shared: bool) -> rk.KeyedJaggedTensor | None:
        keys = [f.name for f in features if f.shared == shared]
        if shared and not keys:
            return None
        return rk.KeyedJaggedTensor(keys, torch.empty(0, dtype=torch.int64), lengths=torch.zeros(len(keys)).long())

    row = Batch(torch.zeros(1, num_dense), without_ids(False), torch.zeros(1), without_ids(True)).to(model.device)
    eager = torch.compiler.set_stance("force_eager")  # what is compiled is not counted
    with torch.no_grad(), eager, FlopCounterMode(display=False) as counter:
        model(row)
    return counter.get_total_flops()
