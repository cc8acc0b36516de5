"""JaggedTensor: rows of different lengths, with TorchRec's interface."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from rec_kernels.nn.arguments import integer_from
from rec_kernels.nn.jagged import bounds, checks, text
from rec_kernels.nn.jagged.container import BagContainer
from rec_kernels.ops.layout_records import check_tensor, listed
from rec_kernels.ops.tracing import cannot_read


class JaggedTensor(BagContainer):
    """Rows of different lengths: row b is ``values[offsets[b] : offsets[b+1]]``.

    Args:
        values: [N, ...].
        weights: [N] floating-point weights, or None.
        lengths: [B] int32 or int64, each at least 0, with a sum of at most N: instead of offsets, or consistent with
            them.
        offsets: [B + 1] int32 or int64, non-decreasing, in [0, N]. Values before the first offset and after the last
            belong to no row.

    The argument order is TorchRec's.

    Raises:
        ValueError: shapes, dtypes or devices do not match; on the CPU, offsets are not non-decreasing in [0, N]. On a
            GPU, methods that read offsets raise: ``to_dense()``, ``to_padded_dense()``, some lookups. TypeError: an
            argument is not a tensor. Compiled code raises none of these.
    """

    _tensors = ("_values", "_offsets", "_weights")

    def __init__(
        self,
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        if not torch.compiler.is_compiling():
            checks.check_values(values)
            given, offsets = offsets, bounds.resolve_offsets(values, lengths, offsets)
            if weights is not None:
                checks.check_weights(weights, values)
            checks.check_bounds(offsets, values.shape[0], _row_name, lengths if given is None else None)
        elif offsets is None:
            offsets = bounds.to_offsets(lengths)
        self._values, self._offsets, self._weights = values, offsets, weights

    @classmethod
    def _from_parts(cls, values: Tensor, offsets: Tensor, weights: Tensor | None = None) -> JaggedTensor:
        """Creates a tensor from consistent parts, without checks."""
        new = cls.__new__(cls)
        new._values, new._offsets, new._weights = values, offsets, weights
        return new

    def to_dense(self) -> list[Tensor]:
        """Splits the values into one tensor per row.

        Raises:
            ValueError: on a GPU, or after an in-place change, offsets are not non-decreasing in [0, N].
        """
        return self._split_rows(self._values)

    def to_dense_weights(self) -> list[Tensor] | None:
        """``to_dense()`` of the weights, with the same errors; None without weights."""
        return None if self._weights is None else self._split_rows(self._weights)

    def _split_rows(self, numbers: Tensor) -> list[Tensor]:
        ends = self._read_offsets().tolist()
        return [numbers[a:b] for a, b in itertools.pairwise(ends)]

    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor:
        """[B, L, ...]: the rows, truncated or padded to ``desired_length``; None: the length of the longest row.

        On a GPU the host waits. Compiled code does not check offsets: a row with bad offsets is padding, or raises
        torch's index error.

        Raises:
            ValueError: as ``to_dense()``; ``desired_length`` is not an integer, or is negative.
        """
        return self._pad(self._values, desired_length, padding_value)

    def to_padded_dense_weights(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor | None:
        """[B, L]: ``to_padded_dense()`` of the weights, with the same errors; None without weights."""
        return None if self._weights is None else self._pad(self._weights, desired_length, padding_value)

    def _pad(self, numbers: Tensor, desired_length: int | None, padding_value: float) -> Tensor:
        if not cannot_read(self._offsets):
            self._read_offsets()
        lengths = self.lengths()
        batch = lengths.shape[0]  # symbolic in an exported program; len() would specialize it
        if desired_length is None:
            desired_length = int(lengths.max()) if batch else 0
        elif not isinstance(desired_length, torch.SymInt):
            desired_length = integer_from(0, "desired_length", desired_length)
        places = torch.arange(desired_length, device=lengths.device)
        inside = places < lengths[:, None]
        source = (self._offsets[:-1, None] + places)[inside]
        shape = (batch, desired_length, *numbers.shape[1:])
        padded = torch.full(shape, padding_value, dtype=numbers.dtype, device=numbers.device)
        return padded.masked_scatter(inside.view(*inside.shape, *[1] * (len(shape) - 2)), numbers[source])

    @staticmethod
    def from_dense(values: Sequence[Tensor], weights: Sequence[Tensor] | None = None) -> JaggedTensor:
        """Concatenates tensors, one per row, as in TorchRec.

        Args:
            values: B tensors [N_b, ...], at least one. weights: B tensors [N_b], or None.

        Raises:
            ValueError: ``values`` is empty, or weights are not floating-point or do not have the rows' lengths.
        """
        values = listed(values, "values")
        if not values:
            raise ValueError("values must have at least one tensor, one per row, got none")
        counts = _row_lengths("values", values)
        if weights is not None and (other := _row_lengths("weights", weights)) != counts:
            raise ValueError(f"weights must have rows as long as those of values, {counts}, got {other}")
        joined = torch.cat(values)
        lengths = torch.tensor(counts, dtype=torch.int32, device=joined.device)
        return JaggedTensor(joined, None if weights is None else torch.cat(list(weights)), lengths)

    @staticmethod
    def from_dense_lengths(values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> JaggedTensor:
        """Takes the first ``lengths[b]`` values of each row of a dense tensor, as in TorchRec.

        Args:
            values: [B, L, ...]. lengths: [B] int32 or int64, in [0, L]. weights: [B, L] or None.

        Raises:
            ValueError: a wrong shape or dtype; on the CPU, a length out of range.
        """
        check_tensor("values", values)
        if values.dim() < 2:
            raise ValueError(f"values must be [B, L, ...], got {list(values.shape)}")
        checks.check_integers("lengths", lengths, values)
        if lengths.shape != values.shape[:1]:
            raise ValueError(f"lengths must be [{values.shape[0]}], one per row of values, got {list(lengths.shape)}")
        if weights is not None:
            check_tensor("weights", weights)
            if weights.shape != values.shape[:2]:
                raise ValueError(f"weights must be {list(values.shape[:2])}, like values, got {list(weights.shape)}")
        columns = values.shape[1]
        if checks.has_data(lengths) and len(bad := ((lengths < 0) | (lengths > columns)).nonzero()):
            i = int(bad[0])
            raise ValueError(f"lengths[{i}] = {int(lengths[i])} must be in [0, {columns}], the columns of values")
        inside = torch.arange(columns, device=values.device) < lengths[:, None]
        return JaggedTensor(values[inside], None if weights is None else weights[inside], lengths)

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> JaggedTensor:
        """Creates a tensor without rows, as in TorchRec, except that offsets are [0].

        Args:
            is_weighted: whether the result has (empty) weights. lengths_dtype: int32 or int64.
            values_dtype, weights_dtype: None: torch's default dtype.
        """
        weights = torch.zeros(0, dtype=weights_dtype, device=device) if is_weighted else None
        return JaggedTensor(
            torch.zeros(0, dtype=values_dtype, device=device),
            offsets=torch.zeros(1, dtype=lengths_dtype, device=device),
            weights=weights,
        )

    @staticmethod
    def empty_like(jt: JaggedTensor) -> JaggedTensor:
        """A tensor without rows, with ``jt``'s dtypes and device; as in TorchRec, without its ``device`` argument."""
        weights = None if jt.weights_or_none() is None else jt.weights().new_zeros(0)
        return JaggedTensor(jt.values().new_zeros(0), weights, jt.lengths().new_zeros(0))

    def _read_offsets(self) -> Tensor:
        """Checks the offsets and returns them on the CPU; a tracer's offsets are returned unchanged."""
        if self._offsets.is_meta or type(self._offsets) is not Tensor:
            return self._offsets
        offsets = self._offsets.cpu()
        checks.check_bounds(offsets, self._values.shape[0], _row_name)
        return offsets

    def __repr__(self) -> str:
        return text.format_rows("JaggedTensor", self._values, self._offsets, self._weights)


def _row_name(number: int) -> str:
    return f"row {number}"


def _row_lengths(name: str, rows: Sequence[Tensor]) -> list[int]:
    for b, row in enumerate(rows):
        check_tensor(f"{name}[{b}]", row)
        if not row.dim():
            raise ValueError(f"{name}[{b}] must have at least 1 dimension, got a 0-dim tensor")
    return [row.shape[0] for row in rows]
