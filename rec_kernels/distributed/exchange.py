"""Pooled columns from the ranks that look them up to the samples, and gradients back."""

from __future__ import annotations

import torch
from torch import Tensor

from rec_kernels.distributed.backwards import FACTS
from rec_kernels.distributed.collectives import UnderWay, reduce_scatter
from rec_kernels.distributed.messages import Due, Mail, Message
from rec_kernels.distributed.row_exchange import lookup_of
from rec_kernels.distributed.trips import Trip
from rec_kernels.distributed.weight_gradients import weight_gradients
from rec_kernels.distributed.wire import Block


class PooledTrip(Trip):
    """Columns of all ranks' samples, which are pooled where their rows are."""

    _columns: Mail | None = None
    _reduced: UnderWay | None = None

    def send(self, rows: Tensor) -> None:
        """Begins to send each rank the columns of its samples.

        Args:
            rows: [samples of all ranks, columns of this rank's entries], float32.
        """
        routes, sizes, post = self.module.routes, self.batch.batch_sizes, self.module.forward_post
        own, start = sizes[routes.rank], sum(sizes[: routes.rank])
        self._replicas = rows[start : start + own, rows.shape[1] - routes.replicated :]
        if any(routes.sent):
            due = [Due(0, [Block(own, *block) for block in blocks]) for blocks in routes.sent_blocks]
            blocks = routes.sent_blocks[routes.rank]
            if post.format is None and len(blocks) == 1 and routes.sent[routes.rank] == rows.shape[1]:
                # No copy: what was pooled is what is sent, in its order.
                row = 4 * rows.shape[1]
                self._columns = post.send_bytes(rows.view(-1).view(torch.uint8), [row * size for size in sizes], due)
            else:
                widths = [columns for columns, _ in blocks]
                messages = [
                    Message([], [([part], width) for part, (_, width) in zip(parts, blocks, strict=True)])
                    for parts in (samples.split(widths, dim=1) for samples in rows[:, : sum(widths)].split(sizes))
                ]
                self._columns = post.send(messages, due, self.batch.begun.draw)
        if routes.reduced:
            self._reduced = reduce_scatter(routes.parts(rows), sizes, self.module.group)

    def receive(self) -> Tensor:
        """[B, dim]."""
        arrived = [] if self._columns is None else [b for message in self._columns.wait() for b in message.blocks]
        arrived.append(self._replicas)
        if self._reduced is not None:
            arrived.append(self._reduced.wait())
        self._columns = self._reduced = self._replicas = None
        routes, parts = self.module.routes, self.module.parts
        out = routes.assemble(arrived, self.batch.counts)
        if not parts.joins:
            return out
        blocks = out.split(routes.dims, dim=1)
        return torch.cat([self.joined.compose(f, blocks) for f in range(len(parts.features))], dim=1)

    def send_gradients(self, grad: Tensor) -> None:
        """Begins to send each rank the gradients of its columns, behind what ranks tell one another.

        Args:
            grad: [B, dim], float32.
        """
        module, batch = self.module, self.batch
        routes = module.routes
        if module.parts.joins:
            grad = torch.cat(self.joined.divide(grad.split(module.output_dims, dim=1)), dim=1)
        facts = module.backwards.facts(batch.begun, grad)
        messages = [Message([facts, *m.numbers], m.blocks) for m in routes.disperse(grad, batch.counts)]
        numbers = len(routes.coefficients[routes.rank])
        due = [
            Due(FACTS + size * numbers, [Block(size, *block) for block in routes.blocks[routes.rank]])
            for size in batch.batch_sizes
        ]
        self._gradients = module.backward_post.send(messages, due, batch.begun.draw)

    def receive_gradients(self) -> Tensor | None:
        """Updates this rank's tables with the gradients of all samples; see ``Trip``."""
        module, batch = self.module, self.batch
        routes, sizes = module.routes, batch.batch_sizes
        arrived, told = self._arrived()
        columns = told.new_empty(sum(sizes), routes.columns[routes.rank])
        scales, wanted = module.gradient_scales(sizes), any(batch.wants)
        for rows, message, scale in zip(columns.split(sizes), arrived, scales, strict=True):
            widths = [columns for columns, _ in routes.blocks[routes.rank]]
            for out, block in zip(rows.split(widths, dim=1), message.blocks, strict=True):
                torch.mul(block, 1.0 if wanted else scale, out=out)
        factors, grad_weights = self._by_id([message.numbers[FACTS:] for message in arrived]), None
        if wanted:  # by the losses of their ranks
            grad_weights = weight_gradients(batch.looked_up(columns), module, batch)
            for rows, scale in zip(columns.split(sizes), scales, strict=True):
                rows *= scale
        columns = batch.looked_up(columns, trains=True)
        module.backwards.take(batch.begun, lookup_of(columns if routes.own else columns[:0], factors, batch), told)
        return grad_weights

    def _by_id(self, coefficients: list[Tensor]) -> Tensor | None:
        """[N]: the coefficient of each id that this rank looks up, or None if no entry has any.

        Args:
            coefficients: of each rank, those of its samples, [samples, entries that have them] in one row.
        """
        routes = self.module.routes
        numbers = routes.coefficients[routes.rank]
        if not numbers:
            return None
        every = torch.cat(coefficients).view(-1, len(numbers))
        factors = every.new_ones(len(routes.own), len(every))
        factors[numbers] = every.T
        return factors.reshape(-1).repeat_interleave(self.batch.bags.offsets.diff())
