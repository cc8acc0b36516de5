"""What modules of one table have in common: they look up a ``JaggedTensor``'s bags."""

from __future__ import annotations

import torch
from torch import Tensor

from rec_kernels.nn.jagged import check_offsets


def check_bags(features, num_embeddings: int, bounds_check: str) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """The parts of a jagged tensor of ids, and which of its ids are out of range.

    Args:
        features: ``rk.JaggedTensor`` or TorchRec's: values [N] int32 or int64, offsets [B + 1], weights [N] or None.

    Returns:
        values, offsets, weights, and bool [N], True where an id is not in [0, num_embeddings).

    Raises:
        ValueError: values are not one row of integers; on the CPU, offsets that do not rise from 0 to N. IndexError: an
        id is out of range, on the CPU and with ``bounds_check`` "error".
    """
    values, offsets, weights = features.values(), features.offsets(), features.weights_or_none()
    if values.dim() != 1 or values.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"values must be one row of int32 or int64 ids, got {values.dtype} {list(values.shape)}")
    check_offsets(offsets, values.shape[0])
    bad = (values < 0) | (values >= num_embeddings)
    # Not where it would wait for a GPU, nor where a tracer has no data.
    told = bounds_check == "error" and values.device.type == "cpu" and type(values) is Tensor
    if told and not torch.compiler.is_compiling() and bad.any():
        place = int(bad.nonzero()[0])
        raise IndexError(
            f"values[{place}] = {int(values[place])} is out of range: ids must be in [0, {num_embeddings})"
        )
    return values, offsets, weights, bad


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raises ValueError unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        *first, last = (repr(choice) for choice in allowed)
        raise ValueError(f"{name} must be {', '.join(first)} or {last}, got {value!r}")
