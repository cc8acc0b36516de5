"""Output dist of a row per id: as TorchRec's SequenceEmbeddingsAllToAll."""

from __future__ import annotations

import torch
from torch import Tensor

from rec_kernels.distributed.backward_sync import HEADER_SIZE
from rec_kernels.distributed.lookup_context import LookupContext
from rec_kernels.distributed.messages import MessagesAwaitable
from rec_kernels.distributed.output_dist import OutputDist
from rec_kernels.distributed.weight_gradients import weight_gradients
from rec_kernels.nn.jagged.select_features import NOTHING_BAD, bags_of_feature, ids_per_feature
from rec_kernels.nn.training.accumulate import Lookup


class SequenceOutputDist(OutputDist):
    """Sends each rank a row for each of its ids."""

    _rows: MessagesAwaitable
    _replica_rows: list[Tensor]
    _is_pooled = False

    def start_forward(self, rows: Tensor) -> None:
        """Starts to send each rank its rows.

        Args:
            rows: [rows of all ranks, columns of this rank's entries], float32.
        """
        ctx = self.ctx
        replicas = ctx.send_packer.replicas()
        self._replica_rows = [rows[:, run.columns].index_select(0, run.rows) for run in replicas]
        messages = ctx.send_packer.pack(rows, backward=False)
        expected = ctx.receive_packer.shapes(backward=False)
        self._rows = self.module.forward_all_to_all.start(messages, expected, ctx.pending_backward.noise_key)

    def wait_forward(self) -> Tensor:
        """[N, largest D]: zeros after a feature's D columns, and in rows of ids that are out of range."""
        ctx, lookup_map = self.ctx, self.module.lookup_map
        out = self._receive_rows(len(ctx.lookup_bags.values))
        if not lookup_map.has_parts:
            return out
        rows = zip(out.split(ids_per_feature(ctx.lookup_bags, len(lookup_map.lookups))), lookup_map.dims, strict=True)
        lookups, blocks = [own[:, :dim] for own, dim in rows], []
        for f, feature in enumerate(lookup_map.features):
            block = self.combiner.combine(f, lookups)
            if feature.by_id:
                weights = bags_of_feature(ctx.feature_bags, f, len(lookup_map.features)).weights
                block = (block if weights is None else weights[:, None] * block) + 0.0  # -0 becomes 0
            blocks.append(_pad_columns(block, out.shape[1]))
        return torch.cat(blocks)

    def _receive_rows(self, count: int) -> Tensor:
        """Waits for this rank's rows: [count, largest D]."""
        module = self.module
        shape = count, max(module.output_dims, default=0)
        out = torch.zeros(shape, dtype=torch.float32, device=module.shards.device)
        packer = self.ctx.receive_packer
        packer.unpack(self._rows.wait(), out, backward=False)
        for run, block in zip(packer.replicas(), self._replica_rows, strict=True):
            out[:, run.columns].index_copy_(0, run.rows, block)
        del self._rows, self._replica_rows
        return out

    def start_backward(self, grad: Tensor) -> None:
        """Starts to send each rank the gradients of the rows that it has looked up."""
        ctx, lookup_map = self.ctx, self.module.lookup_map
        if lookup_map.has_parts:
            ids = ids_per_feature(ctx.feature_bags, len(lookup_map.features))
            rows = zip(grad.split(ids), self.module.output_dims, strict=True)
            features = [own[:, :dim] for own, dim in rows]
            gradients = self.combiner.lookup_gradients(features)
            lookups = [self.combiner.row_gradients(u, own) for u, own in enumerate(gradients)]
            for f, feature in enumerate(lookup_map.features):
                if ctx.weight_grad_bags is not None and feature.by_id:
                    each = torch.arange(len(features[f]) + 1, device=grad.device)
                    ctx.combined_weight_grads[f] = self.combiner.weight_gradients(f, features[f], each)
            grad = torch.cat([_pad_columns(own, grad.shape[1]) for own in lookups])
        self._send_gradients(grad)

    def _send_gradients(self, grad: Tensor) -> None:
        """Sends gradients, with the header first.

        Args:
            grad: float32, of the rows that this rank has received; of pooled features, with 1 / ids of the bag in the
                last column.
        """
        module, ctx = self.module, self.ctx
        header = module.backward_sync.header(ctx.pending_backward, grad)
        messages = ctx.receive_packer.pack(grad, backward=True, header=[header])
        expected = ctx.send_packer.shapes(backward=True, header=HEADER_SIZE)
        self._gradients = module.backward_all_to_all.start(messages, expected, ctx.pending_backward.noise_key)

    def finish_backward(self) -> Tensor | None:
        """Updates this rank's tables with the gradients of all samples; see ``OutputDist``."""
        module, ctx, pooled = self.module, self.ctx, self._is_pooled
        received, headers = self._receive_gradients()
        bags, width = ctx.local_bags, max((e.shard.columns for e in module.routes.own), default=0)
        own = headers.new_zeros(len(bags.offsets) - 1, width + pooled)
        own[:, width:] = 1
        ctx.send_packer.unpack(received, own, backward=True, header=HEADER_SIZE)
        factors, columns = None, own[:, :width].contiguous()
        if pooled and module.routes.mean_entries[module.routes.rank]:
            factors = own[:, -1].repeat_interleave(bags.offsets.diff())
        grad_weights = None
        if any(ctx.needs_weight_grad):
            grad_weights = weight_gradients(ctx.lookup_gradients(columns), module, ctx)
        scales = module.gradient_scales(ctx.batch_sizes)
        if set(scales) != {1.0}:
            each = columns.new_tensor(scales).repeat(len(ctx.row_counts))
            columns *= each.repeat_interleave(ctx.row_counts.flatten())[:, None]
        update = local_update(ctx.lookup_gradients(columns, trains=True), factors, ctx)
        module.backward_sync.apply(ctx.pending_backward, update, headers)
        return grad_weights


def _pad_columns(rows: Tensor, width: int) -> Tensor:
    """Pads rows with zeros to [N, width]."""
    return torch.nn.functional.pad(rows, (0, width - rows.shape[1]))


def local_update(grad: Tensor, factors: Tensor | None, ctx: LookupContext) -> Lookup:
    """Returns this rank's part of the update: gradients of its columns or rows, and ids with their weights.

    Args:
        factors: 1 / ids of the bag of each id that this rank looks up; None: no gradient is divided.
    """
    bags, weights = ctx.local_bags, ctx.local_bags.weights
    if factors is not None:
        weights = factors if weights is None else weights * factors
    status = torch.full((2,), NOTHING_BAD, dtype=torch.int64, device=grad.device)
    return Lookup(grad, bags.values, bags.offsets, weights, status, ctx.row_starts)
