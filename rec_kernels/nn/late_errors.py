"""Late errors: bad ids and offsets that a lookup on a GPU found, raised by a later call without waiting."""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from rec_kernels.nn.jagged.checks import describe_bad_step
from rec_kernels.nn.jagged.select_features import BAD_LAYOUT, NOTHING_BAD, SelectedKeys
from rec_kernels.nn.jagged.shared_bags import SharedBags
from rec_kernels.ops.bad_ids import explained
from rec_kernels.ops.tracing import cannot_read

_LATER = "; found on the GPU, in an earlier lookup of this collection"


def reports_late(status: Tensor) -> bool:
    """True if the lookup that returned ``status``, int64 [2], ran on a GPU and could not raise.

    False for a tracer's fake tensors, which hold no data.
    """
    return status.is_cuda and type(status) is Tensor


def _copied(device: torch.device) -> torch.cuda.Event | None:
    """Records an event on the GPU's current stream; None on the CPU, where copies are synchronous."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


class _Lookup(NamedTuple):
    """A lookup with its status in a CPU tensor, valid once ``event`` has completed."""

    status: Tensor
    event: torch.cuda.Event | None
    given: SelectedKeys | None
    bag_starts: Tensor | None
    shared: SharedBags | None

    def is_done(self, *, wait: bool) -> bool:
        if wait and self.event is not None:
            self.event.synchronize()
        return self.event is None or self.event.query()


class LateErrors:
    """Input errors found by a collection's lookups, raised once their status has reached the host.

    Args:
        features: name and table rows of each feature; rows None: every integer is an id.
        bounds_check: "error" if ids out of range are errors; may be assigned. Bad offsets always are errors.
    """

    def __init__(self, features: list[tuple[str, int | None]], bounds_check: str) -> None:
        self._features, self.bounds_check = features, bounds_check
        self._lookups: deque[_Lookup] = deque()
        self._lock = threading.Lock()  # inference may use a collection from several threads

    def __reduce__(self) -> tuple:
        # A copy has made no lookups; the original raises the errors of its own.
        return LateErrors, (self._features, self.bounds_check)

    def add(
        self,
        status: Tensor,
        unseen: Tensor,
        given: SelectedKeys | None,
        bag_starts: Tensor | None = None,
        shared: SharedBags | None = None,
    ) -> None:
        """Queues the status of a lookup. Never waits or raises: the lookup may have changed a row cache.

        Args:
            status: [2] int64. unseen: as for ``check``, for lookups whose status the host cannot read.
            given: the bags; None: the lookup expanded rows to samples. bag_starts: [F + 1], or None for B bags per
                feature. shared: the bags that samples share, or None. Tensors other than ``status`` are read only to
                describe an error.
        """
        if cannot_read(status):
            unseen.copy_(torch.minimum(unseen, status[0]))
            return
        # torch allocates page-locked memory for a non-blocking copy to the host.
        host = status.to("cpu", non_blocking=True)
        self._lookups.append(_Lookup(host, _copied(status.device), given, bag_starts, shared))

    def raise_arrived(self, unseen: Tensor) -> None:
        """Raises errors of earlier lookups whose status has arrived; called before each lookup. Never waits.

        Args:
            unseen: as for ``add``.

        Raises:
            IndexError, ValueError: the input of an earlier lookup is bad; each error is raised once.
        """
        if self._lookups and not cannot_read(unseen):
            self._raise_next(wait=False)

    def check(self, position: Tensor) -> None:
        """Waits for all lookups and raises the first error that was not raised before.

        Args:
            position: 0-dim int64, the smallest bad position of lookups whose status the host cannot read. It is reset
                before the error is raised.

        Raises:
            IndexError, ValueError: as for ``raise_arrived``.
        """
        self._raise_next(wait=True)
        if type(position) is not Tensor or position.is_meta:
            return
        if position.is_cuda:
            torch.cuda.synchronize(position.device)  # graphs are replayed on any stream
        found = int(position)
        if self._is_error(found):
            position.fill_(NOTHING_BAD)
            raise _error_of_unseen(found)

    def _raise_next(self, *, wait: bool) -> None:
        while (lookup := self._next(wait=wait)) is not None:
            position = int(lookup.status[0])
            if self._is_error(position):
                raise _error(position, lookup, self._features)

    def _next(self, *, wait: bool) -> _Lookup | None:
        with self._lock:
            arrived = self._lookups and self._lookups[0].is_done(wait=wait)
            return self._lookups.popleft() if arrived else None

    def _is_error(self, position: int) -> bool:
        return position < 0 or (self.bounds_check == "error" and position != NOTHING_BAD)


def _error(position: int, lookup: _Lookup, features: list[tuple[str, int | None]]) -> Exception:
    """The error that the CPU would have raised (``throw_bad_position`` of csrc/embedding_bag), marked as late."""
    if position <= BAD_LAYOUT + 1 and (text := _describe_origin(position, lookup)) is not None:
        return ValueError(text + _LATER)
    if position == BAD_LAYOUT:
        wrong = "the collection's layout of tables has been overwritten"
        if lookup.bag_starts is not None:
            wrong = "the offsets where features begin must ascend from 0 to the number of values or bags"
        if lookup.shared is not None:
            wrong += ", and the features of a group have as many bags, no more than there are samples"
        return ValueError(wrong + _LATER)
    if (place := _locate_in_inverse(position, lookup)) is not None:
        text = lookup.shared.message(*place)
        return IndexError((text or "inverse_indices were not valid; they have been overwritten since") + _LATER)
    describe, i = (_describe_id, position) if position >= 0 else (_describe_offset, position - BAD_LAYOUT - 1)
    text = describe(i, lookup, [rows for _, rows in features])
    if text is None:
        name = "values" if position >= 0 else "offsets"
        text = f"{name}[{i}] was not valid; {name} or offsets have been overwritten since"
    text = explained(text, [name for name, _ in features])
    return (IndexError if position >= 0 else ValueError)(text + _LATER)


def _describe_origin(position: int, lookup: _Lookup) -> str | None:
    """Describes what is wrong with the batch that features were selected from; None if nothing is, or without a batch.

    For features of a bad batch, a lookup reports their first offset, or that the first one starts in the wrong place.
    """
    origin = None if lookup.given is None else lookup.given.origin
    if origin is None or (text := origin.describe_bad()) is not None or position == BAD_LAYOUT:
        return None if origin is None else text
    return "offsets did not match the batch's offset_per_key(), or have been overwritten since"


def _locate_in_inverse(position: int, lookup: _Lookup) -> tuple[int, int] | None:
    """Group and sample of a bad inverse index; None if something else is bad."""
    if lookup.given is None:
        return 0, position  # the status of ``expand``, which takes one group
    place = position - BAD_LAYOUT - 1 - len(lookup.given.offsets)
    return divmod(place, lookup.shared.inverse.shape[1]) if lookup.shared and position < 0 <= place else None


def _locate_bag(bag: int, lookup: _Lookup, features: int) -> tuple[int, int]:
    """A bag's feature, and its index within it."""
    starts = lookup.bag_starts
    if starts is None:
        return divmod(bag, (len(lookup.given.offsets) - 1) // features)
    feature = int(torch.searchsorted(starts, bag, right=True)) - 1
    return feature, bag - int(starts[feature])


def _describe_id(i: int, lookup: _Lookup, num_embeddings: list[int | None]) -> str | None:
    """Describes a bad id; None if ids or offsets have been overwritten since the lookup."""
    place = int(torch.searchsorted(lookup.given.offsets.long(), i, right=True)) - 1
    feature, bag = _locate_bag(place, lookup, len(num_embeddings))
    value = int(lookup.given.values[i])
    limit = num_embeddings[feature] if 0 <= feature < len(num_embeddings) else None
    if limit is None or 0 <= value < limit:
        return None
    what = f"values[{i}] = {value} (feature {feature}, bag {bag}) is out of range"
    return f"{what}: ids of this feature must be in [0, {limit})"


def _describe_offset(i: int, lookup: _Lookup, num_embeddings: list[int | None]) -> str | None:
    """Describes a bad offset; None if the offsets have been overwritten since the lookup."""
    values, offsets = lookup.given.values, lookup.given.offsets
    feature, bag = _locate_bag(max(i - 1, 0), lookup, len(num_embeddings))
    value, before = int(offsets[i]), int(offsets[max(i - 1, 0)])
    text = describe_bad_step(i, before if i else 0, value, len(values), lookup.given.from_lengths)
    return None if text is None else text.format(f" (feature {feature}, bag {bag})")


def _error_of_unseen(position: int) -> Exception:
    where = "in a lookup that was compiled or replayed from a CUDA graph, since the last check"
    if position >= 0:
        return IndexError(
            f"values[{position}] was out of range {where}; if there were several, this is the smallest position"
        )
    if position == BAD_LAYOUT:
        return ValueError(f"the collection's layout of tables was overwritten {where}")
    i = position - BAD_LAYOUT - 1
    return ValueError(
        f"offsets[{i}] was below the offset before it or outside [0, number of values], or, if there are fewer "
        f"offsets, an inverse index was out of range {where}"
        + ("; if keys were in another order, any of the offsets" if i == 0 else "")
    )
