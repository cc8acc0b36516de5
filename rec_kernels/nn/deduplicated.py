"""Modules that see every distinct sample of a batch once."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from rec_kernels.nn.jagged.inverse import InverseKeyedJaggedTensor
from rec_kernels.nn.jagged.select_features import select_bags
from rec_kernels.nn.jagged.tensors import JaggedTensor, KeyedJaggedTensor
from rec_kernels.nn.jagged.windows import KeyedJaggedWindows
from rec_kernels.ops.expand import expand


def deduplicated(module: nn.Module, group: int | str = 0) -> Deduplicated:
    """Has a module compute on the distinct samples of a batch, and its outputs be those of the whole batch.

    Of an ``rk.InverseKeyedJaggedTensor``, ``module`` gets ``features.unique(group)``, U samples, and every tensor that
    it returns, [U, ...], is expanded to the batch's B samples (``rk.expand``, whose gradient sums what the samples of
    one distinct sample get). Lookups, projections and layers on top of them are computed U times in place of B. Any
    other input goes to ``module`` as it is.

    What is true of a module only when samples do not see each other stays true: statistics of batch norm count each
    distinct sample once, and the noise of dropout is the same for samples that are.

    Args:
        module: called with the features alone. It returns a tensor [U, ...] of a dtype of ``rk.expand``, an
            ``rk.KeyedTensor``, an ``rk.JaggedTensor`` of U rows, or tuples, lists and dicts of these.
        group: the number of the group, or the name of one of its features.

    Returns:
        A module with ``module`` as its submodule of that name. Its ``forward`` raises as ``InverseKeyedJaggedTensor
        .unique``, and ValueError where a tensor that ``module`` returns has not a row for each distinct sample.

    Raises:
        TypeError: ``module`` is no module; ``group`` is neither a number nor a name.
    """
    return Deduplicated(module, group)


class Deduplicated(nn.Module):
    """Result of ``rk.deduplicated``; the arguments are ``rk.deduplicated``'s."""

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
            lambda x: _expanded(x, inverse, rows), self.module(unique), is_leaf=lambda x: isinstance(x, _JAGGED)
        )

    def extra_repr(self) -> str:
        """The group, for printing."""
        return f"group={self.group!r}"


_JAGGED = (JaggedTensor, KeyedJaggedTensor, KeyedJaggedWindows, InverseKeyedJaggedTensor)


def _expanded(x: object, inverse: Tensor, rows: int) -> object:
    if isinstance(x, JaggedTensor):
        _check_rows(x.offsets().shape[0] - 1, rows)
        return JaggedTensor._of(*select_bags(x.values(), x.offsets(), x.weights_or_none(), inverse))
    if isinstance(x, _JAGGED):
        raise ValueError(f"the module returned a {type(x).__name__}, which is of features and not of samples")
    if not isinstance(x, torch.Tensor):
        return x
    _check_rows(x.shape[0] if x.dim() else None, rows)
    return expand(x, inverse)


def _check_rows(found: int | None, rows: int) -> None:
    if found != rows:
        got = "a tensor without dimensions" if found is None else f"{found} rows"
        raise ValueError(f"what the module returns must have a row for each of the {rows} distinct samples, got {got}")
