"""Rows of a lookup on their way to the samples, and gradients on their way back, while other layers compute.

What a rank has looked up leaves at once, and is waited for where it is read. In a backward, gradients leave when
autograd has them, and are waited for when it has run all that was computed between the lookup and the reading of its
output.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rec_kernels.distributed.backwards import FACTS
from rec_kernels.distributed.messages import Arrived, Mail
from rec_kernels.distributed.parts import Joined
from rec_kernels.nn.jagged.keyed_tensor import KeyedTensor
from rec_kernels.nn.jagged.tensors import JaggedTensor

if TYPE_CHECKING:
    from rec_kernels.distributed.row_exchange import RowContext
    from rec_kernels.distributed.sharded_collection import ShardedCollection

T = TypeVar("T")


class Trip(ABC):
    """A lookup's rows on their way to the samples of all ranks, and their gradients on the way back.

    Args:
        module: of this rank. batch: of all ranks.

    Attributes:
        joined: how rows of parts become those of features.
    """

    _gradients: Mail

    def __init__(self, module: ShardedCollection, batch: RowContext) -> None:
        self.module, self.batch = module, batch
        self.joined = Joined(module.parts)

    @abstractmethod
    def send(self, rows: Tensor) -> None:
        """Begins to send what this rank has looked up, float32."""

    @abstractmethod
    def receive(self) -> Tensor:
        """Waits for what this rank's samples get: the lookup's output, float32."""

    @abstractmethod
    def send_gradients(self, grad: Tensor) -> None:
        """Begins to send the gradients, float32, of what ``receive`` returned."""

    @abstractmethod
    def receive_gradients(self) -> Tensor | None:
        """Waits for the gradients of all ranks and updates tables with them.

        Returns:
            The gradients of this rank's per-sample weights, or None if it wants none.
        """

    def _arrived(self) -> tuple[list[Arrived], Tensor]:
        """Waits for the gradients of all ranks, and checks what these tell in front: [ranks, FACTS]."""
        arrived = self._gradients.wait()
        del self._gradients  # the graph may be kept for long
        told = torch.stack([message.numbers[:FACTS] for message in arrived])
        self.module.backwards.check(told)
        return arrived, told


def leave(trip: Trip, token: Tensor, rows: Tensor, weights: Tensor | None) -> Callable[[], Tensor]:
    """Sends what this rank has looked up; its backward is the update.

    Every rank runs the backward, also one without tables or samples.

    Args:
        token: what autograd calls the backward for. rows: what this rank has looked up, float32.
        weights: this rank's per-sample weights, if they want a gradient.

    Returns:
        A function that returns the lookup's output, of the module's output dtype; the first call waits for it.
    """
    sent = _Depart.apply(token, rows, weights, trip)
    trip.joined.keeps, trip.joined.answers = sent.requires_grad, weights is not None

    def arrive() -> Tensor:
        output = run_early(_Arrive.apply(sent, trip))
        trip.module.backwards.watch(trip.batch.begun, output)
        return output

    return later(arrive)


def later(read: Callable[[], T]) -> Callable[[], T]:
    """A function that calls ``read`` once, with gradients if there are any now: a log may be what reads it first."""
    has_gradients, is_inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    @functools.cache
    def found() -> T:
        with torch.inference_mode(is_inference), torch.set_grad_enabled(has_gradients):
            return read()

    return found


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, rows: Tensor, weights: Tensor | None, trip: Trip) -> Tensor:
        """No elements: what arrives has the lookup's output."""
        ctx.trip = trip
        trip.send(rows)
        return torch.zeros_like(token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, ctx.trip.receive_gradients(), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sent: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        return trip.receive().to(trip.module.output_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.trip.send_gradients(grad.float())
        return grad.new_zeros(0), None


#: Added to the numbers of nodes that autograd is to run as soon as it can. Those of a forward are far below.
_EARLY = 1 << 62


def run_early(output: Tensor) -> Tensor:
    """Has autograd send the gradients of a lookup's output as soon as it has them, wherever the output was read.

    Of the nodes that it can run, autograd takes the one that was made last. A rank may read an output earlier than the
    others do, for a log, and collectives of a backward must begin in one order on all ranks.

    Args:
        output: what arrived, or a view of it that its container keeps.
    """
    nodes: list[Any] = [output.grad_fn]
    while nodes[-1] is not None and not isinstance(nodes[-1], _Depart._backward_cls):
        nodes.append(nodes[-1].next_functions[0][0])
    depart: Any = nodes.pop()
    for node in nodes:
        node._set_sequence_nr(_EARLY + depart._sequence_nr())
    return output


class ArrivingColumns(KeyedTensor):
    """An ``rk.KeyedTensor`` whose columns are on their way: who reads them first waits.

    Args:
        keys, length_per_key: of the columns. arrived: returns them, [B, sum of D].
    """

    def __init__(self, keys: list[str], length_per_key: list[int], arrived: Callable[[], Tensor]) -> None:
        self._keys, self._lengths, self._arrived = keys, length_per_key, arrived

    @functools.cached_property
    def _values(self) -> Tensor:  # type: ignore[override]
        return self._arrived()

    def __reduce__(self) -> tuple:
        return KeyedTensor, (self._keys, self._lengths, self._values)


class ArrivingRows(JaggedTensor):
    """An ``rk.JaggedTensor`` whose rows are on their way: who reads them first waits.

    Args:
        arrived: returns them, [N, D]. offsets: [B + 1].
    """

    def __init__(self, arrived: Callable[[], Tensor], offsets: Tensor) -> None:
        self._arrived, self._offsets, self._weights = arrived, offsets, None

    @functools.cached_property
    def _values(self) -> Tensor:  # type: ignore[override]
        return self._arrived()

    def __reduce__(self) -> tuple:
        return JaggedTensor, (self._values, None, None, self._offsets)
