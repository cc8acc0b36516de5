"""Backwards of a sharded collection's lookups: what ranks tell one another in them, and when tables are updated."""

from __future__ import annotations

import weakref
import zlib
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rec_kernels.distributed.torch_tables import TorchTables
from rec_kernels.distributed.wire import Draw, Wire, as_travelled
from rec_kernels.nn.collection import TableCollection
from rec_kernels.nn.tables.parameters import RequiresGrad
from rec_kernels.nn.training.accumulate import Lookup, Pending
from rec_kernels.nn.training.dense_parameters import dense_parameters
from rec_kernels.nn.training.tied_weights import LookupNodes, hook_gradient, runs
from rec_kernels.ops.embedding_bag_autograd import overflow_of

# These say why a weight may have no gradient but that of fused lookups.
_REPLICA_USED = (
    "the weight of a table of which every rank has a replica is used beside lookups: each rank would train its own by "
    "its own loss; shard the table in another way"
)
_WHOLE_USED = (
    "the weight of a whole table, which was sharded, is used beside lookups, as by an output layer that shares it: its "
    "gradient trains no shard; give what uses it a weight of its own"
)
#: Elements of what a rank tells each of the others: see ``Backwards.facts``.
FACTS = 7
# Other messages, of integers, have less than 1 in their place, read as floats.
_NOW, _TOGETHER, _IN_BLOCK, _BY_TORCH, _CHANGED, _BEFORE_BLOCK, _AFTER_BLOCK, _FROZEN, _REPLICA, _WHOLE = range(1, 11)
_WHEN = {
    _NOW: "at once",
    _TOGETHER: "together with others of the same backward",
    _IN_BLOCK: "in an accumulate() block",
    _BY_TORCH: "by an optimizer of torch",
}
#: Reasons for which no rank may update, if a rank has one, by what that rank tells.
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
    _WHOLE: f"on rank {{}}, {_WHOLE_USED}",
}


class Begun(NamedTuple):
    """A lookup of all ranks whose backward is to come.

    Args:
        number: how many lookups of the collection were before it.
        pending: the ``accumulate()`` block that it is in, or None.
        rows: numbers that change with the tables, if its backward needs the rows as they were, else None.
        arrived: where its gradients are put, of tables that torch's optimizers train.
        draw: how its random numbers are found, if what it sends is rounded stochastically, else None.
    """

    number: int
    pending: Pending | None
    rows: list[int] | None
    arrived: list[Lookup]
    draw: Draw | None = None


