"""Prefetch: insert rows of the next batch into a row cache before its lookup."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from rec_kernels.ops.autograd import node_of_op

#: Values, offsets, and the first bag of each feature if every bag has its own output row.
Bags = tuple[Tensor, Tensor, Tensor | None]


class TableCall(NamedTuple):
    """Table arguments of an op call.

    Args:
        weights: the flat tensor of the tables. bags: the batch's bags.
        layout: the ops' layout arguments for these bags. rounding: the ops' rounding arguments.
    """

    weights: Tensor
    bags: Bags
    layout: dict[str, object]
    rounding: dict[str, Any]


class PrefetchedBatch:
    """The next batch to look up: pending, or with its rows inserted into the cache.

    Prefetching must not change training. Rows are therefore inserted only after the updates of all earlier lookups, and
    until the batch's lookup no other operation may use the cache or the tables.
    """

    def __init__(self) -> None:
        self._call: TableCall | None = None
        self._slots: Tensor | None = None
        self._versions: list[int] = []
        self._event: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None
        # Autograd nodes with a pending update. Weak, so that nodes of discarded graphs drop out.
        self._waiting: weakref.WeakSet = weakref.WeakSet()
        #: True if lookups are compiled: their updates cannot be tracked, so nothing is prefetched.
        self.is_compiled = False

    def __reduce__(self) -> tuple:
        self.refuse("copying or pickling the collection")
        return PrefetchedBatch, ()

    @property
    def is_empty(self) -> bool:
        """True if no batch is pending or inserted."""
        return self._call is None

    def announce(self, call: TableCall) -> None:
        """Sets the next batch, the argument of a later ``insert``.

        Raises:
            RuntimeError: rows of another prefetched batch are in the cache.
        """
        if self._slots is not None and not self._is(call.bags):
            self.refuse("prefetch() of another batch")
        if self._slots is None and not self.is_compiled:
            self._call = call

    def watch(self, output: Tensor, done: Callable[[], object]) -> None:
        """Delay the insertion until this lookup's update has run, then call ``done()``."""
        node = node_of_op(output)

        def after(*_: object) -> None:
            self._waiting.discard(node_of())
            done()

        node_of = weakref.ref(node)
        self._waiting.add(node)
        node.register_prehook(lambda _: self.refuse("an update"))
        node.register_hook(after)

    def insert(self, insert: Callable[[TableCall], Tensor], used: Iterable[Tensor]) -> None:
        """Inserts the pending batch's rows, unless an update is outstanding.

        On a GPU the insertion runs on its own stream. ``used``: the tensors that ``insert`` accesses besides the
        call's.
        """
        call = self._call
        if call is None or self._slots is not None or self._waiting:
            return
        self.forget()  # an error below leaves no batch
        slots = self._insert_beside(insert, call, used) if call.bags[0].is_cuda else insert(call)
        self._call, self._slots = call, slots
        self._versions = [_version(t) for t in call.bags if t is not None]

    def _insert_beside(self, insert: Callable[[TableCall], Tensor], call: TableCall, used: Iterable[Tensor]) -> Tensor:
        device = call.bags[0].device
        if self._stream is None or self._stream.device != device:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        # The allocator must not reuse their memory while the stream runs, even if they are freed early.
        for t in (*tree_leaves(call), *used):
            if isinstance(t, Tensor) and t.is_cuda:
                t.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            slots = insert(call)
        self._event = self._stream.record_event()
        return slots

    def take(self, bags: Bags, *, inserts: bool) -> Tensor | None:
        """The slots of a batch if it was prefetched, else None.

        Args:
            inserts: True if the lookup is in training.

        Raises:
            RuntimeError: another batch was prefetched, or the lookup is not in training.
        """
        from rec_kernels.ops.graph_breaks import prepare_prefetched

        return prepare_prefetched(self._take, bags, inserts)

    def _take(self, bags: Bags, inserts: bool) -> Tensor | None:
        if self._slots is None:
            if inserts:
                self.forget()
            return None
        if not inserts:
            self.refuse("a lookup in eval() mode or without gradients")
        if not self._is(bags):
            self.refuse("a lookup of another batch")
        slots = self._slots
        if self._event is not None:
            self._wait()
            slots.record_stream(torch.cuda.current_stream(slots.device))
        self.forget()
        return slots

    def wait(self) -> None:
        """Makes the current stream wait for the insertion, before other operations read the cache."""
        if not self.is_empty:
            from rec_kernels.ops.graph_breaks import prepare_prefetched

            prepare_prefetched(self._wait)

    def _wait(self) -> None:
        if self._event is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._event)

    def forget(self) -> None:
        """Discards the batch; inserted rows stay in the cache."""
        self._call = self._slots = self._event = None

    def refuse(self, what: str) -> None:
        """Raises RuntimeError if rows of a prefetched batch are in the cache."""
        if self._slots is not None:
            raise RuntimeError(
                f"{what} cannot run after prefetch(): the prefetched rows are already in the cache; look that "
                "batch up in training mode first; nothing was changed"
            )

    def _is(self, bags: Bags) -> bool:
        known: Any = self._call.bags
        if self._versions != [_version(t) for t in known if t is not None]:
            return False  # written to since
        return all(_same(a, b) for a, b in zip(known, bags, strict=True))


def _version(t: Tensor) -> int:
    return 0 if t.is_inference() else t._version


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return False
    # Compare addresses first: comparing values would synchronize with a GPU.
    return (a.data_ptr() == b.data_ptr() and a.stride() == b.stride()) or torch.equal(a, b)
