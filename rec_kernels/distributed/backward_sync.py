"""Synchronization of the backwards of a sharded collection: all ranks must update their tables at the same time."""

from __future__ import annotations

import weakref
import zlib
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rec_kernels.distributed.qcomm_codec import NoiseKey, overflow_to_inf
from rec_kernels.distributed.table_parameters import DenseTableGradients
from rec_kernels.distributed.wire import Wire
from rec_kernels.nn.collection import TableCollection
from rec_kernels.nn.tables.parameters import RequiresGrad
from rec_kernels.nn.training.accumulate import Lookup, Pending
from rec_kernels.nn.training.dense_parameters import dense_parameters
from rec_kernels.nn.training.tied_weights import LookupNodes, hook_gradient, runs
from rec_kernels.ops.embedding_bag_autograd import overflow_of

# Why a weight may have no gradient except that of fused lookups.
_REPLICA_USED = (
    "the weight of a table of which every rank has a replica is used beside lookups: each rank would train its own by "
    "its own loss; shard the table in another way"
)
_UNSHARDED_USED = (
    "the weight of a whole table, which was sharded, is used beside lookups, as by an output layer that shares it: its "
    "gradient trains no shard; give what uses it a weight of its own"
)
#: Elements of the header before a rank's gradients: see ``BackwardSync.header``.
HEADER_SIZE = 7
# Element 1 of the header. Integers of another collective's message, read as floats, are less than 1.
_NOW, _TOGETHER, _IN_BLOCK, _BY_TORCH = range(1, 5)
_CHANGED, _BEFORE_BLOCK, _AFTER_BLOCK, _FROZEN, _REPLICA, _UNSHARDED = range(5, 11)
_TIMINGS = {
    _NOW: "at once",
    _TOGETHER: "together with others of the same backward",
    _IN_BLOCK: "in an accumulate() block",
    _BY_TORCH: "by an optimizer of torch",
}
#: Timings with which a rank stops the update of all ranks, and the error message.
_REFUSED = {
    _CHANGED: (
        "the tables of rank {} have changed since this lookup, and gradients of per_sample_weights need the rows as "
        "they were: run the backward before the next update, or make both lookups and their backwards inside "
        "accumulate()"
    ),
    _BEFORE_BLOCK: (
        "on rank {}, a lookup made before this accumulate() block ran its backward inside it: call the collection "
        "inside the block, too"
    ),
    _AFTER_BLOCK: (
        "on rank {}, a lookup made in an accumulate() block ran its backward after the block: call backward() inside it"
    ),
    _FROZEN: (
        "on rank {}, requires_grad of tables was changed inside accumulate(), whose one update has one set of tables: "
        "call it before or after the block"
    ),
    _REPLICA: f"on rank {{}}, {_REPLICA_USED}",
    _UNSHARDED: f"on rank {{}}, {_UNSHARDED_USED}",
}


class PendingBackward(NamedTuple):
    """A lookup of all ranks whose backward has not run.

    Args:
        lookup: number of the collection's lookups before it.
        accumulation: the ``accumulate()`` block in which it was made, or None.
        versions: version counters of the tables, if its backward needs unchanged rows, else None.
        table_gradients: receives its gradients, if torch's optimizers train the tables.
        noise_key: of stochastic rounding of what it sends, else None.
    """

    lookup: int
    accumulation: Pending | None
    versions: list[int] | None
    table_gradients: list[Lookup]
    noise_key: NoiseKey | None = None


