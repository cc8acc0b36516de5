"""Registers the jagged containers as pytrees, for ``torch.export`` and ``torch.utils._pytree``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils import _pytree

from rec_kernels.nn.jagged.container import JaggedContainer
from rec_kernels.nn.jagged.inverse import InverseKeyedJaggedTensor
from rec_kernels.nn.jagged.jagged_tensor import JaggedTensor
from rec_kernels.nn.jagged.keyed_tensor import KeyedTensor
from rec_kernels.nn.jagged.tensors import KeyedJaggedTensor
from rec_kernels.nn.jagged.windows import KeyedJaggedWindows

_KINDS = (JaggedTensor, KeyedJaggedTensor, KeyedJaggedWindows, KeyedTensor, InverseKeyedJaggedTensor)


def _register(kind: type[JaggedContainer]) -> None:
    def flatten(x: Any) -> tuple[list, list]:
        # Lists survive saving and loading a program unchanged.
        context = [getattr(x, name) for name in kind._plain]
        if kind is KeyedJaggedTensor and x._stride is not None and (x._strides is not None or not x._keys):
            context.append(x._stride)  # otherwise it follows from the offsets, and a program accepts any batch size
        return [getattr(x, name) for name in kind._tensors], context

    def unflatten(leaves: Iterable, context: Sequence) -> object:
        *fixed, stride = (*context, None) if len(context) == len(kind._plain) else context
        x: Any = kind._from_attributes(leaves, fixed)
        if stride is not None:
            x._stride = stride
        return x

    def with_keys(x: object) -> tuple[list, list]:
        leaves, context = flatten(x)
        return [(_pytree.GetAttrKey(n), leaf) for n, leaf in zip(kind._tensors, leaves, strict=True)], context

    _pytree.register_pytree_node(
        kind,
        flatten,
        unflatten,
        serialized_type_name=f"rec_kernels.{kind.__name__}",
        flatten_with_keys_fn=with_keys,
    )


def register() -> None:
    """Registers the containers; called once, when the package is imported."""
    for kind in _KINDS:
        _register(kind)
    # A saved program holds example inputs, which are only tensors and names: loading them executes no code.
    torch.serialization.add_safe_globals(list(_KINDS))
