"""Shared parts of the modules that take the place of collections on every rank: shards, updates, state."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import ShardedModule
from torchrec.optim.fused import EmptyFusedOptimizer, FusedOptimizerModule

from rec_kernels.distributed import agreement, batches, reports, shard_files
from rec_kernels.distributed.backwards import Backwards
from rec_kernels.distributed.compositions import Composition
from rec_kernels.distributed.id_splits import IdSplits
from rec_kernels.distributed.local_shards import Piece, frozen_entries, make_collection, pieces_of
from rec_kernels.distributed.messages import Post
from rec_kernels.distributed.optimizer_face import TorchRecFace
from rec_kernels.distributed.parts import PartMap
from rec_kernels.distributed.plan import Shard
from rec_kernels.distributed.routes import Routes
from rec_kernels.distributed.row_exchange import RowContext, runs_of
from rec_kernels.distributed.state import ShardedState, is_of_rank
from rec_kernels.distributed.torch_tables import AllTables, ShownTables
from rec_kernels.distributed.trips import Trip, leave
from rec_kernels.distributed.wire import Wire
from rec_kernels.nn.collection import TableCollection
from rec_kernels.nn.jagged.select_features import SelectedKeys
from rec_kernels.nn.tables.config import describe, shown
from rec_kernels.nn.tables.load_state import refuse_names
from rec_kernels.nn.tables.parameters import RequiresGrad, refuse_replacing, refuse_reset
from rec_kernels.nn.training.fused_optimizer import FusedOptimizer
from rec_kernels.nn.training.fused_update import rate_groups

if TYPE_CHECKING:
    from typing_extensions import Self

_FLOATS = Wire()


class ShardedCollection(ShardedModule, FusedOptimizerModule):
    """A collection whose tables are shared out among ranks. What travels is the subclasses' business.

    The arguments are ``ShardedEmbeddingBagCollection``'s.

    Attributes:
        parts: the lookups that stand for its features. routes: which rank looks up what. group: the ranks.
        output_dtype, output_dims: of the outputs.
        backwards: when its lookups are updates. forward_post, backward_post: how rows and gradients travel.
    """

    _holder = "embedding_bags"
    _is_strict = True  # whether a state is to have all names
    _are_alike = True  # whether ranks have the same numbers in what each of them has, as they do but at the beginning

    def __init__(
        self,
        module: TableCollection,
        shards: list[Shard],
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        gradient: str = "global_mean",
        row_wise: str = "ordered",
        wire: Wire = _FLOATS,
        name: str = "",
    ) -> None:
        super().__init__()
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        choices = {"gradient": gradient, "row_wise": row_wise, "wire": str(wire)}
        agreement.check_same(_described(module, shards) | choices, group)
        self.group, self.output_dtype, self._gradient = group, module.output_dtype, gradient
        self.tables, self._features, self.output_dims = module.tables, module._features, module._features.output_dims
        self._on_disk = module.row_cache is not None and module.row_cache.cache.backing == "disk"
        if wire.backward is not None and wire.rounding == "stochastic" and any(shard.replica for shard in shards):
            raise ValueError(
                f"wire.backward = {wire.backward!r} is rounded stochastically, otherwise on the way to each rank: "
                "replicas of data_parallel tables would not stay alike; round to the nearest, or shard these tables"
            )
        self.parts = PartMap(self.tables, shards, pooled=module._pools, row_wise=row_wise)
        if not module._pools:  # shards of the same columns side by side: their rows travel as one block
            self.parts.shards.sort(key=lambda s: (s.first_column, s.columns))
        self.routes = Routes(self.parts, rank, world, pooled=module._pools, row_wise=row_wise)
        by_id = self.routes.by_id if module._pools else None
        self._runs = [runs_of(entries, by_id) for entries in self.routes.entries]
        pieces = pieces_of(self.parts)
        self._pieces = own = [p for p in pieces if p.shard.rank == rank]
        collection = self._made(module, own, device, f"{name}/{module.seed}")
        self._held = [collection]  # in a list, so that torch.nn.Module does not find its parameters
        self.bounds_check = module.bounds_check
        self._state = ShardedState(self._features, pieces, rank, group, device, holder=module._holder)
        fused = module.optimizer is not None
        self._face = TorchRecFace(collection.fused_optimizer) if fused else EmptyFusedOptimizer()
        self.forward_post = Post(group, device, wire.forward, 2 * module.seed)
        self.backward_post = Post(group, device, wire.backward, 2 * module.seed + 1)
        replicas = [p.name for p in own if p.shard.replica]
        self.backwards = Backwards(collection, wire, trained_by_torch=module._trained_by_torch, replicas=replicas)
        self.backwards.frozen.update(module._layout.frozen)
        self._untrained = module._untrained
        self._shown = [ShownTables(self._blocks(own))]
        if module._trained_by_torch:
            self._modules[module._holder] = self.embedding_bags
        else:
            trains = any(RequiresGrad.of(weight).requires_grad for weight in module._held.weights())
            self.all_tables = AllTables.of(self.backwards.train_all, device, requires_grad=trains)
            if projected := [table.name for table in collection._features.tables if table.projection]:
                self._modules[module._holder] = ShownTables({n: collection._held[n] for n in projected}, "projection")
        if not module._weights.is_meta:
            self._are_alike = False
            self.load_state_dict(module.state_dict())
            self._are_alike = True
            state = collection.state_dict()
            agreement.broadcast([state[name] for name in self._state.replicated_names(state)], group)
            self.backwards.refuse_whole(module._held.weights())

    def __setattr__(self, name: str, value: Any) -> None:
        refuse_replacing(self, name, value, self._holder)
        if name == "all_tables" and name in self._parameters:
            raise RuntimeError(
                "all_tables cannot be another parameter, as fully_shard() makes of it: its requires_grad is that of "
                "this rank's tables. Give fully_shard() ignored_params={tables.all_tables}, or the layers only"
            )
        super().__setattr__(name, value)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Adds a module as ``torch.nn.Module`` does; RuntimeError if it would take the place of the tables."""
        refuse_replacing(self, name, module, self._holder)
        super().add_module(name, module)

    def reset_parameters(self) -> NoReturn:
        """Raises RuntimeError, as that of the whole collection."""
        refuse_reset(self)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled, as it belongs to a process group: save its "
            "state_dict() by torch.distributed.checkpoint, and load it into another model that is sharded"
        )

    def _made(self, module: TableCollection, pieces: list[Piece], device: torch.device, salt: str) -> TableCollection:
        """The collection of this rank's shards; if a rank cannot make its own, all of them raise an error."""
        made = None

        def make() -> TableCollection:
            nonlocal made
            entries, world = self.routes.own, self.routes.world_size
            made = make_collection(module, self.parts, entries, pieces, device, salt, world=world)
            return made

        try:
            made = agreement.together(make, self.group, "could not make its shards")
        except BaseException:
            shard_files.discard(made)
            raise
        if self._on_disk:
            shard_files.check_files(made, self.group)
            made._store.agree = self._agreed
        return made

    def _agreed(self, call: Callable[[], Any]) -> Any:
        """Returns what a call returned that reads or writes this rank's file; if any rank's raised, all raise.

        With tables in files a collective, else the call alone.
        """
        return agreement.together(call, self.group, "could not use its file of tables") if self._on_disk else call()

    def _blocks(self, pieces: list[Piece]) -> dict[str, nn.Module]:
        """This rank's blocks of tables, by their names: another block of a table has one of its own."""
        found: dict[str, nn.Module] = {}
        for piece in pieces:
            name = self._features.stored[piece.stored].name
            found[piece.name if name in found else name] = self.shards._held[piece.name]
        return found

    @property
    def shards(self) -> TableCollection:
        """This rank's shards, as a collection of their own."""
        return self._held[0]

    @property
    def embedding_bags(self) -> ShownTables:
        """This rank's blocks of tables, name -> module with a ``weight``: of tables that it has none of, no name.

        A second block of a table has "#" and a number behind the name. ``requires_grad_(False)`` of a weight freezes
        the block; of a replica it is to be called on every rank. A loss may use a block if every rank's loss uses one
        of its own, that no other rank has; else the backward raises RuntimeError.
        """
        return self._shown[0]

    @property
    def feature_names(self) -> list[str]:
        """The features that it looks up, table by table."""
        return list(self._features.feature_names)

    @property
    def bounds_check(self) -> str:
        """The rule for ids outside their table, as ``rk.EmbeddingBagCollection``'s; to be set on every rank alike."""
        return self._bounds_check

    @bounds_check.setter
    def bounds_check(self, value: str) -> None:
        self.shards.bounds_check = value
        if value == "error":  # the rank that feeds an id has checked it
            self.shards.bounds_check = "ignore"
        self._bounds_check = value

    @torch.compiler.disable(reason="shards are looked up by collectives, which are begun and awaited in Python")
    def forward(self, *input: Any, **kwargs: Any) -> Any:
        """Looks up a batch of this rank's samples, as the whole collection's ``forward``; a collective."""
        return super().forward(*input, **kwargs)

    # The steps of a lookup, as TorchRec and its pipelines call them.

    def create_context(self) -> RowContext:
        """The context of one batch."""
        return RowContext()

    def input_dist(self, ctx: RowContext, features: Any) -> KJTListSplitsAwaitable:
        """Sends the ids of a batch to the ranks that have their rows.

        Args:
            features: as of the whole collection's ``forward``, of this rank's samples.

        Raises:
            IndexError, KeyError, TypeError, ValueError: in the first wait: the batch is refused, on the rank that fed
            it, before any rank looks anything up. RuntimeError: another rank's was, which is named.
        """
        given, error, device = batches.CheckedBatch(), None, self.shards.device
        names, limits = self.feature_names, [feature.num_ids for feature in self.parts.features]
        try:
            kind = {"pooled": self.routes.pooled, "by_feature": ctx.by_feature}
            kind["is_weighted"] = self._features.is_weighted
            given = batches.checked_batch(features, names, limits, self.bounds_check, **kind)
            if given.bags.values.device.type != device.type:
                raise ValueError(f"the batch must be on the shards' device, {device}, got {given.bags.values.device}")
            ctx.features = given.bags
            bags, ctx.inverse = self.parts.lookups_of(given.bags)
            given = given._replace(bags=bags)
        except Exception as refused:  # whatever it is: other ranks wait for what this one tells
            error = refused
        ctx.splits = IdSplits(self, ctx, given, error)
        return KJTListSplitsAwaitable([ctx.splits], ctx)

    def compute_and_output_dist(self, ctx: RowContext, input: KJTList) -> Any:
        """Looks up what all ranks have sent, and sends it to its samples.

        Args:
            ctx: of the batch. input: the ids of all ranks that this rank looks up.
        """
        ctx.splits.agree()  # a pipeline that goes on after detach() makes a context whose ids it does not wait for
        del ctx.splits  # and the ids that were sent
        return super().compute_and_output_dist(ctx, input)

    @abstractmethod
    def _sorted(self, ctx: Any, given: batches.CheckedBatch) -> batches.SortedIds:
        """The ids of this rank's batch as they are sent."""

    @abstractmethod
    def _take_agreed(
        self, ctx: Any, given: batches.CheckedBatch, sent: batches.SortedIds, agreed: agreement.Agreed
    ) -> bool:
        """Takes note of what all ranks have told; whether keys have batch sizes of their own."""

    def _looked_up(self, ctx: RowContext, bags: SelectedKeys, rows: int, starts: Tensor | None = None) -> Tensor:
        """Looks up bags of all ranks in this rank's shards.

        Args:
            rows: of the result, should this rank have no shards. starts: where features begin, for a row of each bag.
        """

        def look_up() -> Tensor:
            nothing = bags.values.new_zeros(rows, 0, dtype=torch.float32)
            if not self.routes.own:
                return nothing
            shards, ids = self.shards, (bags.values, bags.offsets, starts)
            if ctx.is_ahead:
                shards._store.prefetch(shards._call(*ids), training=self.training)
                return nothing
            with shards._store.held():
                if ctx.trains and shards.row_cache is not None:  # the lookup finds them, and by itself lets none in
                    shards._store.lookup_arguments(shards._call(*ids), inserts=True)
                return shards._lookup(bags, starts)

        with torch.no_grad():
            return self._agreed(look_up)

    def prefetch(self, features: Any) -> None:
        """Begins to read what the next batch needs of tables in files, while this one is computed; a collective.

        It is a hint, as ``prefetch()`` of the whole collection, and sends the ids, which the lookup sends again. With
        tables in memory it does nothing.

        Args:
            features: of this rank's samples, as of ``forward``.

        Raises:
            As ``input_dist``. OSError: blocks that make room find no space; RuntimeError: on another rank.
        """
        if self._on_disk:
            ctx = self.create_context()
            ctx.is_ahead = True
            self.compute(ctx, self.input_dist(ctx, features).wait().wait())

    def _rows_looked_up(self, ctx: RowContext, counts: Tensor) -> Tensor:
        """Rows that ranks have asked for: [rows of all ranks, columns of this rank's shards].

        Args:
            counts: [entries of this rank, ranks] int64, how many rows each rank gets.
        """
        ctx.hold(self.routes.rank, counts, self._runs[self.routes.rank])
        bags = ctx.bags
        unweighted = self.routes.unweighted
        if unweighted and bags.weights is not None:  # their samples multiply rows by weights
            flags = [e.feature in unweighted for e in self.routes.own]
            plain = torch.tensor(flags, dtype=torch.bool, device=counts.device)  # a rank may have no entries
            ids = bags.offsets[ctx.starts].diff()
            bags = bags._replace(weights=torch.where(plain.repeat_interleave(ids), 1, bags.weights))
        return self._composed(ctx, self._looked_up(ctx, bags, 0, ctx.starts), counts)

    def _composed(self, ctx: RowContext, pooled: Tensor, counts: Tensor | None = None) -> Tensor:
        """The columns of this rank's tables: what it has looked up, or where they are made of that.

        Args:
            counts: as of ``_rows_looked_up``, where bags have rows.
        """
        if ctx.is_ahead or not self.shards._features.finishes_later:
            return pooled
        each = None if counts is None else counts.sum(1).tolist()
        ctx.composition = Composition(self.shards, pooled, each, keeps=torch.is_grad_enabled())
        return ctx.composition.columns

    def _leave(self, trip: Trip, rows: Tensor) -> Callable[[], Tensor]:
        """Sends what this rank has looked up; the function that is returned waits for its output."""
        ctx = trip.batch
        self._untrained.before_lookup(training=ctx.trains and self.backwards.trains)
        ctx.begun = self.backwards.begin(needs_rows=any(ctx.wants))
        # All ranks run the backward that trains a projection of one.
        token = self.backwards.token(ctx.begun, wanted=any(ctx.wants) or bool(self._features.projected))
        token = token if ctx.composition is None else ctx.composition.token(token)
        return leave(trip, token, rows, None if ctx.fed is None else ctx.features.weights)

    # Updates.

    def gradient_scales(self, batch_sizes: list[int]) -> list[float]:
        """Factors of the gradients of the outputs of each rank, by the batch sizes of all."""
        if self._gradient == "sum":
            return [1.0] * len(batch_sizes)
        if self._gradient == "torchrec":
            return [1 / len(batch_sizes)] * len(batch_sizes)
        return [size / max(sum(batch_sizes), 1) for size in batch_sizes]

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Several micro-batches, one update, as ``rk.EmbeddingBagCollection.accumulate``; on every rank alike.

        Where an exception ends the block on some ranks only, the next backward raises RuntimeError on all of them.
        """
        with self.shards.accumulate():
            yield

    def set_grad_scaler(self, scaler: GradScaler | None) -> None:
        """Tells it that losses are scaled, as ``rk.EmbeddingBagCollection.set_grad_scaler``; on every rank alike.

        An overflow on any rank skips the update on all ranks, and ``scaler.step(optimizer)`` tells each rank's scaler.

        Args:
            scaler: this rank's, or None. All ranks' have one scale.
        """
        self.shards.set_grad_scaler(scaler)

    def freeze(self, *features: str) -> None:
        """Stops training the tables by ids of these features, as ``rk.EmbeddingBagCollection.freeze``."""
        self.shards.freeze(*self._own_names(features))
        self.backwards.frozen.update(features)

    def unfreeze(self, *features: str) -> None:
        """The reverse of ``freeze``."""
        self.shards.unfreeze(*self._own_names(features))
        self.backwards.frozen.difference_update(features)

    def _own_names(self, features: tuple[str, ...]) -> list[str]:
        names = self.feature_names
        if unknown := [f for f in features if f not in names]:
            raise KeyError(f"features {unknown} are not among the collection's, {names}")
        return frozen_entries(self.routes.own, self.parts, features)

    @property
    def fused_optimizer(self) -> TorchRecFace | EmptyFusedOptimizer:
        """TorchRec's face of the fused optimizer, which ``DistributedModelParallel.fused_optimizer`` collects."""
        return self._face

    @property
    def optimizer(self) -> FusedOptimizer:
        """The fused optimizer's ``torch.optim.Optimizer`` face, for schedulers: on every rank alike.

        Raises:
            ValueError: the collection has none (``optimizer=None``).
        """
        return self.shards.fused_optimizer

    @property
    def lr(self) -> Tensor:
        """The learning rates as ``rk.EmbeddingBagCollection.lr`` has them, of the tables of all ranks; a copy."""
        groups = zip(rate_groups(self._features), self.optimizer.param_groups, strict=True)
        rates = {number: group["lr"] for own, group in groups for number in own.table_ids}
        lr = torch.tensor([rates[number] for number in sorted(rates)], dtype=torch.float32, device=self.device)
        return lr if any(table.rate is not None for table in self.tables) else lr[0]

    # Reports.

    @property
    def device(self) -> torch.device:
        """Where this rank's lookups are made."""
        return self.shards.device

    @property
    def step(self) -> Tensor:
        """The updates so far, 0-dim int64, of a fused optimizer: on every rank alike."""
        return self.shards.step

    def is_weighted(self) -> bool | None:
        """The option of the collection that it was made of."""
        return self._features.is_weighted

    def check(self) -> None:
        """Raises what this rank's shards have found in earlier lookups, as ``check()`` of the whole collection."""
        self.shards.check()

    def __repr__(self) -> str:
        """A line for each table, the optimizer, and how many shards this rank has."""
        held = f"{len(self._pieces)} shards on rank {self.routes.rank} of {self.routes.world_size}"
        return shown(self, self.tables, f"optimizer={self.shards.optimizer}", held)

    def memory_report(self) -> list[dict[str, Any]]:
        """As ``memory_report()`` of the whole collection, with the sums of all ranks' shards; a collective.

        Replicas count on every rank. A rank's own part is ``shards.memory_report()``.
        """
        return reports.memory_report(self._features, self._pieces, self.shards.memory_report(), self.group)

    def tier_report(self) -> dict[str, int]:
        """As ``tier_report()`` of the whole collection, with the sums of all ranks' shards; a collective."""
        return reports.tier_report(self.shards.tier_report(), self.group)

    # State.

    def flush(self) -> None:
        """Encodes cached rows into this rank's shards, as ``flush()`` of the whole collection.

        Of tables in files a collective, after which they are durable: an error on one rank is raised on all.
        """
        if self._on_disk:
            shard_files.flush(self.shards, self.group, self._agreed)
        else:
            self.shards.flush()

    def close(self, *, apply: bool = False) -> None:
        """Closes this rank's file of tables on disk, as ``close()`` of the whole collection; no collective."""
        self.shards.close(apply=apply)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.shards._apply(fn)
        return self

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """One process's names, dtypes and shapes; see ``ShardedState.whole``. A collective only of tables in files.

        Args:
            args, destination, prefix, keep_vars: ``torch.nn.Module``'s; tensors are never parameters.
        """
        out = {} if destination is None else destination
        if self._on_disk:
            self.flush()  # of all ranks, before the first applies its own
        local = self._agreed(lambda: self.shards.state_dict() | shard_files.rows_of_state(self.shards))
        for name, tensor in self._state.whole(local).items():
            out[prefix + name] = tensor
        return out

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads a state as ``torch.nn.Module`` does; a collective.

        Args:
            strict: False: tables that the state lacks stay as they are. A model that ``torch.nn.Module`` loads, and
                that has the collection, does not pass it on, ``DistributedModelParallel`` does. assign: also copies.

        Raises:
            RuntimeError: on all ranks, what one of them cannot load; none has loaded any table.
        """
        self._is_strict = strict
        try:
            return super().load_state_dict(state_dict, strict, assign)
        finally:
            self._is_strict = True

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Loads a whole state of one process, or ``state_dict()`` that torch.distributed.checkpoint has filled.

        A collective: what is wrong on one rank, all ranks raise before any of them has loaded anything.
        """
        given = {name.removeprefix(prefix): t for name, t in state_dict.items() if name.startswith(prefix)}
        given = {name: t for name, t in given.items() if not is_of_rank(name)}
        # Without a flush: cached rows would be written over those that were loaded in place.
        own = nn.Module.state_dict(self.shards)
        names = self._state.names(own)
        missing = [prefix + name for name in names if name not in given]
        if missing == [f"{prefix}step"]:  # other packages' states have none
            given["step"], missing = torch.zeros_like(own["step"]), []
        formats = self._state.format_names
        unexpected = [prefix + name for name in given if name not in formats and name not in names]

        def fitting() -> dict[str, Tensor]:
            if strict and self._is_strict:
                refuse_names(missing, unexpected)
            local = self._state.local(given, own)
            self.shards._check_state(local)
            shard_files.check_rows(self.shards, local)
            return local

        refused = "cannot load its state, and no rank has loaded any of its tables"
        local = agreement.together(fitting, self.group, refused)
        if self._are_alike:
            agreement.check_equal(self._state.replicated_names(local), local, self.group)
        missing_keys += missing
        unexpected_keys += unexpected
        self._agreed(lambda: shard_files.write_rows(self.shards, local))
        self.shards.load_state_dict(local, strict=False)
        if not missing:
            self.backwards.taken = 0  # ranks are alike again


def _described(module: TableCollection, shards: list[Shard]) -> dict[str, str]:
    """The choices that all ranks must have made alike, by their names."""
    tables = [[describe(table), table.feature_names] for table in module.tables]
    options = module.rounding, module.seed, module.output_dtype, module.bounds_check, module.is_weighted()
    cache = None if module.row_cache is None else module.row_cache.cache
    lr = [] if module.optimizer is None else [group["lr"] for group in module.fused_optimizer.param_groups]
    weights = [RequiresGrad.of(weight).requires_grad for weight in module._held.weights()]
    return {
        "tables": str(tables),
        "the plan": str(shards),
        "the optimizer": f"{module.optimizer}, now with lr={lr}",
        "frozen features and tables": f"{sorted(module._layout.frozen)} {weights}",
        "rounding, seed, output_dtype, bounds_check and is_weighted": str(options),
        "the row cache": str(cache),
        "whether the collection is on the meta device": str(module._weights.is_meta),
    }
