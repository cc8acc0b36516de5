"""Common base of the single-table modules: ``JaggedTensor`` input, and dense parameters that stay float32."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from rec_kernels.nn.arguments import check_choice, positive_integer
from rec_kernels.nn.jagged.checks import check_offsets, has_data
from rec_kernels.nn.tables.layout import move, move_buffers
from rec_kernels.ops.layout_records import ID_DTYPES


class OneTable(nn.Module):
    """Base class of modules with one pooled table; parameters and buffers are moved between devices but never cast.

    Args:
        num_embeddings: E. embedding_dim: D. pooling: "sum" or "mean". bounds_check: "error" or "ignore".
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, pooling: str, bounds_check: str) -> None:
        super().__init__()
        self.num_embeddings = positive_integer("num_embeddings", num_embeddings)
        self.embedding_dim = positive_integer("embedding_dim", embedding_dim)
        check_choice("pooling", pooling, ("sum", "mean"))
        check_choice("bounds_check", bounds_check, ("error", "ignore"))
        self.pooling, self.bounds_check = pooling, bounds_check

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OneTable:
        if recurse:
            for module in self.children():
                module._apply(fn)
        for name, parameter in self._parameters.items():
            if parameter is not None:
                move(self, name, fn)
        move_buffers(self, fn)
        return self

    def _unpack(self, features) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Returns the checked values, offsets and weights, and a bool mask [N]: True where an id is not in [0, E).

        Args:
            features: ``rk.JaggedTensor`` or TorchRec's: ids [N] int32 or int64, offsets [B + 1], weights [N] or None.

        Raises:
            ValueError: wrong shapes or dtypes; on the CPU, offsets that do not ascend from 0 to N. IndexError: an id is
            out of range, checked on the CPU with ``bounds_check`` "error", but not inside ``torch.compile``.
        """
        keys = getattr(features, "keys", list)
        if not hasattr(features, "offsets") or len(keys()) > 1:
            got = f"one with features {list(keys())}" if hasattr(features, "offsets") else type(features).__name__
            raise ValueError(
                f"features must be an rk.JaggedTensor or TorchRec's, with the bags of one feature, got {got}: convert "
                "a padded tensor with rk.JaggedTensor.from_dense; select one of several features with features[name]"
            )
        values, offsets, weights = features.values(), features.offsets(), features.weights_or_none()
        if values.dim() != 1 or values.dtype not in ID_DTYPES:
            raise ValueError(f"values must be int32 or int64 [N], got {values.dtype} {list(values.shape)}")
        if offsets.dim() != 1 or offsets.dtype not in ID_DTYPES or offsets.shape[0] < 1:
            raise ValueError(f"offsets must be int32 or int64 [B + 1], got {offsets.dtype} {list(offsets.shape)}")
        if weights is not None and weights.shape != values.shape:
            raise ValueError(f"weights must have values' shape {list(values.shape)}, got {list(weights.shape)}")
        check_offsets(offsets, values.shape[0])
        bad = (values < 0) | (values >= self.num_embeddings)
        if self.bounds_check == "error" and has_data(values) and bad.any():
            first = int(bad.nonzero()[0])
            raise IndexError(
                f"values[{first}] = {int(values[first])} is out of range: ids must be in [0, {self.num_embeddings})"
            )
        return values, offsets, weights, bad


def without_autocast(t: Tensor) -> torch.autocast:
    """Returns a context that disables autocast on the tensor's device, so that matrix products stay float32."""
    # torch.amp.is_autocast_available() causes graph breaks in torch 2.10 and 2.11; tables are on cuda, cpu or meta.
    return torch.autocast("cuda" if t.is_cuda else "cpu", enabled=False)
