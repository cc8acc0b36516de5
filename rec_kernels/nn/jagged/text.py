"""String forms of the jagged containers: keys and rows as in TorchRec, abbreviated if long."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor

from rec_kernels.nn.jagged.checks import is_readable

#: A container with more values is abbreviated to this many rows and values from either end of a list.
_MAX_VALUES, _ENDS = 1000, 3


def format_rows(name: str, values: Tensor, offsets: Tensor, weights: Tensor | None) -> str:
    """Formats an ``rk.JaggedTensor`` as a list of rows. On a GPU the host waits."""
    if not all(t is None or is_readable(t) for t in (values, offsets, weights)):
        return f"{name}(rows={offsets.shape[0] - 1}, {_shapes(values, weights)})"
    short, bounds = _is_long(values), offsets.cpu()
    rows = _jagged(values, bounds, short)
    if weights is None:
        return f"{name}({{\n    {rows}\n}})"
    return f'{name}({{\n    "values": {rows},\n    "weights": {_jagged(weights, bounds, short)}\n}})'


def format_bags(
    name: str, keys: Sequence[str], strides: Sequence[int], values: Tensor, offsets: Tensor, weights: Tensor | None
) -> str:
    """Formats an ``rk.KeyedJaggedTensor`` as a list of bags per key. On a GPU the host waits."""
    if not keys:
        return f"{name}()"
    if not all(t is None or is_readable(t) for t in (values, offsets, weights)):
        return f"{name}(keys={list(keys)}, stride_per_key={list(strides)}, {_shapes(values, weights)})"
    short, ends, bounds = _is_long(values), list(itertools.accumulate(strides, initial=0)), offsets.cpu()
    lines = []
    for key, (first, last) in zip(keys, itertools.pairwise(ends), strict=True):
        own = bounds[first : last + 1]
        bags = _jagged(values, own, short)
        if weights is not None:
            factors = _jagged(weights, own, short)
            bags = f'{{\n        "values": {bags},\n        "weights": {factors}\n    }}'
        lines.append(f'    "{key}": {bags}')
    return f"{name}({{\n" + ",\n".join(lines) + "\n})"


def format_columns(name: str, blocks: dict[str, Tensor], values: Tensor) -> str:
    """Formats an ``rk.KeyedTensor`` as a list of rows per key. On a GPU the host waits."""
    if not blocks:
        return f"{name}()"
    if not is_readable(values):
        widths = {key: block.shape[1] for key, block in blocks.items()}
        return f"{name}(length_per_key={widths}, {_shapes(values, None)})"
    short = _is_long(values)
    lines = [f'    "{key}": {_list(block, short)}' for key, block in blocks.items()]
    return f"{name}({{\n" + ",\n".join(lines) + "\n})"


def _is_long(values: Tensor) -> bool:
    return values.numel() > _MAX_VALUES


def _shapes(values: Tensor, weights: Tensor | None) -> str:
    text = f"values={values.dtype} {list(values.shape)} on {values.device}"
    return text if weights is None else f"{text}, with weights"


def _jagged(values: Tensor, bounds: Tensor, short: bool) -> str:
    """Formats the rows of ``values``; ``bounds`` [B + 1] are on the CPU."""
    count = max(bounds.shape[0] - 1, 0)
    rows = [_list(values[int(bounds[b]) : int(bounds[b + 1])], short) for b in _shown_indices(count, short)]
    return _join(rows, count)


def _list(t: Tensor, short: bool) -> str:
    """Formats [N, ...] as nested lists."""
    if t.dim() == 1:
        items = t[list(_shown_indices(len(t), short))] if short else t
        return _join([str(x) for x in items.tolist()], len(t))
    return _join([_list(t[i], short) for i in _shown_indices(t.shape[0], short)], t.shape[0])


def _shown_indices(count: int, short: bool) -> Sequence[int]:
    if not short or count <= 2 * _ENDS + 1:
        return range(count)
    return [*range(_ENDS), *range(count - _ENDS, count)]


def _join(items: list[str], count: int) -> str:
    if len(items) < count:
        items.insert(_ENDS, f"... {count - 2 * _ENDS} more ...")
    return "[" + ", ".join(items) + "]"
