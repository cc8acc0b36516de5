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

# Attributes that are plain values; the others are ``_parts``, or learned.
_OTHERS = {
    JaggedTensor: (),
    KeyedJaggedTensor: ("_keys", "_strides", "_inverse_keys"),
    KeyedJaggedWindows: ("_keys", "_strides"),
    KeyedTensor: ("_keys", "_lengths"),
    InverseKeyedJaggedTensor: ("_groups", "_keys"),
}
# Facts learned of the tensors do not hold for tensors that stand for them: None at first.
_LEARNED = {
    KeyedJaggedTensor: ("_offset_per_key",),
    KeyedJaggedWindows: ("_offset_per_key", "_bags"),
}


def _register(kind: type[JaggedContainer]) -> None:
    tensors, others, learned = kind._parts, _OTHERS[kind], _LEARNED.get(kind, ())

    def flatten(x: Any) -> tuple[list, list]:
        # Lists, which saving a program and loading it leaves what they are.
        context = [getattr(x, name) for name in others]
        if kind is KeyedJaggedTensor and x._stride is not None and (x._strides is not None or not x._keys):
            context.append(x._stride)  # the bags of other batches say it, and a program takes any number of them
        return [getattr(x, name) for name in tensors], context

    def unflatten(leaves: Iterable, context: Sequence) -> object:
        # The constructor's checks are left out: leaves may be anything that stands for a tensor.
        x: Any = object.__new__(kind)
        *fixed, stride = (*context, None) if len(context) == len(others) else context
        for name, value in zip((*tensors, *others), (*leaves, *fixed), strict=True):
            setattr(x, name, value)
        if stride is not None:
            x._stride = stride
        for name in learned:
            setattr(x, name, None)
        return x

    def with_keys(x: object) -> tuple[list, list]:
        leaves, context = flatten(x)
        return [(_pytree.GetAttrKey(n), leaf) for n, leaf in zip(tensors, leaves, strict=True)], context

    _pytree.register_pytree_node(
        kind,
        flatten,
        unflatten,
        serialized_type_name=f"rec_kernels.{kind.__name__}",
        flatten_with_keys_fn=with_keys,
    )


def register() -> None:
    """Makes the containers known, once, when the package is imported."""
    for kind in _OTHERS:
        _register(kind)
    # A saved program holds example inputs. They are tensors and names; loading them runs nothing.
    torch.serialization.add_safe_globals(list(_OTHERS))
