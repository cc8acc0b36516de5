"""Seeded changes that make an argument of an op invalid, by the argument's type in the schema."""

from __future__ import annotations

import random

import torch
from torch import Tensor

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
]
INTEGERS = [0, 1, 2, 3, 7, -1, -2, 2**31 - 1, 2**31, -(2**31), 2**32, 2**40, 2**62, 2**63 - 1, -(2**63)]
FLOATS = [0.0, -0.0, 1.0, -1.0, 1e-45, 3e38, 1e300, -1e300, float("inf"), float("-inf"), float("nan")]
#: Options of any op, and invalid ones; bounds_check="none" trusts its input, which op_fuzz.py takes into account.
WORDS = [
    *("sum", "mean", "error", "ignore", "nearest", "stochastic", "floor", "rceil", "lru", "lfu", "l2", "decoupled"),
    *("sgd", "adagrad", "rowwise_adagrad", "adam", "rowwise_adam", "lamb", "ieee", "tf32"),
    *("fp32", "fp16", "bf16", "int8", "int4", "int2", "mx9", "mx6", "mx4", "mxfp8_e4m3", "mxfp4_e2m1", "mxint8"),
    *("", "SUM", "max", "int5", "\0", "é" * 9, "x" * 5000),
]


def change(r: random.Random, argument: torch._C.Argument, arguments: dict[str, object]) -> str:
    """Changes one of ``arguments``; returns a description of the change."""
    name, kind = argument.name, argument.type
    if isinstance(kind, torch._C.OptionalType):
        given = arguments.get(name, argument.default_value)
        if given is not None and r.random() < 0.2:
            arguments[name] = None
            return f"{name} = None"
        kind = kind.getElementType()
    before = arguments.get(name, argument.default_value)
    if isinstance(kind, torch._C.ListType):
        arguments[name], text = _list(r, before, kind.getElementType(), arguments)
    else:
        arguments[name], text = _one(r, before, kind, arguments)
        after = arguments[name]
        if argument.alias_info is not None and isinstance(after, Tensor) and after.is_neg():
            # torch's fallback lets the op write and fails afterwards.
            arguments[name] = after.resolve_neg()
    return f"{name}: {text}"


def _one(r: random.Random, before: object, kind: torch._C.JitType, arguments: dict) -> tuple[object, str]:
    """Another value of a type."""
    if isinstance(kind, torch._C.TensorType):
        return _tensor(r, before, arguments)
    if r.random() < 0.03:
        wrong = r.choice([None, "a", 1.5, [], torch.ones(2), 10**30])
        return wrong, f"{wrong!r}"
    name = str(kind)
    if name == "number" or isinstance(before, torch.dtype):  # a ScalarType
        after = r.choice(DTYPES)
    elif name == "bool":
        after = before is not True  # the previous change may have replaced the bool
    elif name == "str":
        after = r.choice(WORDS)
    elif name == "float":
        after = r.choice(FLOATS)
    else:
        near = before if isinstance(before, int) else 0
        after = r.choice([*INTEGERS, near - 1, near + 1, near + 1, 2 * near])
        after = max(min(after, 2**63 - 1), -(2**63))
    return after, f"{after!r:.60}"


def _list(r: random.Random, before: list | None, kind: torch._C.JitType, arguments: dict) -> tuple[list, str]:
    """A list with an element more, less or changed."""
    after = list(before or [])
    at = r.randrange(len(after) + 1)
    what = r.choice(["insert", "delete", "change", "change", "empty"])
    if what == "empty" or (what != "insert" and at == len(after)):
        return [], "[]"
    if what == "delete":
        del after[at]
        return after, f"without element {at}"
    near = after[min(at, len(after) - 1)] if after else None
    element, text = _one(r, near, kind, arguments)
    after[at : at + (what == "change")] = [element]
    return after, f"{what} element {at}: {text}"


def _tensor(r: random.Random, before: Tensor | None, arguments: dict) -> tuple[Tensor | None, str]:
    """A tensor that differs in one respect; instead of None, one that may fit."""
    if before is None:
        others = [a for a in arguments.values() if isinstance(a, Tensor)]
        after = r.choice([*others, torch.tensor(3), torch.zeros(0), torch.zeros(3, dtype=torch.int64)])
        return after.detach().clone(), f"given, {_text(after)}"
    if before.layout != torch.strided or before.is_meta or before.is_neg():
        return before, "as it is"
    ways = [_numbers] * 6 + [_sizes] * 4 + [_strides] * 3 + [_dtype] * 3 + [_rank] * 2 + [_kind, _another]
    return r.choice(ways)(r, before, arguments)


def _text(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}"


