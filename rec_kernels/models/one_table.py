"""Shared parts of the modules of one table: bags of a ``JaggedTensor``, and dense parameters that stay float32."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from rec_kernels.nn.arguments import check_choice, positive_integer
from rec_kernels.nn.jagged.checks import check_offsets, has_data
from rec_kernels.nn.tables.layout import move, move_buffers
from rec_kernels.ops.layout_records import ID_DTYPES


class OneTable(nn.Module):
    """A module whose parameters and buffers are moved, never cast, as tables are.

    Args:
        num_embeddings: E; embedding_dim: D; pooling: "sum" or "mean"; bounds_check: "error" or "ignore".
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

    def _read(self, features) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """The parts of a jagged tensor of ids, and bool [N], True where an id is not in [0, E).

        Args:
            features: ``rk.JaggedTensor`` or TorchRec's: ids [N] int32 or int64, offsets [B + 1], weights [N] or None.

        Raises:
            ValueError: wrong shapes or dtypes; on the CPU, offsets that do not rise from 0 to N. IndexError: an id is
            out of range, on the CPU and with ``bounds_check`` "error"; not inside ``torch.compile``.
        """
        keys = getattr(features, "keys", list)
        if not hasattr(features, "offsets") or len(keys()) > 1:
            got = f"one of features {list(keys())}" if hasattr(features, "offsets") else type(features).__name__
            raise ValueError(
                f"features must be an rk.JaggedTensor or TorchRec's, the bags of one feature, got {got}: of a padded "
                "tensor, rk.JaggedTensor.from_dense makes one; of several features, features[name] is one"
            )
        values, offsets, weights = features.values(), features.offsets(), features.weights_or_none()
        if values.dim() != 1 or values.dtype not in ID_DTYPES:
            raise ValueError(f"values must be one row of int32 or int64 ids, got {values.dtype} {list(values.shape)}")
        if offsets.dim() != 1 or offsets.dtype not in ID_DTYPES or offsets.shape[0] < 1:
            raise ValueError(
                f"offsets must be one row of at least one int32 or int64, got {offsets.dtype} {list(offsets.shape)}"
            )
        if weights is not None and weights.shape != values.shape:
            raise ValueError(f"weights must have values' shape {list(values.shape)}, got {list(weights.shape)}")
        check_offsets(offsets, values.shape[0])
        bad = (values < 0) | (values >= self.num_embeddings)
        if self.bounds_check == "error" and has_data(values) and bad.any():
            place = int(bad.nonzero()[0])
            raise IndexError(
                f"values[{place}] = {int(values[place])} is out of range: ids must be in [0, {self.num_embeddings})"
            )
        return values, offsets, weights, bad


def without_autocast(t: Tensor) -> torch.autocast:
    """A block in which products with a tensor keep their float32."""
    # torch.amp.is_autocast_available() breaks graphs of torch 2.10 and 2.11; tables lie on these two, or on meta.
    return torch.autocast("cuda" if t.is_cuda else "cpu", enabled=False)
