"""Replays recorded calls of ops, and compares them with the recording.

``adapt`` is the only place that converts a recorded call to the current API. A recording is never edited.
"""

from __future__ import annotations

import re

import torch
from layout_calls import as_call
from recording import Reader
from torch import Tensor
from torch.utils._pytree import tree_leaves

from rec_kernels.testing import same_bits

#: Arguments that errors call otherwise today: recorded name -> current name.
RENAMED: dict[str, str] = {"moment_offsets": "state_offsets", "partition_starts": "starts"}


def adapt(op: str, arguments: dict[str, object]) -> tuple[str, dict[str, object]]:
    """Converts a recorded call to the current API.

    Args:
        op: the op's name in the recording.
        arguments: by the names of the recorded schema, without defaults. Tensors that the call mutates, and those that
            require a gradient, must reach the current op as they are.

    Returns:
        The current op and arguments.
    """
    return as_call(op, arguments)


def outputs(op: str, arguments: dict[str, object], ops: object) -> list[Tensor]:
    """Results of an op of the namespace ``ops`` as a list."""
    name, _, overload = op.partition(".")
    results = getattr(getattr(ops, name), overload or "default")(**arguments)
    return list(results) if isinstance(results, (list, tuple)) else [] if results is None else [results]


def backward_from(results: list[Tensor], grads: list[Tensor]) -> None:
    """Runs the backward of the outputs that require a gradient; ``grads`` are theirs."""
    torch.autograd.backward([r for r in results if r.requires_grad], grads)


def differences(expected: object, found: object, place: str, *, exact: bool = True) -> list[str]:
    """Positions where two values differ in structure, shape, dtype or bits; NaNs are equal.

    If not ``exact``, floats come from torch's matrix products and may differ by rounding.
    """
    if isinstance(expected, Tensor) and isinstance(found, Tensor):
        pairs = [(expected, found)]
        if torch.sparse_coo in (expected.layout, found.layout):
            if expected.layout != found.layout or expected.shape != found.shape:
                return [f"{place}: {found.layout} {list(found.shape)}"]
            pairs = [(expected._indices(), found._indices()), (expected._values(), found._values())]
        return [] if all((same_bits if exact else _close)(a.detach(), b.detach()) for a, b in pairs) else [place]
    if isinstance(expected, dict) and isinstance(found, dict) and expected.keys() == found.keys():
        return [d for name, e in expected.items() for d in differences(e, found[name], f"{place}.{name}", exact=exact)]
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        return [d for i, e in enumerate(expected) for d in differences(e, found[i], f"{place}[{i}]", exact=exact)]
    same = type(expected) is type(found) and (expected == found or (expected != expected and found != found))
    return [] if same else [f"{place}: {found!r:.80}, not {expected!r:.80}"]


def _close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5) if a.dtype.is_floating_point else torch.equal(a, b)


def gradients_of(arguments: dict[str, object]) -> dict[str, object]:
    """The gradients of the arguments that have one."""
    found = {}
    for name, a in arguments.items():
        grads = [t.grad for t in tree_leaves(a) if isinstance(t, Tensor) and t.is_leaf and t.grad is not None]
        if grads:
            found[name] = grads
    return found


def replay(recording: Reader, entry: dict, ops: object, *, backward: bool = True) -> list[str]:
    """Repeats a recorded call.

    Args:
        recording: of the entry.
        entry: a call that raised nothing.
        ops: ``torch.ops.rec_kernels``, or a library with the same ops.
        backward: whether to compute gradients, which only the package's own ops have.

    Returns:
        Differences of outputs, gradients and arguments after the call; or the error, if the call now raises.
    """
    given, after = recording.decode(entry["arguments"]), recording.decode(entry["arguments"])
    grads = recording.decode(entry.get("grads")) if backward else None
    if backward or "grads" not in entry:  # a forward with gradients changes no argument
        after |= recording.decode(entry["changed"])
    op, arguments = adapt(entry["op"], given)
    try:
        results = outputs(op, arguments, ops)
        if grads:
            backward_from(results, grads)
    except Exception as error:
        return [f"raises {error!r}"]
    found = differences(recording.decode(entry["results"]), results, "output")
    if grads:
        found += differences(recording.decode(entry["gradients"]), gradients_of(given), "gradient")
    return found + differences(after, given, "argument")


def replay_error(recording: Reader, entry: dict, ops: object) -> list[str]:
    """Repeats a call that raised an error; returns the differences in the error, and in the arguments afterwards."""
    given, unchanged = recording.decode(entry["arguments"]), recording.decode(entry["arguments"])
    try:
        op, arguments = adapt(entry["op"], given)
        outputs(op, arguments, ops)
    except Exception as error:
        kind, message = type(error).__name__, str(error)
        if kind != entry["error"]["type"]:
            return [f"raises {error!r}, not a {entry['error']['type']}: {entry['error']['message']}"]
        missing = [w for w in key_words(entry) if RENAMED.get(w, w) not in words(message)]
        found = [f"the error does not say {missing}: {message!r}, not {entry['error']['message']!r}"] if missing else []
        return found + differences(unchanged, given, "argument")
    return [f"raises nothing, not {entry['error']}"]


def words(message: str) -> list[str]:
    """The words and numbers of a message."""
    return re.findall(r"-?\d+|\w+", message)


def key_words(entry: dict) -> list[str]:
    """Words that an error must keep: names of arguments, and all numbers."""
    named = entry["error"]["arguments"]
    return [w for w in words(entry["error"]["message"]) if w in named or re.fullmatch(r"-?\d+", w)]
