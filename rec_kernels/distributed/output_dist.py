"""Output dist: sends what a rank has looked up to the samples' ranks, and their gradients back, asynchronously.

In the forward, the all-to-all starts at once and is waited for when the output is read. In the backward, gradients are
sent as soon as autograd has them, and are waited for after the backward of the layers between lookup and output.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rec_kernels.distributed.backward_sync import HEADER_SIZE
from rec_kernels.distributed.messages import MessagesAwaitable, ReceivedMessage
from rec_kernels.distributed.table_parts import PartCombiner
from rec_kernels.nn.jagged.jagged_tensor import JaggedTensor
from rec_kernels.nn.jagged.keyed_tensor import KeyedTensor

if TYPE_CHECKING:
    from rec_kernels.distributed.lookup_context import LookupContext
    from rec_kernels.distributed.sharded_collection import ShardedCollection

T = TypeVar("T")


class OutputDist(ABC):
    """The output dist of one lookup, and its backward.

    Args:
        module: this rank's. ctx: of the lookup.

    Attributes:
        combiner: combines rows of a table's parts into those of features.
    """

    _gradients: MessagesAwaitable

    def __init__(self, module: ShardedCollection, ctx: LookupContext) -> None:
        self.module, self.ctx = module, ctx
        self.combiner = PartCombiner(module.lookup_map)

    @abstractmethod
    def start_forward(self, rows: Tensor) -> None:
        """Starts to send what this rank has looked up, float32."""

    @abstractmethod
    def wait_forward(self) -> Tensor:
        """Waits for the rows of this rank's samples and returns the lookup's output, float32."""

    @abstractmethod
    def start_backward(self, grad: Tensor) -> None:
        """Starts to send the gradients, float32, of the output of ``wait_forward``."""

    @abstractmethod
    def finish_backward(self) -> Tensor | None:
        """Waits for the gradients of all ranks and updates this rank's tables.

        Returns:
            The gradients of this rank's per-sample weights, or None if they require none.
        """

    def _receive_gradients(self) -> tuple[list[ReceivedMessage], Tensor]:
        """Waits for the gradients of all ranks; returns them and their checked headers, [ranks, HEADER_SIZE]."""
        received = self._gradients.wait()
        del self._gradients  # the autograd graph may live long
        headers = torch.stack([message.floats[:HEADER_SIZE] for message in received])
        self.module.backward_sync.check(headers)
        return received, headers


def start_output_dist(
    output_dist: OutputDist, token: Tensor, rows: Tensor, weights: Tensor | None
) -> Callable[[], Tensor]:
    """Starts an output dist, the backward of which updates the tables.

    Every rank runs the backward, even without tables or samples.

    Args:
        token: requires a gradient if the backward has to run. rows: what this rank has looked up, float32.
        weights: this rank's per-sample weights, if they require a gradient.

    Returns:
        A function that returns the lookup's output, of the module's output dtype; its first call waits.
    """
    sent = _OutputDistReq.apply(token, rows, weights, output_dist)
    combiner = output_dist.combiner
    combiner.saves_rows, combiner.needs_weight_grad = sent.requires_grad, weights is not None

    def wait() -> Tensor:
        output = prioritize_backward(_OutputDistWait.apply(sent, output_dist))
        output_dist.module.backward_sync.track_output(output_dist.ctx.pending_backward, output)
        return output

    return lazy(wait)


def lazy(read: Callable[[], T]) -> Callable[[], T]:
    """Returns a function that calls ``read`` once, in the grad mode of now: the first reader may be a logger."""
    return functools.cache(functools.partial(_read, read, torch.is_grad_enabled(), torch.is_inference_mode_enabled()))


@torch.compiler.disable(reason="a sharded lookup waits for its collectives in Python")
def _read(read: Callable[[], T], has_gradients: bool, is_inference: bool) -> T:
    with torch.inference_mode(is_inference), torch.set_grad_enabled(has_gradients):
        return read()


class _OutputDistReq(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, rows: Tensor, weights: Tensor | None, output_dist: OutputDist) -> Tensor:
        """Returns no elements: ``_OutputDistWait`` returns the output."""
        ctx.output_dist = output_dist
        output_dist.start_forward(rows)
        return torch.zeros_like(token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, ctx.output_dist.finish_backward(), None


class _OutputDistWait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sent: Tensor, output_dist: OutputDist) -> Tensor:
        ctx.output_dist = output_dist
        return output_dist.wait_forward().to(output_dist.module.output_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.output_dist.start_backward(grad.float())
        return grad.new_zeros(0), None


#: Added to sequence numbers of autograd nodes that run as soon as they can; those of a forward are far below.
_PRIORITY = 1 << 62


def prioritize_backward(output: Tensor) -> Tensor:
    """Has autograd send the gradients of a lookup's output as soon as it has them, in one order on all ranks.

    Of the nodes that are ready, autograd runs the one created last. Ranks may create these nodes in different orders,
    as one of them reads an output earlier for a log, but must start the collectives of a backward in the same order.

    Args:
        output: of ``start_output_dist``'s function, or a view of it.
    """
    nodes: list[Any] = [output.grad_fn]
    while nodes[-1] is not None and not isinstance(nodes[-1], _OutputDistReq._backward_cls):
        nodes.append(nodes[-1].next_functions[0][0])
    request: Any = nodes.pop()
    for node in nodes:
        node._set_sequence_nr(_PRIORITY + request._sequence_nr())
    return output


class LazyKeyedTensor(KeyedTensor):
    """An ``rk.KeyedTensor`` that waits for its values when they are first read.

    Args:
        keys, length_per_key: of the columns. wait: returns the values, [B, sum of D].
    """

    def __init__(self, keys: list[str], length_per_key: list[int], wait: Callable[[], Tensor]) -> None:
        self._keys, self._lengths, self._wait = keys, length_per_key, wait

    @functools.cached_property
    def _values(self) -> Tensor:  # type: ignore[override]
        return self._wait()

    def __reduce__(self) -> tuple:
        return KeyedTensor, (self._keys, self._lengths, self._values)


class LazyJaggedTensor(JaggedTensor):
    """An ``rk.JaggedTensor`` that waits for its values when they are first read.

    Args:
        wait: returns the values, [N, D]. offsets: [B + 1].
    """

    def __init__(self, wait: Callable[[], Tensor], offsets: Tensor) -> None:
        self._wait, self._offsets, self._weights = wait, offsets, None

    @functools.cached_property
    def _values(self) -> Tensor:  # type: ignore[override]
        return self._wait()

    def __reduce__(self) -> tuple:
        return JaggedTensor, (self._values, None, None, self._offsets)