class BackwardSync:
    """Decides when the backwards of lookups update this rank's shards, and checks that all ranks decide the same.

    Every rank sends a header before its gradients, without a further collective: the lookup, the timing of the update,
    the loss scale and whether its gradient has overflowed.

    Args:
        shards: this rank's. trained_by_torch: whether torch's optimizers train the collection.
        wire: formats of lookups and gradients. replicas: names of the shards that every rank has.
    """

    def __init__(self, shards: TableCollection, wire: Wire, *, trained_by_torch: bool, replicas: Sequence[str]) -> None:
        self._shards, self._trained_by_torch, self._num_lookups = shards, trained_by_torch, 0
        self._replicas, self._unsharded_weights = replicas, list[weakref.ref[Tensor]]()
        self._lookup_nodes = LookupNodes()
        if shards._update is not None:
            for name in replicas:
                self._forbid_gradient(shards._tables[name].weight, _REPLICA_USED)
        self._is_stochastic, self._format = wire.rounding == "stochastic", wire.backward
        self._step_version, self._first_lookup = -1, 0  # of the tables' step, and the first lookup since it changed
        #: Features of the whole collection that ``freeze()`` has frozen.
        self.frozen: set[str] = set()
        #: False: no table is trained, after ``requires_grad_(False)``.
        self.trains = True
        #: Successful backwards since the ranks' states were last loaded alike, if torch's optimizers train the tables.
        self.num_backwards = 0

    def train_all(self, trains: bool) -> None:
        """Sets whether updates change the tables; to be called on every rank."""
        self._shards.requires_grad_(trains)
        self.trains = trains

    def forbid_unsharded_weights(self, weights: Sequence[Tensor]) -> None:
        """Makes a backward raise RuntimeError if it gives a gradient to a table of the collection before sharding."""
        for weight in weights:
            if weight.requires_grad:
                self._forbid_gradient(weight, _UNSHARDED_USED)
                self._unsharded_weights.append(weakref.ref(weight))

    def _forbid_gradient(self, weight: Tensor, text: str) -> None:
        """Makes a backward raise RuntimeError if ``weight`` gets a gradient that is not of fused lookups.

        If the backward includes a lookup's, that one raises instead: it sends the header for which other ranks wait.
        """
        method = weakref.WeakMethod(self._runs_lookups)

        def refuse(_: Tensor) -> None:
            runs_lookups = method()
            if runs_lookups is None or not runs_lookups():
                raise RuntimeError(text)

        if weight.is_floating_point():
            hook_gradient(weight, refuse)

    def _runs_lookups(self) -> bool:
        """True if the current backward includes, or has run, the backward of a lookup."""
        return any(map(runs, self._lookup_nodes))

    def _uses_unsharded_weights(self) -> bool:
        """True if the current backward gives a gradient to a table of the collection before sharding."""
        weights = [w for ref in self._unsharded_weights if (w := ref()) is not None and w.requires_grad]
        with torch.inference_mode(False), torch.enable_grad():
            return any(runs(torch.autograd.graph.get_gradient_edge(weight).node) for weight in weights)

    def start_lookup(self, *, needs_rows: bool = False) -> PendingBackward:
        """Registers a lookup before its output exists.

        Args:
            needs_rows: whether its backward needs unchanged rows, for gradients of per-sample weights.
        """
        self._num_lookups += 1
        update, versions = self._shards._update, self._versions() if needs_rows else None
        noise_key = self._noise_key() if self._is_stochastic else None
        return PendingBackward(
            self._num_lookups - 1, None if update is None else update.pending, versions, [], noise_key
        )

    def _noise_key(self) -> NoiseKey:
        """Returns the next lookup's key; a run resumed from a checkpoint has those of an uninterrupted one."""
        if self._shards._update is None:
            return NoiseKey(torch.full((), self._num_lookups, dtype=torch.int64, device=self._shards.device), 0)
        step = self._shards.step
        if step._version != self._step_version:  # updated or loaded
            self._step_version, self._first_lookup = step._version, self._num_lookups
        return NoiseKey(step.clone(), self._num_lookups - self._first_lookup)

    def token(self, pending: PendingBackward, *, needs_backward: bool) -> Tensor:
        """Returns a tensor without elements that makes autograd run the lookup's backward, on every rank.

        Args:
            needs_backward: whether it runs even if no table is trained, for gradients of weights.
        """
        shards = self._shards
        weights: list[Tensor] = [*shards._tables.weights()] if self._trained_by_torch else []
        if any(weight.requires_grad for weight in weights):
            return DenseTableGradients.apply(shards, pending.table_gradients, *weights)
        trains = shards._update is not None or self._trained_by_torch
        return torch.zeros(0, dtype=torch.float32, device=shards.device, requires_grad=trains or needs_backward)

    def _versions(self) -> list[int]:
        """Version counters of the tables; with a cache, which moves unchanged rows, that of the step."""
        shards = self._shards
        own = [] if shards._update is not None else shards._tables.weights()
        return [t._version for t in (shards._weights if shards.row_cache is None else shards.step, *own)]

    def track_output(self, pending: PendingBackward, output: Tensor) -> None:
        """Registers a lookup's output, whose autograd node shows which backwards include the lookup."""
        if output.grad_fn is not None:
            self._lookup_nodes.add(output.grad_fn)
        if pending.accumulation is None and self._shards._update is not None:
            self._shards._update.dense.register_lookup(output)

    def header(self, pending: PendingBackward, grad: Tensor) -> Tensor:
        """[HEADER_SIZE] float32: lookup, timing, loss scale, settings, step, checksum of replicas, overflow.

        Settings are a checksum, below 2^24, of learning rates and of what is frozen. Steps differ if an exception has
        ended a backward, or an ``accumulate()`` block, on some ranks. The checksum of replicas is of those that torch's
        optimizers train. Overflow is 0 or inf.

        Args:
            grad: of this rank's samples, float32, as it is sent.
        """
        update = self._shards._update
        timing, settings = self._timing(pending), self._settings() % (1 << 24)
        values = [pending.lookup % (1 << 24), timing, 0, settings, self.num_backwards % (1 << 24), 0, 0]
        header = torch.tensor(values, dtype=torch.float32, device=grad.device)
        if update is not None:
            header[4] = self._shards.step % (1 << 24)
            if scaling := update.scaling():
                header[2], header[6] = scaling["grad_scale"][0], overflow_of(overflow_to_inf(grad, self._format))
        header[5] = self._checksum_of_replicas() % (1 << 24)
        return header

    def _timing(self, pending: PendingBackward) -> int:
        """Returns when this rank updates with the lookup, or why no rank may."""
        update = self._shards._update
        if update is None:
            timing = _BY_TORCH
        elif pending.accumulation is not update.pending:
            timing = _BEFORE_BLOCK if pending.accumulation is None else _AFTER_BLOCK
        else:
            timing = _IN_BLOCK
            try:
                self._shards._follow_requires_grad(self._shards._layout)
            except RuntimeError:  # the header must be sent in any case
                timing = _FROZEN
            if update.dense.are_used(self._replicas):
                timing = _REPLICA
            elif pending.accumulation is None:
                timing = _TOGETHER if update.dense.joins(waits_for_frozen=False) else _NOW
        if pending.versions is not None and pending.versions != self._versions():
            timing = _CHANGED
        return _UNSHARDED if self._uses_unsharded_weights() else timing

    def _settings(self) -> int:
        """Checksum of learning rates and of what is frozen."""
        update = self._shards._update
        rates = [] if update is None else [group["lr"] for group in update.fused_optimizer.param_groups]
        replicas = [p for name in self._replicas for p in self._shards._tables[name]._parameters.values()]
        flags = [self.trains, *(RequiresGrad.of(p).requires_grad for p in replicas)]
        return zlib.crc32(str([*flags, *sorted(self.frozen)]).encode(), zlib.crc32(array("f", rates)))

    def _checksum_of_replicas(self) -> Tensor | int:
        """The sum of the bits of this rank's replicas that torch's optimizers train."""
        own = [p for name in self._replicas for p in dense_parameters(self._shards._tables[name])]
        return sum(p.detach().view(torch.int16).sum() for p in own)

    def apply(self, pending: PendingBackward, lookup: Lookup, headers: Tensor) -> None:
        """Updates this rank's shards with the gradients of all samples, or stores them for a later update.

        Args:
            headers: [ranks, HEADER_SIZE], after ``check``.
        """
        update = self._shards._update
        if update is None:
            pending.table_gradients.append(lookup)
            self.num_backwards += 1
            return
        scaling = update.scaling()
        if scaling:
            lookup = lookup._replace(found_inf=headers[:, -1].amax())
        if pending.accumulation is not None:
            pending.accumulation.add(lookup)
        elif update.dense.is_waiting():
            update.dense.add(lookup)
        else:
            with torch.no_grad():
                self._shards._update_once([lookup], scaling)

    @staticmethod
    def check(headers: Tensor) -> None:
        """Raises RuntimeError if the headers of ranks, [ranks, HEADER_SIZE], differ except in overflow.

        On a GPU a device-side assertion ends the process instead: the host does not wait for backwards.
        """
        compared, text = headers[:, :-1], ""
        rule = (
            "ranks must run the backwards of a sharded collection's lookups in the same order, in the same backward() "
            "calls and accumulate() blocks, and with the same loss scale, learning rates, frozen features and replicas"
        )
        if headers.device.type != "cpu":
            torch._assert_async(((compared == compared[0]) & (compared[:, 1:2] < _CHANGED)).all(), rule)
            return
        by_rank = compared.tolist()
        if others := [rank for rank, (_, timing, *_) in enumerate(by_rank) if timing < _NOW]:
            raise RuntimeError(
                f"rank {others[0]} is in another collective, such as a lookup, while this rank runs a lookup's "
                "backward: all ranks must run the same lookups and backwards of a sharded collection in the "
                "same order; no rank has updated its tables"
            )
        refused = [(rank, int(timing)) for rank, (_, timing, *_) in enumerate(by_rank) if timing in _REFUSED]
        other = next((rank for rank, own in enumerate(by_rank) if own != by_rank[0]), 0)
        if refused:
            rank, timing = refused[0]
            text = _REFUSED[timing].format(rank)
        elif other:
            described = [
                f"rank {rank} updates with lookup {int(by_rank[rank][0])} {_TIMINGS[int(by_rank[rank][1])]}, scale "
                f"{by_rank[rank][2]:g}"
                for rank in (0, other)
            ]
            text = f"{rule}: {', and '.join(described)} (0: no GradScaler)"
            if by_rank[0][3] != by_rank[other][3]:
                text += "; learning rates, frozen features or requires_grad of replicas differ: set them on every rank"
            if by_rank[0][4] != by_rank[other][4]:
                text += (
                    "; the ranks have made different numbers of updates, as an exception has ended a backward, or an "
                    "accumulate() block, on one of them: load a checkpoint on all"
                )
            if by_rank[0][5] != by_rank[other][5]:
                text += (
                    "; replicas of data_parallel tables differ, as a loss of one rank has used a replica, or its "
                    "gradients were clipped by another norm: load a checkpoint on all"
                )
        if text:
            raise RuntimeError(f"{text}; no rank has updated its tables")
