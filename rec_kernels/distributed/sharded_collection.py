"""Base class of the sharded modules: shards, lookups, updates, state."""

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

from rec_kernels.distributed import agreement, reports, shard_files
from rec_kernels.distributed.backward_sync import BackwardSync
from rec_kernels.distributed.batch_checks import CheckedBatch, checked_batch
from rec_kernels.distributed.collectives import gather_objects
from rec_kernels.distributed.compositions import Composition
from rec_kernels.distributed.input_dist import BucketizedBatch, GlobalBatchInfo, SplitsAwaitable
from rec_kernels.distributed.local_shards import (
    StoredBlock,
    local_frozen_features,
    make_local_collection,
    stored_blocks,
)
from rec_kernels.distributed.lookup_context import LookupContext
from rec_kernels.distributed.messages import MessageAllToAll
from rec_kernels.distributed.output_dist import OutputDist, start_output_dist
from rec_kernels.distributed.parameter_sharding import Shard
from rec_kernels.distributed.routes import Routes
from rec_kernels.distributed.row_packing import group_entries
from rec_kernels.distributed.sharded_optimizer import TorchRecFusedOptimizer
from rec_kernels.distributed.sharded_state import ShardedState, is_of_rank
from rec_kernels.distributed.table_parameters import AllTablesParameter, TableViews
from rec_kernels.distributed.table_parts import LookupMap
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

_FLOAT32 = Wire()


