"""The jagged containers as trees of tensors: inputs and outputs of ``torch.export`` and of ``torch.utils._pytree``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils import _pytree

from rec_kernels.nn.jagged.container import JaggedContainer
from rec_kernels.nn.jagged.inverse import InverseKeyedJaggedTensor
from rec_kernels.nn.jagged.keyed_tensor import KeyedTensor
from rec_kernels.nn.jagged.tensors import JaggedTensor, KeyedJaggedTensor
from rec_kernels.nn.jagged.windows import KeyedJaggedWindows

_KINDS = (JaggedTensor, KeyedJaggedTensor, KeyedJaggedWindows, KeyedTensor, InverseKeyedJaggedTensor)


def _register(kind: type[JaggedContainer]) -> None:
    def flatten(x: Any) -> tuple[list, list]:
        # Lists, which saving a program and loading it leaves what they are.
        context = [getattr(x, name) for name in kind._others]
        if kind is KeyedJaggedTensor and x._stride is not None and (x._strides is not None or not x._keys):
            context.append(x._stride)  # the bags of other batches say it, and a program takes any number of them
        return [getattr(x, name) for name in kind._parts], context

    def unflatten(leaves: Iterable, context: Sequence) -> object:
        *fixed, stride = (*context, None) if len(context) == len(kind._others) else context
        x: Any = kind._made(leaves, fixed)
        if stride is not None:
            x._stride = stride
        return x

    def with_keys(x: object) -> tuple[list, list]:
        leaves, context = flatten(x)
        return [(_pytree.GetAttrKey(n), leaf) for n, leaf in zip(kind._parts, leaves, strict=True)], context

    _pytree.register_pytree_node(
        kind,
        flatten,
        unflatten,
        serialized_type_name=f"rec_kernels.{kind.__name__}",
        flatten_with_keys_fn=with_keys,
    )


def register() -> None:
    """Makes the containers known, once, when the package is imported."""
    for kind in _KINDS:
        _register(kind)
    # A saved program holds example inputs. They are tensors and names; loading them runs nothing.
    torch.serialization.add_safe_globals(list(_KINDS))
