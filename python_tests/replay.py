"""Replays of recorded calls of ops: what comes of a call today, and how it differs from what is recorded.

``adapt`` is the one place that knows how a call of the recording is spelt today. A recording is never edited.
"""

from __future__ import annotations

import re

import torch
from layout_calls import as_call
from recording import Reader
from torch import Tensor
from torch.utils._pytree import tree_leaves

from rec_kernels.testing import same_bits

#: Arguments of the recording that errors name in another way today: name then -> name now.
RENAMED: dict[str, str] = {"moment_offsets": "state_offsets", "partition_starts": "starts"}


def adapt(op: str, arguments: dict[str, object]) -> tuple[str, dict[str, object]]:
    """A recorded call as it is spelt today.

    Args:
        op: the op's name in the recording.
        arguments: by the names of the recorded schema; those that were not given are missing. Tensors that the call
            changes, and those that require a gradient, must go to today's op as they are.

    Returns:
        Today's op and arguments.
    """
    return as_call(op, arguments)


def outputs(op: str, arguments: dict[str, object], ops: object) -> list[Tensor]:
    """Results of an op of the namespace ``ops`` as a list: none, a tensor or several."""
    name, _, overload = op.partition(".")
    results = getattr(getattr(ops, name), overload or "default")(**arguments)
    return list(results) if isinstance(results, (list, tuple)) else [] if results is None else [results]


def backward_from(results: list[Tensor], grads: list[Tensor]) -> None:
    """The backward of the outputs that require a gradient; ``grads`` are theirs."""
    torch.autograd.backward([r for r in results if r.requires_grad], grads)


def differences(expected: object, found: object, place: str, *, exact: bool = True) -> list[str]:
    """Places where two values differ in structure, shape, dtype or bits; any NaN equals any other.

    Floats that are not ``exact`` come from torch's matrix products: they may differ as rounding has it.
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
    """Calls what was called then.

    Args:
        recording: where the entry is from.
        entry: a call that raised nothing.
        ops: where to call it: ``torch.ops.rec_kernels``, or a library of the same ops.
        backward: whether gradients are asked for, which only the package's own ops have.

    Returns:
        What differs: outputs, gradients, arguments after the call; a call that was right then and raises now.
    """
    given, after = recording.decode(entry["arguments"]), recording.decode(entry["arguments"])
    grads = recording.decode(entry.get("grads")) if backward else None
    if backward or "grads" not in entry:  # nothing that has a gradient changes an argument in its forward
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
    """Calls what raised an error then; says how today's error, or what it did to the arguments, is another."""
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
    """Words that an error must keep: the arguments it named, and all numbers."""
    named = entry["error"]["arguments"]
    return [w for w in words(entry["error"]["message"]) if w in named or re.fullmatch(r"-?\d+", w)]
