"""Modules that compute once per distinct sample of a batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from rec_kernels.nn.jagged.inverse import InverseKeyedJaggedTensor
from rec_kernels.nn.jagged.jagged_tensor import JaggedTensor
from rec_kernels.nn.jagged.select_features import select_bags
from rec_kernels.nn.jagged.tensors import KeyedJaggedTensor
from rec_kernels.nn.jagged.windows import KeyedJaggedWindows
from rec_kernels.ops.expand import expand


def deduplicated(module: nn.Module, group: int | str = 0) -> Deduplicated:
    """Wraps a module so that it computes on the distinct samples of a batch and returns outputs for the whole batch.

    Given an ``rk.InverseKeyedJaggedTensor``, the wrapper calls ``module`` with ``features.unique(group)``, U samples,
    and expands every tensor it returns, [U, ...], to the batch's B samples (``rk.expand``, whose gradient sums over all
    samples that share a distinct sample). Lookups, projections and layers after them run on U samples instead of B. Any
    other input is passed to ``module`` unchanged.

    Layers that mix samples behave differently: batch norm counts each distinct sample once in its statistics, and
    dropout draws the same noise for all samples that share a distinct sample.

    Args:
        module: called with the features alone. It returns a tensor [U, ...] of a dtype that ``rk.expand`` takes, an
            ``rk.KeyedTensor``, an ``rk.JaggedTensor`` of U rows, or tuples, lists and dicts of these.
        group: the index of the group, or the name of one of its features.

    Returns:
        A module with ``module`` as its submodule of that name. Its ``forward`` raises as ``InverseKeyedJaggedTensor
        .unique``, and ValueError if a tensor returned by ``module`` does not have one row per distinct sample.

    Raises:
        TypeError: ``module`` is not a module; ``group`` is neither an int nor a name.
    """
    return Deduplicated(module, group)


class Deduplicated(nn.Module):
    """Wrapper module returned by ``rk.deduplicated``; the arguments are ``rk.deduplicated``'s."""

    def __init__(self, module: nn.Module, group: int | str) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
        if isinstance(group, bool) or not isinstance(group, (int, str)):
            raise TypeError(f"group must be a group's number, or the name of one of its features, got {group!r}")
        self.module, self.group = module, group

    def forward(self, features):
        """Runs the module on the distinct samples; see ``rk.deduplicated``."""
        if not isinstance(features, InverseKeyedJaggedTensor):
            return self.module(features)
        unique, inverse = features.unique(self.group), features.inverse(self.group)
        rows = unique.stride()
        return _pytree.tree_map(
            lambda x: _expand(x, inverse, rows), self.module(unique), is_leaf=lambda x: isinstance(x, _JAGGED)
        )

    def extra_repr(self) -> str:
        """Shows the group when printed."""
        return f"group={self.group!r}"


_JAGGED = (JaggedTensor, KeyedJaggedTensor, KeyedJaggedWindows, InverseKeyedJaggedTensor)


def _expand(x: object, inverse: Tensor, rows: int) -> object:
    if isinstance(x, JaggedTensor):
        _check_row_count(x.offsets().shape[0] - 1, rows)
        return JaggedTensor._from_parts(*select_bags(x.values(), x.offsets(), x.weights_or_none(), inverse))
    if isinstance(x, _JAGGED):
        raise ValueError(f"the module returned a {type(x).__name__}, which has features instead of one row per sample")
    if not isinstance(x, torch.Tensor):
        return x
    _check_row_count(x.shape[0] if x.dim() else None, rows)
    return expand(x, inverse)


def _check_row_count(found: int | None, rows: int) -> None:
    if found != rows:
        got = "a tensor without dimensions" if found is None else f"{found} rows"
        raise ValueError(f"the module's output must have one row for each of the {rows} distinct samples, got {got}")
