"""Messages between ranks: numbers in float32, and behind them rows in a row format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rec_kernels.distributed.collectives import UnderWay, all_to_all
from rec_kernels.distributed.wire import Block, Draw, Noise, block_bytes, read_block, write_block


class Due(NamedTuple):
    """A message that comes from a rank: how many float32 it has, and which blocks of rows."""

    numbers: int
    blocks: list[Block]

    def size(self, format: str | None) -> int:
        """Bytes of the message."""
        return 4 * self.numbers + sum(block_bytes(format, block) for block in self.blocks)


class Message(NamedTuple):
    """A message to a rank.

    Args:
        numbers: float32 tensors. blocks: for each block the tensors that have its columns, float32 [rows, *], one
            beside the other, and how many columns are a row of the format.
    """

    numbers: list[Tensor]
    blocks: list[tuple[list[Tensor], int]]

    @property
    def shape(self) -> Due:
        """The message as the rank that gets it knows it beforehand."""
        blocks = [Block(len(p[0]), sum(piece.shape[1] for piece in p), width) for p, width in self.blocks]
        return Due(sum(t.numel() for t in self.numbers), blocks)


class Arrived(NamedTuple):
    """A message that has come: ``numbers``, float32 [n], and ``blocks`` of rows, float32 [rows, columns]."""

    numbers: Tensor
    blocks: list[Tensor]


@dataclass(frozen=True)
class Post:
    """How messages travel.

    Args:
        group: the ranks. device: of this one's tensors.
        format: of rows; None: float32. seed: of stochastic rounding.
    """

    group: dist.ProcessGroup
    device: torch.device
    format: str | None = None
    seed: int = 0

    def send(self, messages: Sequence[Message], due: Sequence[Due], draw: Draw | None = None) -> Mail:
        """Begins to send a message to each rank.

        Args:
            due: what comes from each. draw: the lookup, if rows are rounded stochastically.
        """
        shapes = [message.shape for message in messages]
        sizes = [shape.size(self.format) for shape in shapes]
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        for rank, (out, message, shape) in enumerate(zip(flat.split(sizes), messages, shapes, strict=True)):
            self._write(out, message, shape, rank, draw)
        return self.send_bytes(flat, sizes, due)

    def send_bytes(self, flat: Tensor, sizes: list[int], due: Sequence[Due]) -> Mail:
        """Begins to send messages that lie one after the other.

        Args:
            flat: uint8. sizes: bytes of each rank's. due: what comes from each.
        """
        received = [message.size(self.format) for message in due]
        return Mail(all_to_all(flat, sizes, received, self.group), received, due, self.format)

    def _seed(self, rank: int, draw: Draw) -> int:
        """The seed of a message from this rank to ``rank``: no other message of a step has it."""
        pair = dist.get_rank(self.group) * dist.get_world_size(self.group) + rank
        return self.seed + (pair << 32) + (draw.lookup << 52)

    def _write(self, out: Tensor, message: Message, shape: Due, rank: int, draw: Draw | None) -> None:
        sizes = [4 * t.numel() for t in message.numbers] + [block_bytes(self.format, b) for b in shape.blocks]
        places = out.split(sizes)
        count = len(message.numbers)
        for place, numbers in zip(places[:count], message.numbers, strict=True):
            place.view(torch.float32).copy_(numbers.reshape(-1))
        seed = 0 if draw is None else self._seed(rank, draw)
        for k, (place, (pieces, _), block) in enumerate(zip(places[count:], message.blocks, shape.blocks, strict=True)):
            noise = None if draw is None else Noise(seed, draw.step, k)
            write_block(place, pieces, block, self.format, noise)


class Mail:
    """Messages of all ranks that are on their way.

    Args:
        flat: their bytes. sizes: of each rank's. due: what they are. format: of their rows.
    """

    def __init__(self, flat: UnderWay, sizes: list[int], due: Sequence[Due], format: str | None) -> None:
        self._flat, self._sizes, self._due, self._format = flat, sizes, due, format

    def wait(self) -> list[Arrived]:
        """The messages, rank by rank."""
        found = []
        for data, (numbers, blocks) in zip(self._flat.wait().split(self._sizes), self._due, strict=True):
            front, *places = data.split([4 * numbers, *(block_bytes(self._format, block) for block in blocks)])
            rows = [read_block(p, block, self._format) for p, block in zip(places, blocks, strict=True)]
            found.append(Arrived(front.view(torch.float32), rows))
        return found
