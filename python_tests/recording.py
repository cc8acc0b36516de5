"""Reads recordings: calls and their results in a zip file, as data without code.

``recorded_*.zip`` has two members: ``index.json`` and ``tensors.bin``. A tensor in the index is its dtype, its shape
and the position of its bytes in ``tensors.bin``, which stores equal bytes once. The rest of the index is plain JSON.

A recording has the results of the ops, modules and programs of the commit that its index names, and is never changed.
The scripts that made recordings used the API of that time, and are only in git's history:
``git log -- 'python_tests/record_*.py'``.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

DATA = Path(__file__).with_name("data")
_MEMBERS = ("index.json", "tensors.bin")


class Reader:
    """A recording: the raw ``index``, and a decoder of its entries."""

    def __init__(self, name: str) -> None:
        with zipfile.ZipFile(DATA / name) as file:
            self.index = json.loads(file.read(_MEMBERS[0]))
            self._blob = bytearray(file.read(_MEMBERS[1]))

    def decode(self, entry: object) -> object:
        """Decodes an entry to its value, with new tensors; tuples become lists."""
        if isinstance(entry, list):
            return [self.decode(e) for e in entry]
        if not isinstance(entry, dict):
            return entry
        if "tensor" in entry:
            return self._tensor(entry)
        if "sparse" in entry:
            indices, values, shape = entry["sparse"]
            return torch.sparse_coo_tensor(self._tensor(indices), self._tensor(values), shape, check_invariants=True)
        if "dtype" in entry:
            return getattr(torch, entry["dtype"])
        return {name: self.decode(e) for name, e in entry["of"].items()}

    def _tensor(self, entry: dict) -> Tensor:
        shape, dtype = entry["shape"], getattr(torch, entry["tensor"])
        if 0 in shape:
            t = torch.empty(shape, dtype=dtype)
        else:
            count = _span_length(shape, entry["stride"]) if "stride" in entry else torch.Size(shape).numel()
            flat = torch.frombuffer(self._blob, dtype=torch.uint8, count=count * dtype.itemsize, offset=entry["at"])
            flat = flat.clone().view(dtype)
            t = flat.as_strided(shape, entry["stride"]) if "stride" in entry else flat.view(shape)
        return t.requires_grad_(entry.get("requires_grad", False))


def _span_length(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Number of elements from a tensor's first to its last."""
    return 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
