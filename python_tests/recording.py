"""Recordings: calls and what came of them, as numbers in a zip file that nothing executes.

``recorded_*.zip`` has two members: ``index.json`` and ``tensors.bin``. A tensor of the index is its dtype, its shape
and the place of its bytes in ``tensors.bin``, where equal bytes lie once. All else of the index is plain JSON.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

DATA = Path(__file__).with_name("data")
_MEMBERS = ("index.json", "tensors.bin")
_EPOCH = (1980, 1, 1, 0, 0, 0)  # a recording made again has the same bytes


class UnrecordableError(ValueError):
    """A value that a recording has no form for: a lazily negated tensor, one of another device, a callable."""


class Writer:
    """Collects entries and writes them to a file."""

    def __init__(self) -> None:
        self._blob, self._places = bytearray(), {}

    def encode(self, value: object) -> object:
        """A value as JSON has it.

        Args:
            value: tensors, dtypes, numbers, strings, None, and lists, tuples and dictionaries (of str) of such.

        Raises:
            UnrecordableError: anything else.
        """
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, torch.dtype):
            return {"dtype": _name(value)}
        if isinstance(value, Mapping):
            return {"of": {str(name): self.encode(v) for name, v in value.items()}}
        if isinstance(value, (list, tuple)):
            return [self.encode(v) for v in value]
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise UnrecordableError(f"a recording has no form for a {type(value).__name__}")

    def _tensor(self, t: Tensor) -> dict[str, object]:
        if t.layout == torch.sparse_coo:
            return {"sparse": [self._tensor(t._indices()), self._tensor(t._values()), list(t.shape)]}
        if t.layout != torch.strided or t.device.type != "cpu" or t.is_neg() or t.is_conj():
            raise UnrecordableError(f"a recording has no form for this tensor: {t.layout}, {t.device}")
        found: dict[str, object] = {"tensor": _name(t.dtype), "shape": list(t.shape)}
        if not t.is_contiguous():
            found["stride"] = list(t.stride())
        found["at"] = self._place(_bytes(_span(t.detach())))
        if t.requires_grad:
            found["requires_grad"] = True
        return found

    def _place(self, content: bytes) -> int:
        """Position of these bytes in ``tensors.bin``."""
        if content not in self._places:
            self._places[content] = len(self._blob)
            self._blob += content
        return self._places[content]

    def write(self, path: Path, index: object, compression: int = zipfile.ZIP_DEFLATED) -> None:
        """Writes the entries that ``encode`` has made, in whatever lists and dictionaries they are."""
        contents = (json.dumps(index, separators=(",", ":")).encode(), bytes(self._blob))
        with zipfile.ZipFile(path, "w", compression, compresslevel=9) as file:
            for name, content in zip(_MEMBERS, contents, strict=True):
                file.writestr(zipfile.ZipInfo(name, _EPOCH), content, compression)


class Reader:
    """A file of ``Writer``: ``index`` as it was written, and what its entries mean."""

    def __init__(self, name: str) -> None:
        with zipfile.ZipFile(DATA / name) as file:
            self.index = json.loads(file.read(_MEMBERS[0]))
            self._blob = bytearray(file.read(_MEMBERS[1]))

    def decode(self, entry: object) -> object:
        """The value that became this entry, with tensors of its own; tuples are lists."""
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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _span_length(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from a tensor's first to its last."""
    return 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))


def _span(t: Tensor) -> Tensor:
    """The memory that a tensor lies in, from its first element to its last."""
    if t.is_contiguous():
        return t
    return t.as_strided((_span_length(t.shape, t.stride()),), (1,), t.storage_offset())


def _bytes(t: Tensor) -> bytes:
    return t.contiguous().flatten().view(torch.uint8).numpy().tobytes() if t.numel() else b""