class ShardedCollection(ShardedModule, FusedOptimizerModule):
    """A collection whose tables are sharded over ranks; subclasses define what is sent.

    The arguments are ``ShardedEmbeddingBagCollection``'s.

    Attributes:
        lookup_map: the lookups of its features. routes: what each rank looks up. group: the ranks.
        output_dtype, output_dims: of the outputs.
        backward_sync: decides when lookups update the tables.
        forward_all_to_all, backward_all_to_all: send rows and gradients.
    """

    _holder = "embedding_bags"
    _is_strict = True  # whether a loaded state must have all names
    _checks_replicas = True  # whether a loaded state must have equal replicas on all ranks

    def __init__(
        self,
        module: TableCollection,
        shards: list[Shard],
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        gradient: str = "global_mean",
        row_wise: str = "ordered",
        wire: Wire = _FLOAT32,
        name: str = "",
    ) -> None:
        super().__init__()
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        choices = {"gradient": gradient, "row_wise": row_wise, "wire": str(wire)}
        agreement.check_same_on_all_ranks(_options_by_name(module, shards) | choices, group)
        self.group, self.output_dtype, self._gradient = group, module.output_dtype, gradient
        self.tables, self._features, self.output_dims = module.tables, module._features, module._features.output_dims
        self._on_disk = module.row_cache is not None and module.row_cache.cache.backing == "disk"
        if wire.backward is not None and wire.rounding == "stochastic" and any(shard.replica for shard in shards):
            raise ValueError(
                f"wire.backward = {wire.backward!r} is rounded stochastically, differently on each rank, so "
                "replicas of data_parallel tables would diverge: round to nearest, or shard these tables"
            )
        self.lookup_map = LookupMap(self.tables, shards, pooled=module._pools, row_wise=row_wise)
        if not module._pools:  # adjacent shards of the same columns are sent as one block
            self.lookup_map.shards.sort(key=lambda s: (s.first_column, s.columns))
        self.routes = Routes(self.lookup_map, rank, world, pooled=module._pools, row_wise=row_wise)
        by_id = self.routes.unpooled_features if module._pools else None
        self._runs = [group_entries(entries, by_id) for entries in self.routes.entries]
        blocks = stored_blocks(self.lookup_map)
        self._stored_blocks = own = [block for block in blocks if block.shard.rank == rank]
        collection = self._make_local_collection(module, own, device, f"{name}/{module.seed}")
        self._local_collection = [collection]  # a list hides its parameters from torch.nn.Module
        self.bounds_check = module.bounds_check
        self._state = ShardedState(self._features, blocks, rank, group, device, holder=module._holder)
        fused = module.optimizer is not None
        self._torchrec_optim = TorchRecFusedOptimizer(collection.fused_optimizer) if fused else EmptyFusedOptimizer()
        self.forward_all_to_all = MessageAllToAll(group, device, wire.forward, 2 * module.seed)
        self.backward_all_to_all = MessageAllToAll(group, device, wire.backward, 2 * module.seed + 1)
        replicas = [block.name for block in own if block.shard.replica]
        trained_by_torch = module._trained_by_torch
        self.backward_sync = BackwardSync(collection, wire, trained_by_torch=trained_by_torch, replicas=replicas)
        self.backward_sync.frozen.update(module._layout.frozen)
        self._untrained = module._untrained
        self._table_views = [TableViews(self._table_modules(own))]
        if trained_by_torch:
            self._modules[module._holder] = self.embedding_bags
        else:
            trains = any(RequiresGrad.of(weight).requires_grad for weight in module._tables.weights())
            self.all_tables = AllTablesParameter.of(self.backward_sync.train_all, device, requires_grad=trains)
            if projected := [table.name for table in collection._features.tables if table.projection]:
                self._modules[module._holder] = TableViews({n: collection._tables[n] for n in projected}, "projection")
        if not module._weights.is_meta:
            self._checks_replicas = False
            self.load_state_dict(module.state_dict())
            self._checks_replicas = True
            state = collection.state_dict()
            agreement.broadcast([state[name] for name in self._state.replicated_names(state)], group)
            self.backward_sync.forbid_unsharded_weights(module._tables.weights())

    def __setattr__(self, name: str, value: Any) -> None:
        refuse_replacing(self, name, value, self._holder)
        if name == "all_tables" and name in self._parameters:
            raise RuntimeError(
                "all_tables cannot be replaced, as fully_shard() does: its requires_grad controls this rank's tables. "
                "Pass ignored_params={tables.all_tables} to fully_shard(), or apply it to the layers only"
            )
        super().__setattr__(name, value)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Adds a module as ``torch.nn.Module`` does; RuntimeError if it would replace the tables."""
        refuse_replacing(self, name, module, self._holder)
        super().add_module(name, module)

    def reset_parameters(self) -> NoReturn:
        """Raises RuntimeError, as the unsharded collection does."""
        refuse_reset(self)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled, because it belongs to a process group: save "
            "its state_dict() with torch.distributed.checkpoint, and load it into another sharded model"
        )

    def _make_local_collection(
        self, module: TableCollection, blocks: list[StoredBlock], device: torch.device, salt: str
    ) -> TableCollection:
        """Makes the collection of this rank's shards; raises any rank's error on all."""
        made = None

        def make() -> TableCollection:
            nonlocal made
            entries, world = self.routes.own, self.routes.world_size
            made = make_local_collection(module, self.lookup_map, entries, blocks, device, salt, world=world)
            return made

        try:
            made = agreement.run_on_all_ranks(make, self.group, "could not make its shards")
        except BaseException:
            shard_files.discard(made)
            raise
        if self._on_disk:
            shard_files.check_files(made, self.group)
            made._store.agree = self._on_all_ranks
        return made

    def _on_all_ranks(self, call: Callable[[], Any]) -> Any:
        """Calls a function that may use this rank's file of tables; raises any rank's error on all.

        A collective if tables are in files.
        """
        if not self._on_disk:
            return call()
        return agreement.run_on_all_ranks(call, self.group, "could not use its file of tables")

    def _table_modules(self, blocks: list[StoredBlock]) -> dict[str, nn.Module]:
        """This rank's blocks by table name; further blocks of a table by their own names."""
        found: dict[str, nn.Module] = {}
        for block in blocks:
            name = self._features.stored[block.stored].name
            found[block.name if name in found else name] = self.shards._tables[block.name]
        return found

    @property
    def shards(self) -> TableCollection:
        """The collection of this rank's shards."""
        return self._local_collection[0]

    @property
    def embedding_bags(self) -> TableViews:
        """This rank's blocks, table name -> module with a ``weight``; tables without a block here are missing.

        Names of further blocks of a table end in "#" and a number. ``requires_grad_(False)`` of a weight freezes the
        block; call it for a replica on every rank. A loss may use a block that no other rank has, if the loss of every
        rank uses one; otherwise the backward raises RuntimeError.
        """
        return self._table_views[0]

    @property
    def feature_names(self) -> list[str]:
        """The features of the collection, table by table."""
        return list(self._features.feature_names)

    @property
    def bounds_check(self) -> str:
        """The rule for ids out of range, as ``rk.EmbeddingBagCollection``'s; set the same on every rank."""
        return self._bounds_check

    @bounds_check.setter
    def bounds_check(self, value: str) -> None:
        self.shards.bounds_check = value
        if value == "error":  # the rank that feeds a batch has checked its ids
            self.shards.bounds_check = "ignore"
        self._bounds_check = value

    @torch.compiler.disable(reason="lookups in shards are collectives, which start and wait in Python")
    def forward(self, *input: Any, **kwargs: Any) -> Any:
        """Looks up this rank's samples, as the unsharded collection's ``forward``; a collective."""
        return super().forward(*input, **kwargs)

    # The steps of a lookup, as TorchRec and its pipelines call them.

    def create_context(self) -> LookupContext:
        """Creates the context of one lookup."""
        return LookupContext()

    def input_dist(self, ctx: LookupContext, features: Any) -> KJTListSplitsAwaitable:
        """Sends the ids of a batch to the ranks that have their rows.

        Args:
            features: this rank's samples, as for the unsharded collection's ``forward``.

        Raises:
            IndexError, KeyError, TypeError, ValueError: in the first wait, the batch is refused on the rank that fed
            it, before any rank looks anything up. RuntimeError: the batch of another rank, which it names, is refused.
        """
        batch, error, device = CheckedBatch(), None, self.shards.device
        names, limits = self.feature_names, [feature.num_ids for feature in self.lookup_map.features]
        try:
            kind = {"pooled": self.routes.pooled, "by_feature": ctx.by_feature}
            kind["is_weighted"] = self._features.is_weighted
            batch = checked_batch(features, names, limits, self.bounds_check, **kind)
            if batch.bags.values.device.type != device.type:
                raise ValueError(f"the batch must be on the shards' device, {device}, got {batch.bags.values.device}")
            ctx.feature_bags = batch.bags
            bags, ctx.unique_inverse = self.lookup_map.expand_features(batch.bags)
            batch = batch._replace(bags=bags)
        except Exception as refused:  # of any type: other ranks wait for this rank's message
            error = refused
        ctx.splits_awaitable = SplitsAwaitable(self, ctx, batch, error)
        return KJTListSplitsAwaitable([ctx.splits_awaitable], ctx)

    def compute_and_output_dist(self, ctx: LookupContext, input: KJTList) -> Any:
        """Looks up the ids that all ranks have sent, and starts the output dist.

        Args:
            ctx: of the lookup. input: the ids of all ranks that this rank looks up.
        """
        ctx.splits_awaitable.wait_for_info()  # a pipeline resumed after detach() has a context that has not waited
        del ctx.splits_awaitable  # frees the ids that were sent
        return super().compute_and_output_dist(ctx, input)

    @abstractmethod
    def _bucketize(self, ctx: Any, batch: CheckedBatch) -> BucketizedBatch:
        """Groups the ids of this rank's batch by the entries that look them up."""

    @abstractmethod
    def _prepare_output_dist(self, ctx: Any, batch: CheckedBatch, sent: BucketizedBatch, info: GlobalBatchInfo) -> bool:
        """Sets the rows that this rank will receive; returns whether keys have batch sizes of their own."""

    def _lookup_local(self, ctx: LookupContext, bags: SelectedKeys, rows: int, starts: Tensor | None = None) -> Tensor:
        """Looks up bags of all ranks' samples in this rank's shards.

        Args:
            rows: of the result if this rank has no shards. starts: first bag of each feature, for a row per bag.
        """

        def look_up() -> Tensor:
            nothing = bags.values.new_zeros(rows, 0, dtype=torch.float32)
            if not self.routes.own:
                return nothing
            shards = self.shards
            if ctx.is_prefetch:
                shards._store.prefetch(lambda: shards._call(bags, starts), training=self.training)
                return nothing
            with shards._store.pin_rows():
                if ctx.training and shards.row_cache is not None:  # the lookup itself inserts no rows
                    shards._store.lookup_arguments(shards._call(bags, starts), inserts=True)
                return shards._lookup(bags, starts)

        with torch.no_grad():
            return self._on_all_ranks(look_up)

    def prefetch(self, features: Any) -> None:
        """Starts to read the rows of the next batch from tables in files, during this one; a collective.

        It is a hint, as ``prefetch()`` of the unsharded collection, and sends the ids, which the lookup sends again.
        With tables in memory it does nothing.

        Args:
            features: this rank's samples, as for ``forward``.

        Raises:
            As ``input_dist``. OSError: evicted blocks find no space on disk; RuntimeError: those of another rank.
        """
        if self._on_disk:
            ctx = self.create_context()
            ctx.is_prefetch = True
            self.compute(ctx, self.input_dist(ctx, features).wait().wait())

    def _lookup_rows(self, ctx: LookupContext, counts: Tensor) -> Tensor:
        """Looks up the rows that ranks receive: [rows of all ranks, columns of this rank's shards].

        Args:
            counts: [entries of this rank, ranks] int64, rows for each rank.
        """
        ctx.set_rows_to_send(self.routes.rank, counts, self._runs[self.routes.rank])
        bags = ctx.local_bags
        unweighted = self.routes.unweighted_features
        if unweighted and bags.weights is not None:  # the samples' ranks apply the weights
            flags = [e.feature in unweighted for e in self.routes.own]
            plain = torch.tensor(flags, dtype=torch.bool, device=counts.device)  # dtype: a rank may have no entries
            ids = bags.offsets[ctx.row_starts].diff()
            bags = bags._replace(weights=torch.where(plain.repeat_interleave(ids), 1, bags.weights))
        return self._compose(ctx, self._lookup_local(ctx, bags, 0, ctx.row_starts), counts)

    def _compose(self, ctx: LookupContext, pooled: Tensor, counts: Tensor | None = None) -> Tensor:
        """Returns the columns of this rank's tables, which compressed tables compute from what was looked up.

        Args:
            counts: as for ``_lookup_rows``, if bags have rows.
        """
        if ctx.is_prefetch or not self.shards._features.finishes_later:
            return pooled
        each = None if counts is None else counts.sum(1).tolist()
        ctx.composition = Composition(self.shards, pooled, each, saves_for_backward=torch.is_grad_enabled())
        return ctx.composition.columns

    def _start_output_dist(self, output_dist: OutputDist, rows: Tensor) -> Callable[[], Tensor]:
        """Starts to send what this rank has looked up; the returned function waits for the output."""
        ctx = output_dist.ctx
        self._untrained.before_lookup(training=ctx.training and self.backward_sync.trains)
        needs_weight_grad = any(ctx.needs_weight_grad)
        ctx.pending_backward = self.backward_sync.start_lookup(needs_rows=needs_weight_grad)
        # All ranks run the backward if one of them has a projection to train.
        needs_backward = needs_weight_grad or bool(self._features.projected)
        token = self.backward_sync.token(ctx.pending_backward, needs_backward=needs_backward)
        token = token if ctx.composition is None else ctx.composition.token(token)
        weights = None if ctx.weight_grad_bags is None else ctx.feature_bags.weights
        return start_output_dist(output_dist, token, rows, weights)

    # Updates.

    def gradient_scales(self, batch_sizes: list[int]) -> list[float]:
        """Returns the factor of each rank's gradients, from the batch sizes of all."""
        if self._gradient == "sum":
            return [1.0] * len(batch_sizes)
        if self._gradient == "torchrec":
            return [1 / len(batch_sizes)] * len(batch_sizes)
        return [size / max(sum(batch_sizes), 1) for size in batch_sizes]

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Updates once for several micro-batches, as ``rk.EmbeddingBagCollection.accumulate``; on every rank.

        If an exception ends the block on some ranks only, the next backward raises RuntimeError on all of them.
        """
        with self.shards.accumulate():
            yield

    def set_grad_scaler(self, scaler: GradScaler | None) -> None:
        """Sets the scaler of losses, as ``rk.EmbeddingBagCollection.set_grad_scaler``; on every rank.

        An overflow on any rank skips the update on all ranks, and ``scaler.step(optimizer)`` reports it to each rank's
        scaler.

        Args:
            scaler: this rank's, or None. The scales of all ranks must be equal.
        """
        self.shards.set_grad_scaler(scaler)

    def freeze(self, *features: str) -> None:
        """Excludes ids of these features from updates, as ``rk.EmbeddingBagCollection.freeze``."""
        self.shards.freeze(*self._local_names(features))
        self.backward_sync.frozen.update(features)

    def unfreeze(self, *features: str) -> None:
        """Reverses ``freeze``."""
        self.shards.unfreeze(*self._local_names(features))
        self.backward_sync.frozen.difference_update(features)

    def _local_names(self, features: tuple[str, ...]) -> list[str]:
        names = self.feature_names
        if unknown := [f for f in features if f not in names]:
            raise KeyError(f"features {unknown} are not among the collection's, {names}")
        return local_frozen_features(self.routes.own, self.lookup_map, features)

    @property
    def fused_optimizer(self) -> TorchRecFusedOptimizer | EmptyFusedOptimizer:
        """The fused optimizer as TorchRec's class, which ``DistributedModelParallel.fused_optimizer`` collects."""
        return self._torchrec_optim

    @property
    def optimizer(self) -> FusedOptimizer:
        """The fused optimizer as ``torch.optim.Optimizer``, for schedulers; change it the same on every rank.

        Raises:
            ValueError: the collection has none (``optimizer=None``).
        """
        return self.shards.fused_optimizer

    @property
    def lr(self) -> Tensor:
        """A copy of the learning rates of the tables of all ranks, as ``rk.EmbeddingBagCollection.lr``."""
        groups = zip(rate_groups(self._features), self.optimizer.param_groups, strict=True)
        rates = {number: group["lr"] for own, group in groups for number in own.table_ids}
        lr = torch.tensor([rates[number] for number in sorted(rates)], dtype=torch.float32, device=self.device)
        return lr if any(table.rate is not None for table in self.tables) else lr[0]

    # Reports.

    @property
    def device(self) -> torch.device:
        """The device of this rank's lookups."""
        return self.shards.device

    @property
    def step(self) -> Tensor:
        """Number of updates of a fused optimizer, 0-dim int64, equal on all ranks."""
        return self.shards.step

    def is_weighted(self) -> bool | None:
        """The option of the unsharded collection."""
        return self._features.is_weighted

    def check(self) -> None:
        """Raises errors of earlier lookups in this rank's shards, as ``check()`` of the unsharded collection."""
        self.shards.check()

    def __repr__(self) -> str:
        """A line for each table, the optimizer, and the number of this rank's shards."""
        shards = f"{len(self._stored_blocks)} shards on rank {self.routes.rank} of {self.routes.world_size}"
        return shown(self, self.tables, f"optimizer={self.shards.optimizer}", shards)

    def memory_report(self) -> list[dict[str, Any]]:
        """Sums ``memory_report()`` over the shards of all ranks, by table; a collective.

        Replicas count on every rank. ``shards.memory_report()`` has this rank's shards only.
        """
        return reports.memory_report(self._features, self._stored_blocks, self.shards.memory_report(), self.group)

    def tier_report(self) -> dict[str, int]:
        """Sums ``tier_report()`` over the shards of all ranks; a collective."""
        ranks = gather_objects(own := self.shards.tier_report(), self.group)
        return {key: sum(found[key] for found in ranks) for key in own}

    # State.

    def flush(self) -> None:
        """Writes cached rows back to this rank's shards, as ``flush()`` of the unsharded collection.

        With tables in files it is a collective that makes them durable, and raises any rank's error on all.
        """
        if self._on_disk:
            shard_files.flush(self.shards, self.group, self._on_all_ranks)
        else:
            self.shards.flush()

    def close(self, *, apply: bool = False) -> None:
        """Closes this rank's file of tables, as ``close()`` of the unsharded collection; not a collective."""
        self.shards.close(apply=apply)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.shards._apply(fn)
        return self

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """The state by one process's names; see ``ShardedState.whole``. A collective if tables are in files.

        Args:
            args, destination, prefix, keep_vars: ``torch.nn.Module``'s; tensors are never parameters.
        """
        out = {} if destination is None else destination
        if self._on_disk:
            self.flush()  # on all ranks, before any rank applies its log
        local = self._on_all_ranks(lambda: self.shards.state_dict() | shard_files.rows_of_state(self.shards))
        for name, tensor in self._state.whole(local).items():
            out[prefix + name] = tensor
        return out

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads a state as ``torch.nn.Module`` does; a collective.

        Args:
            strict: False: tables that the state lacks stay unchanged. A parent ``torch.nn.Module`` does not pass it on,
                ``DistributedModelParallel`` does. assign: copies, too.

        Raises:
            RuntimeError: on all ranks, if one of them cannot load its state; none has loaded any table.
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
        """Loads a state of one process, or a ``state_dict()`` that torch.distributed.checkpoint has filled.

        A collective: all ranks raise any rank's error before one of them has loaded anything.
        """
        given = {name.removeprefix(prefix): t for name, t in state_dict.items() if name.startswith(prefix)}
        given = {name: t for name, t in given.items() if not is_of_rank(name)}
        # No flush: it would overwrite rows that were loaded in place with cached ones.
        own = nn.Module.state_dict(self.shards)
        names = self._state.names(own)
        missing = [prefix + name for name in names if name not in given]
        if missing == [f"{prefix}step"]:  # states of other packages have no step
            given["step"], missing = torch.zeros_like(own["step"]), []
        formats = self._state.format_names
        unexpected = [prefix + name for name in given if name not in formats and name not in names]

        def select() -> dict[str, Tensor]:
            if strict and self._is_strict:
                refuse_names(missing, unexpected)
            local = self._state.local(given, own)
            self.shards._check_state(local)
            shard_files.check_rows(self.shards, local)
            return local

        refused = "cannot load its state, and no rank has loaded any of its tables"
        local = agreement.run_on_all_ranks(select, self.group, refused)
        if self._checks_replicas:
            agreement.check_equal_tensors(self._state.replicated_names(local), local, self.group)
        missing_keys += missing
        unexpected_keys += unexpected
        self._on_all_ranks(lambda: shard_files.write_rows(self.shards, local))
        self.shards.load_state_dict(local, strict=False)
        if not missing:
            self.backward_sync.num_backwards = 0  # the ranks' states are equal again


def _options_by_name(module: TableCollection, shards: list[Shard]) -> dict[str, str]:
    """The options that must be equal on all ranks, by name."""
    tables = [[describe(table), table.feature_names] for table in module.tables]
    options = module.rounding, module.seed, module.output_dtype, module.bounds_check, module.is_weighted()
    cache = None if module.row_cache is None else module.row_cache.cache
    lr = [] if module.optimizer is None else [group["lr"] for group in module.fused_optimizer.param_groups]
    weights = [RequiresGrad.of(weight).requires_grad for weight in module._tables.weights()]
    return {
        "tables": str(tables),
        "the plan": str(shards),
        "the optimizer": f"{module.optimizer}, now with lr={lr}",
        "frozen features and tables": f"{sorted(module._layout.frozen)} {weights}",
        "rounding, seed, output_dtype, bounds_check and is_weighted": str(options),
        "the row cache": str(cache),
        "whether the collection is on the meta device": str(module._weights.is_meta),
    }