class Backwards:
    """Decides when the lookups of this rank's shards are updates, and makes sure that all ranks decide alike.

    Every rank tells the others, in front of its gradients, which lookup's backward it runs, when the update is to be,
    the scale of its loss and whether its gradient has overflowed: one message, no further collective.

    Args:
        shards: this rank's. trained_by_torch: whether the whole collection has gradients of torch.
        wire: how lookups and gradients travel. replicas: names of those of the shards that every rank has.
    """

    def __init__(
        self, shards: TableCollection, wire: Wire, *, trained_by_torch: bool, replicas: Sequence[str] = ()
    ) -> None:
        self._shards, self._trained_by_torch, self._number = shards, trained_by_torch, 0
        self._replicas, self._whole = replicas, list[weakref.ref[Tensor]]()
        self._open = LookupNodes()
        if shards._update is not None:
            for name in replicas:
                self._refuse(shards._held[name].weight, _REPLICA_USED)
        self._draws, self._format = wire.rounding == "stochastic", wire.backward
        self._version, self._first = -1, 0  # of the tables' step, and the first lookup since
        #: Features of the whole collection that are frozen by ``freeze()``.
        self.frozen: set[str] = set()
        #: False: no table is trained, as ``requires_grad_(False)`` says.
        self.trains = True
        #: Where torch's optimizers train: how many backwards no exception has ended, since ranks were made alike.
        self.taken = 0

    def train_all(self, trains: bool) -> None:
        """Has updates change all tables, or none; to be called on every rank."""
        self._shards.requires_grad_(trains)
        self.trains = trains

    def refuse_whole(self, weights: Sequence[Tensor]) -> None:
        """Has a backward raise RuntimeError that gives a gradient to a table of a whole collection, now sharded."""
        for weight in weights:
            if weight.requires_grad:
                self._refuse(weight, _WHOLE_USED)
                self._whole.append(weakref.ref(weight))

    def _refuse(self, weight: Tensor, text: str) -> None:
        """Has a backward raise RuntimeError with a text where a weight gets a gradient that is not of fused lookups.

        Where a lookup's backward is part of it, that one raises, as it tells all ranks, which wait for it.
        """
        told = weakref.WeakMethod(self._runs_lookups)

        def refuse(_: Tensor) -> None:
            is_told = told()
            if is_told is None or not is_told():
                raise RuntimeError(text)

        if weight.is_floating_point():
            hook_gradient(weight, refuse)

    def _runs_lookups(self) -> bool:
        """True in a backward that also runs that of a lookup, or has run it."""
        return any(map(runs, self._open))

    def _uses_whole(self) -> bool:
        """In a lookup's backward: whether it also gives a gradient to a whole table, which somebody has kept."""
        weights = [weight for kept in self._whole if (weight := kept()) is not None and weight.requires_grad]
        with torch.inference_mode(False), torch.enable_grad():
            return any(runs(torch.autograd.graph.get_gradient_edge(weight).node) for weight in weights)

    def begin(self, *, needs_rows: bool = False) -> Begun:
        """Takes note of a lookup, before its output is there.

        Args:
            needs_rows: whether its backward needs the rows as they are, for gradients of per-sample weights.
        """
        self._number += 1
        update, rows = self._shards._update, self._versions() if needs_rows else None
        draw = self._draw() if self._draws else None
        return Begun(self._number - 1, None if update is None else update.pending, rows, [], draw)

    def _draw(self) -> Draw:
        """Where random numbers begin: a run that was resumed draws those of one that was not stopped."""
        if self._shards._update is None:
            return Draw(torch.full((), self._number, dtype=torch.int64, device=self._shards.device), 0)
        step = self._shards.step
        if step._version != self._version:  # updated or loaded
            self._version, self._first = step._version, self._number
        return Draw(step.clone(), self._number - self._first)

    def token(self, begun: Begun, *, wanted: bool) -> Tensor:
        """A tensor without elements, for whose sake autograd runs the backward of the lookup's output, on every rank.

        Args:
            wanted: whether the backward is wanted even if nothing trains the tables, for gradients of weights.
        """
        shards = self._shards
        weights: list[Tensor] = [*shards._held.weights()] if self._trained_by_torch else []
        if any(weight.requires_grad for weight in weights):
            return TorchTables.apply(shards, begun.arrived, *weights)
        trains = shards._update is not None or self._trained_by_torch
        return torch.zeros(0, dtype=torch.float32, device=shards.device, requires_grad=trains or wanted)

    def _versions(self) -> list[int]:
        """Versions of the tables; with a cache, which moves rows without changing them, of the count of updates."""
        shards = self._shards
        own = [] if shards._update is not None else shards._held.weights()
        return [t._version for t in (shards._weights if shards.row_cache is None else shards.step, *own)]

    def watch(self, begun: Begun, output: Tensor) -> None:
        """Takes note of its output, by whose autograd node torch knows which lookups a backward has."""
        if output.grad_fn is not None:
            self._open.add(output.grad_fn)
        if begun.pending is None and self._shards._update is not None:
            self._shards._update.dense.register_lookup(output)

    def facts(self, begun: Begun, grad: Tensor) -> Tensor:
        """[FACTS] float32: the lookup, when the update is to be, the scale, choices, the step, replicas, an overflow.

        Choices are learning rates and what is frozen: others would hardly have the same number below 2^24, nor would
        other numbers of replicas that torch's optimizers train. Steps differ where an exception has ended a backward,
        or an ``accumulate()`` block, of some ranks. An overflow is inf.

        Args:
            grad: of this rank's samples, float32, as it is sent.
        """
        update = self._shards._update
        if update is None:
            when = _BY_TORCH
        elif begun.pending is not update.pending:
            when = _BEFORE_BLOCK if begun.pending is None else _AFTER_BLOCK
        else:
            when = _IN_BLOCK
            try:
                self._shards._follow_requires_grad(self._shards._layout)
            except RuntimeError:  # what ranks tell one another has to arrive
                when = _FROZEN
            if update.dense.are_used(self._replicas):
                when = _REPLICA
            elif begun.pending is None:
                when = _TOGETHER if update.dense.joins(waits_for_frozen=False) else _NOW
        if begun.rows is not None and begun.rows != self._versions():
            when = _CHANGED
        if self._uses_whole():
            when = _WHOLE
        rates = [] if update is None else [group["lr"] for group in update.face.param_groups]
        replicas = [p for name in self._replicas for p in self._shards._held[name]._parameters.values()]
        flags = [self.trains, *(RequiresGrad.of(p).requires_grad for p in replicas)]
        choices = zlib.crc32(str([*flags, *sorted(self.frozen)]).encode(), zlib.crc32(array("f", rates)))
        told = [begun.number % (1 << 24), when, 0, choices % (1 << 24), self.taken % (1 << 24), 0, 0]
        facts = torch.tensor(told, dtype=torch.float32, device=grad.device)
        if update is not None:
            facts[4] = self._shards.step % (1 << 24)
            if scaling := update.scaling():
                facts[2], facts[6] = scaling["grad_scale"][0], overflow_of(as_travelled(grad, self._format))
        facts[5] = self._numbers_of_replicas() % (1 << 24)
        return facts

    def _numbers_of_replicas(self) -> Tensor | int:
        """The sum of the bits of replicas that torch's optimizers train, on each rank by itself."""
        own = [p for name in self._replicas for p in dense_parameters(self._shards._held[name])]
        return sum(p.detach().view(torch.int16).sum() for p in own)

    def take(self, begun: Begun, lookup: Lookup, facts: Tensor) -> None:
        """Updates this rank's shards with the gradients of all samples, or keeps them for who is to use them.

        Args:
            facts: [ranks, FACTS], of all ranks, after ``check``.
        """
        update = self._shards._update
        if update is None:
            begun.arrived.append(lookup)
            self.taken += 1
            return
        scaling = update.scaling()
        if scaling:
            lookup = lookup._replace(found_inf=facts[:, -1].amax())
        if begun.pending is not None:
            begun.pending.add(lookup)
        elif update.dense.is_waiting():
            update.dense.add(lookup)
        else:
            with torch.no_grad():
                self._shards._update_once([lookup], scaling)

    @staticmethod
    def check(facts: Tensor) -> None:
        """Raises RuntimeError unless what ranks have told, [ranks, FACTS], is the same but for overflows.

        On a GPU the process ends with the message instead: the host would have to wait for each backward.
        """
        told, text = facts[:, :-1], ""
        alike = (
            "ranks must run the backwards of a sharded collection's lookups in the same order, in as many backward() "
            "calls and accumulate() blocks, and with the same loss scale, learning rates, frozen features and replicas"
        )
        if facts.device.type != "cpu":
            torch._assert_async(((told == told[0]) & (told[:, 1:2] < _CHANGED)).all(), alike)
            return
        by_rank = told.tolist()
        if strange := [rank for rank, (_, when, *_) in enumerate(by_rank) if when < _NOW]:
            raise RuntimeError(
                f"rank {strange[0]} is in another collective, as a lookup, while this rank runs a lookup's backward: "
                "every rank must make as many lookups and backwards of a sharded collection, in the same order; no "
                "rank has updated its tables"
            )
        refused = [(rank, int(when)) for rank, (_, when, *_) in enumerate(by_rank) if when in _REFUSED]
        other = next((rank for rank, own in enumerate(by_rank) if own != by_rank[0]), 0)
        if refused:
            rank, when = refused[0]
            text = _REFUSED[when].format(rank)
        elif other:
            described = [
                f"rank {rank} updates with lookup {int(by_rank[rank][0])} {_WHEN[int(by_rank[rank][1])]}, scale "
                f"{by_rank[rank][2]:g}"
                for rank in (0, other)
            ]
            text = f"{alike}: {', and '.join(described)} (0: no GradScaler)"
            if by_rank[0][3] != by_rank[other][3]:
                text += (
                    ", whose learning rates, frozen features or requires_grad of replicas differ: set them on every "
                    "rank"
                )
            if by_rank[0][4] != by_rank[other][4]:
                text += (
                    ", which have made other numbers of updates, as an exception has ended a backward, or an "
                    "accumulate() block, of one of them: load a checkpoint on all"
                )
            if by_rank[0][5] != by_rank[other][5]:
                text += (
                    ", whose replicas of data_parallel tables have other numbers, as a loss of one of them has used a "
                    "replica, or its gradients were clipped by another norm: load a checkpoint on all"
                )
        if text:
            raise RuntimeError(f"{text}; no rank has updated its tables")
