"""Version counters of in-place ops, which raise in the same cases as torch's in-place ops.

torch generates kernels for this under the dispatch key ADInplaceOrView, but only for its own ops. Without one, autograd
would compute gradients from tensors that have changed since it saved them, and leaves that require grad would change
without an error. So this module registers a kernel for every op with a ``Tensor(a!)`` in its schema.

The package's own updates bypass these kernels, which would add 9 microseconds to a training step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from rec_kernels.ops.autograd import overload_of, signature_of

_implementations = torch.library.Library("rec_kernels", "IMPL")


def _changed(op: str) -> dict[int, str]:
    """Maps position -> name of the arguments that an op changes."""
    arguments = overload_of(op)._schema.arguments
    return {i: a.name for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write}


def _in_place_ops() -> dict[str, dict[int, str]]:
    names = [name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("rec_kernels::")]
    return {op: changed for op in sorted(names) if (changed := _changed(op))}


#: Op -> position -> name of the arguments that it changes.
_IN_PLACE = _in_place_ops()
_SIGNATURES = {op: signature_of(op) for op in _IN_PLACE}
_OVERLOADS = {op: overload_of(op) for op in _IN_PLACE}


def call_in_place(op: str, arguments: dict[str, Any]) -> None:
    """Calls ``torch.ops.rec_kernels.<op>`` for the package's updates: increment version counters, skip the checks."""
    given = {**_SIGNATURES[op], **arguments}
    call_uncounted(op, *given.values())  # by position: dozens of keyword arguments are slower
    increment_version([t for t in map(given.get, _IN_PLACE[op].values()) if t is not None])


def call_uncounted(op: str, *args: Any, **kwargs: Any) -> Any:
    """Calls an in-place op without incrementing version counters: a row cache moves rows but keeps their values."""
    if torch.compiler.is_compiling():  # torch.compile cannot trace the guard; the op increments counters
        return _OVERLOADS[op](*args, **kwargs)
    with torch._C._AutoDispatchBelowADInplaceOrView():
        return _OVERLOADS[op](*args, **kwargs)


def _register(op: str) -> None:
    overload, changed = _OVERLOADS[op], _IN_PLACE[op]

    def kernel(keyset: torch.DispatchKeySet, *inputs: object) -> object:
        # The dispatcher drops trailing arguments that equal their defaults.
        tensors = []
        for position, name in changed.items():
            if position < len(inputs) and isinstance(t := inputs[position], Tensor):
                _refuse(op, name, t)
                tensors.append(t)
        results = overload.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *inputs)
        increment_version(tensors)  # not before: a failed call changes nothing
        return results

    _implementations.impl(op, kernel, "ADInplaceOrView", with_keyset=True)


def _refuse(op: str, name: str, t: Tensor) -> None:
    """Raises RuntimeError where torch's in-place ops do, and where a derivative would be needed."""
    if t.is_inference() and not torch.is_inference_mode_enabled():
        raise RuntimeError(
            "Inplace update to inference tensor outside InferenceMode is not allowed: "
            f"rec_kernels::{op} changes {name}; call it inside torch.inference_mode(), or give it a clone of the tensor"
        )
    if not (t.requires_grad and torch.is_grad_enabled()):
        return
    what = "a tensor that requires grad"
    if t.is_leaf:
        what = "a leaf Variable that requires grad"
    elif t._is_view() and t._base is not None and t._base.is_leaf:
        what = "a view of a leaf Variable that requires grad"
    raise RuntimeError(
        f"{what} is being used in an in-place operation: rec_kernels::{op} changes {name}, and has no derivative; "
        "call it under torch.no_grad()"
    )


for _op in _IN_PLACE:
    _register(_op)