def _dtype(r: random.Random, before: Tensor, _: dict) -> tuple[Tensor, str]:
    """Changes the dtype; half of the time to one of the same kind."""
    integers = [torch.int32, torch.int64]
    same_kind = integers if before.dtype in integers else [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    after = before.detach().to(r.choice(same_kind if r.random() < 0.5 else DTYPES))
    return after, f"to {_text(after)}"


def _rank(r: random.Random, before: Tensor, _: dict) -> tuple[Tensor, str]:
    """Adds or removes a dimension."""
    t = before.detach()
    choices = [t.unsqueeze(r.randint(0, t.dim())), t.flatten(), t[None, None]]
    if t.dim():
        choices += [t.sum(0).to(t.dtype), t[:1].squeeze(0)]
    after = r.choice(choices).clone()
    return after, f"now {_text(after)}"


def _sizes(r: random.Random, before: Tensor, _: dict) -> tuple[Tensor, str]:
    """Changes the size of one dimension."""
    t = before.detach()
    if t.dim() == 0:
        return t.expand(r.choice([0, 1, 2])).clone(), "now a vector"
    dim = r.randrange(t.dim())
    length = t.shape[dim]
    want = r.choice([0, max(length - 1, 0), length // 2, length + 1, 2 * length + 1, 1])
    index = torch.arange(want) % length if length else torch.zeros(0, dtype=torch.int64)
    after = t.index_select(dim, index).clone()
    return after, f"now {_text(after)}"


def _strides(r: random.Random, before: Tensor, _: dict) -> tuple[Tensor, str]:
    """Gives a tensor other strides with equal values, or expands one element."""
    t = before.detach()
    gradient = before.requires_grad
    if t.dim() == 0 or 0 in t.shape:
        return t.clone().requires_grad_(gradient), "copied"
    what = r.choice(["gaps", "gaps", "transposed", "offset", "expanded"])
    if what == "gaps":
        wide = torch.stack([t, t], -1)
        after = wide[..., r.randrange(2)]
    elif what == "transposed":
        order = list(range(t.dim()))[::-1]
        after = t.permute(order).contiguous().permute(order)
    elif what == "offset":
        flat = torch.cat([t.flatten()[:1], t.flatten()])
        after = flat[1:].view(t.shape)
    else:
        after = t[:1].expand_as(t)
    return after.requires_grad_(gradient), f"{what}, strides {list(after.stride())}"


def _numbers(r: random.Random, before: Tensor, _: dict) -> tuple[Tensor, str]:
    """Changes up to three elements, or permutes them."""
    after = before.detach().clone(memory_format=torch.contiguous_format)
    flat = after.view(-1)
    if len(flat) == 0:
        return after, "empty as before"
    if r.random() < 0.15:
        order = list(range(len(flat)))
        r.shuffle(order)
        flat.copy_(flat[order])
        return after.requires_grad_(before.requires_grad), "shuffled"
    written = []
    for _ in range(r.choice([1, 1, 2, 3])):
        at = r.choice([0, len(flat) - 1, r.randrange(len(flat))])
        number = _number(r, flat, at)
        flat[at] = torch.tensor(number).to(flat.dtype)
        written.append(f"[{at}] = {number}")
    return after.requires_grad_(before.requires_grad), ", ".join(written)


def _number(r: random.Random, flat: Tensor, at: int) -> float | int | bool:
    if flat.dtype == torch.bool:
        return not bool(flat[at])
    if flat.dtype.is_floating_point or flat.dtype.is_complex:
        return r.choice(FLOATS)
    limits, near = torch.iinfo(flat.dtype), int(flat[at])
    number = r.choice([*INTEGERS, near - 1, near + 1, len(flat), int(flat.max()) + 1, limits.min, limits.max])
    return max(min(number, limits.max), limits.min)


def _kind(r: random.Random, before: Tensor, _: dict) -> tuple[Tensor, str]:
    """Changes the device or layout, negates lazily, or changes whether a gradient is required."""
    t = before.detach()
    what = r.choice(["meta", "sparse", "negated", "gradient", "parameter"])
    if what == "meta":
        return t.to("meta"), "on the meta device"
    if what == "sparse" and t.dim():
        return t.to_sparse(), "sparse"
    if what == "negated" and t.dtype != torch.bool:
        return torch._neg_view(t.clone()), "negated lazily"
    if what == "parameter":
        return torch.nn.Parameter(t.clone(), t.dtype.is_floating_point), "a parameter"
    return t.clone().requires_grad_(t.dtype.is_floating_point and not before.requires_grad), "gradient or none"


def _another(r: random.Random, before: Tensor, arguments: dict) -> tuple[Tensor, str]:
    """A copy of another argument."""
    names = [name for name, a in arguments.items() if isinstance(a, Tensor) and a is not before]
    if not names:
        return before.detach().clone(), "copied"
    name = r.choice(names)
    return arguments[name].detach().clone(), f"a copy of {name}"
