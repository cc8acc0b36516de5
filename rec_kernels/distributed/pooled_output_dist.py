"""Output dist of pooled columns: as TorchRec's PooledEmbeddingsAllToAll and PooledEmbeddingsReduceScatter."""

from __future__ import annotations

import torch
from torch import Tensor

from rec_kernels.distributed.backward_sync import HEADER_SIZE
from rec_kernels.distributed.collectives import TensorAwaitable, reduce_scatter
from rec_kernels.distributed.messages import Message, MessagesAwaitable, MessageShape
from rec_kernels.distributed.output_dist import OutputDist
from rec_kernels.distributed.qcomm_codec import BlockShape
from rec_kernels.distributed.sequence_output_dist import local_update
from rec_kernels.distributed.weight_gradients import weight_gradients


class PooledOutputDist(OutputDist):
    """Sends columns of samples that are pooled by the ranks that have the rows."""

    _columns: MessagesAwaitable | None = None
    _reduced: TensorAwaitable | None = None

    def start_forward(self, rows: Tensor) -> None:
        """Starts to send each rank the columns of its samples.

        Args:
            rows: [samples of all ranks, columns of this rank's entries], float32.
        """
        routes, sizes, exchange = self.module.routes, self.ctx.batch_sizes, self.module.forward_all_to_all
        own, start = sizes[routes.rank], sum(sizes[: routes.rank])
        self._replicas = rows[start : start + own, rows.shape[1] - routes.replica_columns :]
        if any(routes.sent_columns):
            expected = [MessageShape(0, [BlockShape(own, *block) for block in blocks]) for blocks in routes.sent_blocks]
            blocks = routes.sent_blocks[routes.rank]
            if exchange.format is None and len(blocks) == 1 and routes.sent_columns[routes.rank] == rows.shape[1]:
                # The pooled tensor is the message: no copy.
                sent, row_bytes = rows.view(-1).view(torch.uint8), 4 * rows.shape[1]
                self._columns = exchange.start_encoded(sent, [row_bytes * size for size in sizes], expected)
            else:
                widths = [columns for columns, _ in blocks]
                messages = [
                    Message([], [([part], width) for part, (_, width) in zip(parts, blocks, strict=True)])
                    for parts in (samples.split(widths, dim=1) for samples in rows[:, : sum(widths)].split(sizes))
                ]
                self._columns = exchange.start(messages, expected, self.ctx.pending_backward.noise_key)
        if routes.reduced_columns:
            self._reduced = reduce_scatter(routes.reduce_scatter_input(rows), sizes, self.module.group)

    def wait_forward(self) -> Tensor:
        """[B, dim]."""
        received = [] if self._columns is None else [b for message in self._columns.wait() for b in message.blocks]
        received.append(self._replicas)
        if self._reduced is not None:
            received.append(self._reduced.wait())
        self._columns = self._reduced = self._replicas = None
        routes, lookup_map = self.module.routes, self.module.lookup_map
        out = routes.assemble_output(received, self.ctx.bag_counts)
        if not lookup_map.has_parts:
            return out
        blocks = out.split(routes.dims, dim=1)
        return torch.cat([self.combiner.combine(f, blocks) for f in range(len(lookup_map.features))], dim=1)

    def start_backward(self, grad: Tensor) -> None:
        """Starts to send each rank the header and the gradients of its columns.

        Args:
            grad: [B, dim], float32.
        """
        module, ctx = self.module, self.ctx
        routes, pending = module.routes, ctx.pending_backward
        if module.lookup_map.has_parts:
            grad = torch.cat(self.combiner.lookup_gradients(grad.split(module.output_dims, dim=1)), dim=1)
        header = module.backward_sync.header(pending, grad)
        messages = [Message([header, *m.floats], m.blocks) for m in routes.gradient_messages(grad, ctx.bag_counts)]
        factors = len(routes.mean_entries[routes.rank])
        expected = [
            MessageShape(
                HEADER_SIZE + size * factors,
                [BlockShape(size, *block) for block in routes.gradient_blocks[routes.rank]],
            )
            for size in ctx.batch_sizes
        ]
        self._gradients = module.backward_all_to_all.start(messages, expected, pending.noise_key)

    def finish_backward(self) -> Tensor | None:
        """Updates this rank's tables with the gradients of all samples; see ``OutputDist``."""
        module, ctx = self.module, self.ctx
        routes, sizes = module.routes, ctx.batch_sizes
        received, headers = self._receive_gradients()
        columns = headers.new_empty(sum(sizes), routes.entry_columns[routes.rank])
        scales, needs_weight_grad = module.gradient_scales(sizes), any(ctx.needs_weight_grad)
        for rows, message, scale in zip(columns.split(sizes), received, scales, strict=True):
            widths = [columns for columns, _ in routes.gradient_blocks[routes.rank]]
            for out, block in zip(rows.split(widths, dim=1), message.blocks, strict=True):
                torch.mul(block, 1.0 if needs_weight_grad else scale, out=out)
        factors, grad_weights = self._id_factors([message.floats[HEADER_SIZE:] for message in received]), None
        if needs_weight_grad:  # of each rank's own loss, unscaled
            grad_weights = weight_gradients(ctx.lookup_gradients(columns), module, ctx)
            for rows, scale in zip(columns.split(sizes), scales, strict=True):
                rows *= scale
        columns = ctx.lookup_gradients(columns, trains=True)
        update = local_update(columns if routes.own else columns[:0], factors, ctx)
        module.backward_sync.apply(ctx.pending_backward, update, headers)
        return grad_weights

    def _id_factors(self, factors: list[Tensor]) -> Tensor | None:
        """[N]: 1 / ids of the bag of each id that this rank looks up, or None if no entry divides by them.

        Args:
            factors: from each rank, flattened [samples, ``mean_entries``].
        """
        routes = self.module.routes
        mean_entries = routes.mean_entries[routes.rank]
        if not mean_entries:
            return None
        every = torch.cat(factors).view(-1, len(mean_entries))
        by_entry = every.new_ones(len(routes.own), len(every))
        by_entry[mean_entries] = every.T
        return by_entry.reshape(-1).repeat_interleave(self.ctx.local_bags.offsets.diff())
