"""Rows of the next batch that come into a row cache ahead of its lookup."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from rec_kernels.ops.autograd import node_of_op

#: Values, offsets, and where features begin if every bag has a row of the output.
Bags = tuple[Tensor, Tensor, Tensor | None]


class TableCall(NamedTuple):
    """Table arguments of a call of the ops.

    Args:
        weights: the flat tensor of the tables. bags: those of the batch.
        layout: the ops' arguments for the layout of these bags. rounding: those that say how rows are encoded.
    """

    weights: Tensor
    bags: Bags
    layout: dict[str, object]
    rounding: dict[str, Any]


class PrefetchedBatch:
    """The batch that is to be looked up next: announced, or with its rows in the cache already.

    What is learned must not depend on it. So its rows come in when the updates of all lookups before it have been made,
    and from then on nothing may use the cache or the tables until it is looked up.
    """

    def __init__(self) -> None:
        self._call: TableCall | None = None
        self._slots: Tensor | None = None
        self._versions: list[int] = []
        self._event: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None
        # Nodes of the autograd graph whose backwards are updates. One that nobody can run any more is not there.
        self._waiting: weakref.WeakSet = weakref.WeakSet()
        #: True if lookups are compiled: their updates cannot be waited for, so nothing comes in early.
        self.is_compiled = False

    def __reduce__(self) -> tuple:
        self.refuse("copying or pickling the collection")
        return PrefetchedBatch, ()

    @property
    def is_empty(self) -> bool:
        """True if no batch has been announced."""
        return self._call is None

    def announce(self, call: TableCall) -> None:
        """Names the next batch, by what ``insert`` is to be given.

        Raises:
            RuntimeError: the rows of another one are in the cache already.
        """
        if self._slots is not None and not self._is(call.bags):
            self.refuse("prefetch() of another batch")
        if self._slots is None and not self.is_compiled:
            self._call = call

    def watch(self, output: Tensor, done: Callable[[], object]) -> None:
        """Has the announced batch wait for the update by this lookup, after which ``done()`` is called."""
        node = node_of_op(output)

        def after(*_: object) -> None:
            self._waiting.discard(node_of())
            done()

        node_of = weakref.ref(node)
        self._waiting.add(node)
        node.register_prehook(lambda _: self.refuse("an update"))
        node.register_hook(after)

    def insert(self, insert: Callable[[TableCall], Tensor], used: Iterable[Tensor]) -> None:
        """Has the announced batch's rows come in, unless an update is to come first.

        On a GPU this runs beside what is launched later. ``used``: the tensors that ``insert`` reads and writes besides
        those of the call.
        """
        call = self._call
        if call is None or self._slots is not None or self._waiting:
            return
        self.forget()  # an error leaves nothing
        slots = self._insert_beside(insert, call, used) if call.bags[0].is_cuda else insert(call)
        self._call, self._slots = call, slots
        self._versions = [_version(t) for t in call.bags if t is not None]

    def _insert_beside(self, insert: Callable[[TableCall], Tensor], call: TableCall, used: Iterable[Tensor]) -> Tensor:
        device = call.bags[0].device
        if self._stream is None or self._stream.device != device:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        # Whoever lets go of one of them before the lookup, or after an error, must not give its memory to others.
        for t in (*tree_leaves(call), *used):
            if isinstance(t, Tensor) and t.is_cuda:
                t.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            slots = insert(call)
        self._event = self._stream.record_event()
        return slots

    def take(self, bags: Bags, *, inserts: bool) -> Tensor | None:
        """The slots of a batch that is looked up, whose rows are in the cache already; None: they are not.

        Args:
            inserts: whether the lookup is one of training.

        Raises:
            RuntimeError: the rows of another batch are there, or this is no lookup of training.
        """
        from rec_kernels.nn.graph_breaks import take_ahead

        return take_ahead(self._take, bags, inserts)

    def _take(self, bags: Bags, inserts: bool) -> Tensor | None:
        if self._slots is None:
            if inserts:
                self.forget()
            return None
        if not inserts:
            self.refuse("a lookup in eval() mode or without gradients")
        if not self._is(bags):
            self.refuse("a lookup of another one")
        slots = self._slots
        if self._event is not None:
            self._wait()
            slots.record_stream(torch.cuda.current_stream(slots.device))
        self.forget()
        return slots

    def wait(self) -> None:
        """Has the current stream wait until the rows are in the cache, which others read, too."""
        if not self.is_empty:
            from rec_kernels.nn.graph_breaks import take_ahead

            take_ahead(self._wait)

    def _wait(self) -> None:
        if self._event is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._event)

    def forget(self) -> None:
        """No batch is announced; what is in the cache stays there."""
        self._call = self._slots = self._event = None

    def refuse(self, what: str) -> None:
        """Raises RuntimeError if the rows of an announced batch are in the cache."""
        if self._slots is not None:
            raise RuntimeError(
                f"{what} after prefetch(), whose batch has its rows in the cache already: look that batch up in "
                "training first; nothing was changed"
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
    # Equal memory tells it; looking at numbers would wait for a GPU.
    return (a.data_ptr() == b.data_ptr() and a.stride() == b.stride()) or torch.equal(a, b)
