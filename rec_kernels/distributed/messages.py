"""All-to-all of messages: a header of float32 followed by blocks of rows in a row format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rec_kernels.distributed.collectives import TensorAwaitable, all_to_all
from rec_kernels.distributed.qcomm_codec import (
    BlockNoise,
    BlockShape,
    NoiseKey,
    block_bytes,
    decode_block,
    encode_block,
)


class MessageShape(NamedTuple):
    """Number of float32 in a message's header, and the shapes of its blocks."""

    floats: int
    blocks: list[BlockShape]

    def size(self, format: str | None) -> int:
        """Bytes of the message."""
        return 4 * self.floats + sum(block_bytes(format, block) for block in self.blocks)


class Message(NamedTuple):
    """A message to a rank.

    Args:
        floats: float32 tensors, the header. blocks: for each block, tensors [rows, *] float32 that are concatenated
            along dim 1, and the columns that are encoded as one row.
    """

    floats: list[Tensor]
    blocks: list[tuple[list[Tensor], int]]

    @property
    def shape(self) -> MessageShape:
        """The shape, which the receiving rank computes by itself."""
        blocks = [BlockShape(len(c[0]), sum(x.shape[1] for x in c), width) for c, width in self.blocks]
        return MessageShape(sum(t.numel() for t in self.floats), blocks)


class ReceivedMessage(NamedTuple):
    """A decoded message: ``floats`` [n] float32, and ``blocks`` [rows, columns] float32."""

    floats: Tensor
    blocks: list[Tensor]


@dataclass(frozen=True)
class MessageAllToAll:
    """Sends a message to each rank and receives one from each.

    Args:
        group: the ranks. device: of this rank's tensors.
        format: of rows; None: float32. seed: of stochastic rounding.
    """

    group: dist.ProcessGroup
    device: torch.device
    format: str | None = None
    seed: int = 0

    def start(
        self, messages: Sequence[Message], expected: Sequence[MessageShape], noise_key: NoiseKey | None = None
    ) -> MessagesAwaitable:
        """Encodes a message to each rank and starts the all-to-all.

        Args:
            expected: shapes of the messages from each rank. noise_key: of stochastic rounding, else None.
        """
        shapes = [message.shape for message in messages]
        sizes = [shape.size(self.format) for shape in shapes]
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        for rank, (out, message, shape) in enumerate(zip(flat.split(sizes), messages, shapes, strict=True)):
            self._write(out, message, shape, rank, noise_key)
        return self.start_encoded(flat, sizes, expected)

    def start_encoded(self, flat: Tensor, sizes: list[int], expected: Sequence[MessageShape]) -> MessagesAwaitable:
        """Starts the all-to-all of encoded messages.

        Args:
            flat: uint8, the messages by rank. sizes: their bytes. expected: shapes of the messages from each rank.
        """
        received = [message.size(self.format) for message in expected]
        return MessagesAwaitable(all_to_all(flat, sizes, received, self.group), received, expected, self.format)

    def _seed(self, rank: int, noise_key: NoiseKey) -> int:
        """The seed of the message from this rank to ``rank``, unique in a step."""
        pair = dist.get_rank(self.group) * dist.get_world_size(self.group) + rank
        return self.seed + (pair << 32) + (noise_key.lookup << 52)

    def _write(self, out: Tensor, message: Message, shape: MessageShape, rank: int, noise_key: NoiseKey | None) -> None:
        sizes = [4 * t.numel() for t in message.floats] + [block_bytes(self.format, b) for b in shape.blocks]
        places = out.split(sizes)
        count = len(message.floats)
        for place, floats in zip(places[:count], message.floats, strict=True):
            place.view(torch.float32).copy_(floats.reshape(-1))
        seed = 0 if noise_key is None else self._seed(rank, noise_key)
        blocks = zip(places[count:], message.blocks, shape.blocks, strict=True)
        for k, (place, (columns, _), block) in enumerate(blocks):
            noise = None if noise_key is None else BlockNoise(seed, noise_key.step, k)
            encode_block(place, columns, block, self.format, noise)


class MessagesAwaitable:
    """Messages of all ranks to this one.

    Args:
        flat: their bytes. sizes: bytes from each rank. shapes: of each message. format: of their rows.
    """

    def __init__(
        self, flat: TensorAwaitable, sizes: list[int], shapes: Sequence[MessageShape], format: str | None
    ) -> None:
        self._flat, self._sizes, self._shapes, self._format = flat, sizes, shapes, format

    def wait(self) -> list[ReceivedMessage]:
        """Waits for the all-to-all and returns the decoded messages, by rank."""
        found = []
        for data, (floats, blocks) in zip(self._flat.wait().split(self._sizes), self._shapes, strict=True):
            header, *places = data.split([4 * floats, *(block_bytes(self._format, block) for block in blocks)])
            rows = [decode_block(p, block, self._format) for p, block in zip(places, blocks, strict=True)]
            found.append(ReceivedMessage(header.view(torch.float32), rows))
        return found
