"""Base class of the table collections: parameters, lookups, the fused optimizer, checkpoints."""

from __future__ import annotations

import contextlib
import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex
from weakref import WeakMethod

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from rec_kernels.nn import late_errors
from rec_kernels.nn.added_members import only_added
from rec_kernels.nn.arguments import check_choice
from rec_kernels.nn.collection_options import check_options, is_traced, refuse_setting
from rec_kernels.nn.jagged.select_features import NOTHING_BAD, SelectedKeys
from rec_kernels.nn.jagged.shared_bags import SharedBags
from rec_kernels.nn.tables.config import EmbeddingConfig, shown
from rec_kernels.nn.tables.feature_map import FeatureMap
from rec_kernels.nn.tables.file_store import make_store
from rec_kernels.nn.tables.layout import LayoutBuffers, mark_static, move, move_memory, register_memory, tensors_of
from rec_kernels.nn.tables.load_state import allocate, assigns, begin_without_step, check_tensors, copied, fit_formats
from rec_kernels.nn.tables.optimizer_state import TableOptimizers
from rec_kernels.nn.tables.optimizers import Optimizer
from rec_kernels.nn.tables.parameter_views import Tied, pickled_members, refuse_replaced, refuse_written, tie_tables
from rec_kernels.nn.tables.parameters import Tables, refuse_reset
from rec_kernels.nn.tables.prefetch import TableCall
from rec_kernels.nn.tables.row_cache import CacheState, RowCache
from rec_kernels.nn.tables.torchrec_configs import checked_tables
from rec_kernels.nn.training.accumulate import Lookup, have_same_layout, join
from rec_kernels.nn.training.data_parallel import refuse_data_parallel
from rec_kernels.nn.training.dense_parameters import Untrained
from rec_kernels.nn.training.fused_optimizer import FusedOptimizer
from rec_kernels.nn.training.fused_update import FusedUpdate, fit_powers, optimizer_tensors, update_tables
from rec_kernels.nn.training.tied_weights import DenseGradients, join_dense
from rec_kernels.ops.autograd import call
from rec_kernels.ops.bad_ids import explain

if TYPE_CHECKING:
    from typing_extensions import Self

_ops = torch.ops.rec_kernels


class TableCollection(nn.Module):
    """Tables in one flat tensor with their optimizer and its state. Subclasses define the output of a lookup.

    A collection has a layout (``LayoutBuffers``), a store of its rows (``TableStore``) and, with a fused optimizer, an
    update (``FusedUpdate``). The arguments are those of ``rk.EmbeddingBagCollection``; ``optimizer`` may also be the
    ``TableOptimizers`` of a whole collection if these tables are its shards.
    """

    process_local = False
    _warned_of_processes = False
    _is_replica = False  # torch.nn.DataParallel sets it on its replicas

    lr: Tensor
    step: Tensor
    row_cache: CacheState | None
    _weights: Tensor
    _memory: dict[str, Tensor]
    _layout: LayoutBuffers
    _tied: Tied
    _update: FusedUpdate | None = None
    _convert = False  # whether loading converts tables in other row formats
    _pools = True  # whether ``forward`` pools each bag into one row
    _holder = "embedding_bags"  # name of the submodule that holds the tables

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        *,
        device: torch.device | str | None = None,
        optimizer: Optimizer | TableOptimizers | None = None,
        output_dtype: torch.dtype = torch.float32,
        bounds_check: str = "error",
        rounding: str = "stochastic",
        seed: int = 0,
        cache: RowCache | None = None,
        is_weighted: bool | None = None,
    ) -> None:
        super().__init__()
        tables = checked_tables(tables, pooled=self._pools)
        optimizers = TableOptimizers(tables, optimizer)
        check_options(optimizers.default, output_dtype, bounds_check, rounding, seed, cache, is_weighted)
        self._features = FeatureMap(tables, optimizers, numbers_rows=cache is not None, is_weighted=is_weighted)
        self.optimizer, self.output_dtype = optimizers.default, output_dtype
        self.rounding, self.seed = rounding, int(seed)
        self._store = make_store(self._features, cache, device)
        self.row_cache = self._store.cache
        try:
            places = None if self.row_cache is None else self.row_cache.places()
            self._layout = LayoutBuffers(
                self._features, places, bounds_check=bounds_check, seed=self.seed, device=device
            )
            self._make_tables(device)
        except BaseException:
            self.close()  # the exception's traceback keeps the collection alive, which would keep a file locked
            raise
        rows = [(f, t.num_embeddings) for t in tables for f in t.feature_names]
        self._late_errors = late_errors.LateErrors(rows, bounds_check)

    def _make_tables(self, device: torch.device | str | None) -> None:
        features = self._features
        weights, state = self._store.new_weights(device), optimizer_tensors(features, device)
        has_bytes = features.storage.is_bytes and not self._trained_by_torch
        self._memory = register_memory(self, weights, state, is_bytes=has_bytes)
        numbers = self._store.numbers()
        options: Any = {"in_bytes": has_bytes, "in_file": bool(numbers), "trains": self._is_trained}
        tables = Tables(features, self._weights, **options, device=device)
        self._modules[self._holder] = tables
        for name, number in numbers.items():
            self.register_buffer(name, torch.tensor(number, device="cpu"))
        self._own_buffers = tuple(self._buffers)
        self._untrained = Untrained(features.stored)
        self._tie()
        self._store.initialize(tables.weights())
        self._tied.note_written()
        if self.optimizer is not None:
            self._update = FusedUpdate(features, tables.weights(), self._buffers, self._dense_gradients())

    @property
    def tables(self) -> Sequence[EmbeddingConfig]:
        """The table configs that the collection was made from, in order."""
        return self._features.tables

    @property
    def feature_names(self) -> list[str]:
        """The features that the collection looks up, in table order."""
        return list(self._features.feature_names)

    def is_weighted(self) -> bool | None:
        """The ``is_weighted`` option of the constructor; the method has TorchRec's name."""
        return self._features.is_weighted

    def __setattr__(self, name: str, value: Any) -> None:
        refuse_setting(self, self._holder, name, value)
        super().__setattr__(name, value)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Adds a module as ``torch.nn.Module`` does; RuntimeError if it would replace the tables."""
        refuse_setting(self, self._holder, name, module)
        super().add_module(name, module)

    def reset_parameters(self) -> NoReturn:
        """Raises RuntimeError, so that a loop over modules does not skip tables that ``to_empty()`` made."""
        refuse_reset(self)

    @property
    def _tables(self) -> Tables:
        tables: Any = self._modules[self._holder]
        return tables

    @property
    def device(self) -> torch.device:
        """Device of lookups, from the layout; weights may be elsewhere (a row cache with backing "host")."""
        return self._layout.device

    @property
    def _trained_by_torch(self) -> bool:
        """True if torch computes gradients of the tables, for an optimizer of torch."""
        return self.optimizer is None and not self._features.storage.has_codes

    @property
    def _is_trained(self) -> bool:
        """True if the tables are trained by torch or by a fused optimizer."""
        return self._trained_by_torch or self.optimizer is not None

    @property
    def bounds_check(self) -> str:
        """How ids outside their table are handled: "error", "ignore" or "none"."""
        return self._layout.bounds_check

    @bounds_check.setter
    def bounds_check(self, value: str) -> None:
        check_choice("bounds_check", value, ("error", "ignore", "none"))
        self._layout.bounds_check = self._late_errors.bounds_check = value

    def _projection(self, table: EmbeddingConfig) -> Tensor:
        """The projection matrix [D, dim] of a table that has one."""
        return self._tables[table.name].projection

    # Moves, copies and states.

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._store.refuse_prefetched("moving the collection")
        refuse_replaced(self._tied)
        given, fn = fn, self._store.wrap_apply(self._weights, fn)
        # Move the flat tensors first, then rebind the tables as views of them.
        self._layout._apply(fn)
        move_memory(self, fn)
        if self.row_cache is not None:
            self.row_cache._apply(fn)
        for table in self.tables:
            if table.projection:
                move(self._tables[table.name], "projection", fn)
        self._store.forget_prefetched()
        self._tie()
        if self._update is not None:
            self._update.follow(self._tables.weights(), self._buffers)
        with only_added(self, buffers=self._own_buffers, modules=(self._holder, "_layout", "row_cache")):
            return super()._apply(given, recurse)

    def _tie(self) -> None:
        mark_static(self._weights, *self._memory.values())
        if self._update is not None:
            self._update.release()
        is_fused = self.optimizer is not None
        self._tied = tie_tables(self._tables, self._features, self._weights, self._memory, is_fused=is_fused)
        if not self._is_trained:
            self._untrained.watch(self._tables.weights())

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple:
        self._store.wait(self.device)
        self._store.refuse_copies()
        reduced: Any = super().__reduce_ex__(protocol)
        make, arguments, state, *others = reduced
        return make, arguments, state | pickled_members(self, int(protocol)), *others

    def __getstate__(self) -> dict:
        refuse_replaced(self._tied)
        return {name: value for name, value in super().__getstate__().items() if name != "_tied"}

    def __setstate__(self, state: dict) -> None:
        # Copying and unpickling give every parameter its own storage.
        super().__setstate__(state)
        if self._weights is None:
            self._weights = self._features.storage.joined(self._tables.weights())
        self._weights = self._store.make_accessible(self._weights, self.device)
        self._layout.bad_position.fill_(NOTHING_BAD)  # as with _late_errors: only the original raises its errors
        self._tie()
        if self._update is not None:
            self._update.tie(self._tables.weights(), self._buffers, self._dense_gradients())

    def __copy__(self) -> Self:
        """A collection that shares this one's memory, with its own update object."""
        state: Any = self.__reduce_ex__(4)[2]
        state |= {"_weights": self._weights} if "_weights" in state else {}
        other = type(self).__new__(type(self))
        other.__setstate__(state if self._update is None else {**state, "_update": self._update.alone()})
        return other

    def __deepcopy__(self, memo: dict) -> Self:
        self._store.wait(self.device)
        self._store.refuse_copies()
        state = self.__getstate__()
        # Copies of views would double the memory. Other holders of a parameter, such as an optimizer, get the copy's.
        for table in self._tables:
            memo.update({at: t for at, t in self._tables[table].empty_views().items() if at not in memo})
        other = memo[id(self)] = type(self).__new__(type(self))
        other.__setstate__(copy.deepcopy(state, memo))
        return other

    def _load_from_state_dict(self, state_dict: dict, prefix: str, local_metadata: dict, *args: object) -> None:
        # Check before the first table is written: torch reports a wrong shape only after loading everything else.
        # ``state_dict`` is torch's own copy of the caller's dict.
        own = self._check_state(state_dict, prefix)
        fit_powers(state_dict, prefix, self._features.optimizers.distinct)
        begin_without_step(state_dict, prefix, own)
        if assigns(local_metadata) and self._weights.is_meta:
            allocate(self, {name: state_dict.get(prefix + name) for name in own}, prefix)
        weights = [f"{prefix}{self._holder}.{t.name}.weight" for t in self._features.stored]
        if self._store.fit_state(state_dict, prefix, weights):
            self.flush()
        if any(name in state_dict for name in weights):
            self._store.forget_prefetched()  # loading replaces the cache contents
        self._store.wait(self.device)
        super()._load_from_state_dict(state_dict, prefix, copied(local_metadata), *args)

    def _check_state(self, state_dict: dict, prefix: str = "") -> dict[str, Tensor]:
        """Converts the tables of a state if ``convert`` is set; raises RuntimeError if the state cannot be loaded.

        Args:
            prefix: prefix of the collection's names in the state; other names are ignored.

        Returns:
            The collection's own state, without its cache's.
        """
        fit_formats(state_dict, f"{prefix}{self._holder}.", self._features.stored, convert=self._convert)
        own = {n: t for n, t in super().state_dict().items() if not n.startswith("row_cache.")}
        check_tensors(state_dict, prefix, own)
        return own

    def load_state_dict(self, state_dict: Mapping, strict: bool = True, assign: bool = False, *, convert: bool = False):
        """Loads a state as ``torch.nn.Module`` does. A state that lacks only ``step`` starts at step 0.

        Args:
            assign: copies as well: tables keep their memory, and parameters stay the same objects. A collection on the
                meta device first allocates memory, on the device of the state's ``step`` or else of its first table.
            convert: whether to convert tables that the state has in another row format, rounded to nearest. Otherwise
                they raise. (Use ``convert_formats()`` for a model that contains the collection.)

        Raises:
            RuntimeError: a wrong shape, or another format; no table was changed. With ``assign``, the state has only
            some of the tensors of a collection on the meta device.
        """
        with self.convert_formats() if convert else contextlib.nullcontext():
            return super().load_state_dict(state_dict, strict, assign)

    @contextlib.contextmanager
    def convert_formats(self) -> Iterator[None]:
        """Within the block, loading a state converts tables that it has in other row formats."""
        self._convert = True
        try:
            yield
        finally:
            self._convert = False

    def state_dict(self, *args: Any, **options: Any) -> Any:
        """Returns ``torch.nn.Module``'s state, after ``check()`` and ``flush()``."""
        self.check()
        self.flush()
        for name, number in self._store.numbers().items():
            self._buffers[name].fill_(number)
        return super().state_dict(*args, **options)

    # Lookups and updates.

    @abstractmethod
    def _select_bags(self, features) -> tuple[SelectedKeys, Tensor | None]:
        """Selects the bags of a batch to look up, and [F + 1] feature starts if each bag has its own output row."""

    def _lookup(self, given: SelectedKeys, starts: Tensor | None = None, shared=None, dtype=None) -> Tensor:
        """The ops' output for the bags of all features; with ``starts`` [F + 1] and no ``shared``, one row per bag.

        Args:
            shared: the ``SharedBags`` of the batch. dtype: of the output; None: ``output_dtype``. It is always float32
                if rows are combined or projected later.
        """
        with self._store.pin_rows():
            try:
                return self._look_up(given.weighted(self._features.is_weighted), starts, shared, dtype)
            except (IndexError, ValueError) as error:
                explain(error, self.feature_names)
                raise

    def _look_up(self, given: SelectedKeys, starts: Tensor | None, shared: SharedBags | None, dtype) -> Tensor:
        layout: Any = self._modules["_layout"]
        update = self._update if torch.is_grad_enabled() else None
        if not (is_compiling := is_traced(self._tables, self._update)):
            refuse_replaced(self._tied)
            self._late_errors.raise_arrived(layout._buffers["bad_position"])  # before any state changes
        weights, bags, cache = self._weights, (given.values, given.offsets), self._store.cache
        options = layout.arguments(starts, shared)
        options |= self._features.output(dtype or self.output_dtype)
        options["per_sample_weights"] = given.weights
        if cache is not None:
            table_call = self._call(given, starts)
            options |= self._store.lookup_arguments(table_call, inserts=self.training and torch.is_grad_enabled())
        if update is not None:
            refuse_data_parallel(self)
            self._follow_requires_grad(layout)
        if update is not None and update.pending is None:
            options |= self._update_options(tensors := tensors_of(self))
            if cache is not None:
                options["cache_dirty"] = cache.dirty
            output, status = update.look_up(tensors, bags, options, layout, is_compiling=is_compiling)
            self._store.watch(output, update.dense.is_waiting)
        elif update is None and (tables := self._differentiated(given.weights)):
            output, status = call(_ops.embedding_bag_tables.layout, weights, tables, *bags, **options)
        else:
            output, status = call(_ops.embedding_bag.layout, weights, *bags, **options)
        if update is not None and update.pending is not None:
            output = update.pending.record(output, shared, *bags, given.weights, status, starts)
        if late_errors.reports_late(status):
            self._note(status, given, starts, shared)
        if cache is not None:
            self._store.keep_until_backward(output, table_call)
        return output

    def _call(self, bags: SelectedKeys | Lookup, starts: Tensor | None) -> TableCall:
        layout: Any = self._modules["_layout"]
        given = bags.values, bags.offsets, starts
        return TableCall(self._weights, given, layout.arguments(starts), self._rounding())

    def _differentiated(self, factors: Tensor | None) -> list[Tensor]:
        """Lists the tables if torch may need their gradients; each listed table makes the call slower."""
        if not torch.is_grad_enabled():
            return []
        if not self._trained_by_torch:
            self._untrained.before_lookup(training=self.training)
            return []
        tables: list[Tensor] = [*self._tables.weights()]
        return tables if any(t.requires_grad for t in (*tables, factors) if t is not None) else []

    def _note(self, status: Tensor, *what: Any) -> None:
        """Records the status of a lookup on a GPU, to raise its errors later (``LateErrors.add``)."""
        self._late_errors.add(status, self._layout.bad_position, *what)

    def _update_options(self, tensors: dict[str, Any]) -> dict[str, object]:
        options = self._update.options(tensors)
        return options | self._rounding() if self._features.is_rounded else options

    def _rounding(self) -> dict[str, object]:
        layout: Any = self._modules["_layout"]
        return {"rounding": self.rounding, "seed": layout._buffers["seed"]}

    def _update_once(self, lookups: list[Lookup], scaling: dict[str, Tensor] | None = None) -> None:
        """Updates the tables once, with the gradients of all lookups and the dense gradients of table weights.

        Args:
            scaling: the loss scale of the lookups; None: the current one, for lookups whose update was deferred.
        """
        dense = self._update.dense.take()
        if not lookups and not dense:
            return
        joins = not dense and have_same_layout(lookups)
        lookup = join(lookups, len(self.feature_names)) if joins else join_dense(lookups, dense, self._features)
        scaling = self._update.scaling() if scaling is None else scaling
        self._apply_update(lookup, list(dense), self._update.found_by(scaling, lookup))
        self._store.updated()

    def _apply_update(self, lookup: Lookup, by_row: list[int], scaling: dict[str, Tensor]) -> None:
        self._store.refuse_prefetched("an update")
        options = self._update_options(tensors := tensors_of(self)) | scaling
        options |= self._store.update_arguments(lambda: self._call(lookup, lookup.bag_starts))
        layouts = self._layout.of_updates(by_row, lookup.bag_starts, lookup.shared)
        update_tables(lookup, tensors, options, self._update.of_each(tensors, layouts))

    def _dense_gradients(self) -> DenseGradients:
        names = [table.name for table in self._features.stored]
        refused = None if self.row_cache is None else "cached rows hold updates that the weight does not"
        return DenseGradients(names, WeakMethod(self._update_once), refused)

    def _follow_requires_grad(self, layout: LayoutBuffers) -> None:
        """Freezes the features of tables with ``requires_grad`` False, in addition to those of ``freeze()``."""
        if (trained := [flag.requires_grad for flag in self._update.dense.grad_flags]) != layout.trained:
            self._update.refuse_in_block("changing requires_grad of tables")
            layout.set_trained(trained)
            self._update.dense.forget_nodes()

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Makes one update from several micro-batches, as if they had been one batch.

        Within the block, lookups read the tables unchanged, and backwards do not update them. When the block ends, the
        fused optimizer runs once with all gradients, and ``step`` increases by one; without a backward nothing happens.
        Losses are summed: divide them if you want the mean. The update is bitwise equal to that of one batch that has,
        per feature, the micro-batches in the order of their backwards, if the gradients of the pooled outputs are
        equal. Until then the collection holds copies of every micro-batch's ids and output gradient.

        An exception in the block discards the collected gradients: tables, state and ``step`` are unchanged. Gradients
        of per-sample weights arrive in each backward. ``torch.compile`` breaks the graph at a lookup inside a block.

        Raises:
            ValueError: the collection has no fused optimizer. RuntimeError: the block is nested in another one of the
            same collection. RuntimeError, from a backward: either it or its lookup is outside of the block.
        """
        update = self._fused("accumulate()", "its gradients add up by themselves until optimizer.zero_grad()")
        if update.pending is None:
            self._follow_requires_grad(self._layout)
        with self._store.defer_prefetched_rows(), update.accumulate(self._update_once):
            yield

    @property
    def fused_optimizer(self) -> FusedOptimizer:
        """The fused optimizer as a ``torch.optim.Optimizer``, for learning-rate schedulers and ``GradScaler.step``.

        Raises:
            ValueError: the collection has no fused optimizer (``optimizer=None``).
        """
        return self._fused("fused_optimizer", "its tables are parameters for optimizers of torch").fused_optimizer

    def _fused(self, what: str, otherwise: str) -> FusedUpdate:
        """Returns the fused update; raises ValueError without a fused optimizer."""
        if self._update is None:
            raise ValueError(f"{what} needs a fused optimizer, but the collection has optimizer=None: {otherwise}")
        return self._update

    def set_grad_scaler(self, scaler: GradScaler | None) -> None:
        """Makes updates unscale gradients of losses that a ``torch.amp.GradScaler`` scales, as in float16 training.

        Without this call, a scaled loss trains the tables with gradients that are too large by the scale. With it, an
        update divides by the scale, and is skipped if the gradient of the lookup's output has an infinite or NaN
        element: tables, state and ``step`` do not change. Call ``scaler.step(collection.fused_optimizer)``, next to the
        steps of other optimizers and before ``scaler.update()``, to report the overflow to the scaler. If only other
        parameters overflowed, the tables are still updated: their update ran in the backward and cannot be undone.

        The scale is read at the lookup, or at the start of an ``accumulate()`` block: do not call ``scaler.update()``
        between that and ``scaler.scale(loss)``. Call ``set_grad_scaler`` before the lookups it applies to (the backward
        of an earlier one raises RuntimeError), and before a CUDA graph is captured. The scaler is not part of
        ``state_dict()``. Copies and pickles have no scaler: their first training lookup raises until
        ``set_grad_scaler`` has been called on them, with a scaler or None.

        Args:
            scaler: the scaler whose ``scale()`` is applied to the loss. A disabled scaler counts as None.

        Raises:
            TypeError: ``scaler`` has no ``scale()``. ValueError: the collection has no fused optimizer. RuntimeError:
            the call is inside ``accumulate()``.
        """
        if scaler is not None and (isinstance(scaler, type) or not callable(getattr(scaler, "scale", None))):
            raise TypeError(f"scaler must be a torch.amp.GradScaler or None, got {scaler!r}")
        update = self._fused("set_grad_scaler()", "its gradients are torch's, which scaler.step(optimizer) divides")
        update.set_grad_scaler(scaler, self._tables.weights(), self._buffers)

    def freeze(self, *features: str) -> None:
        """Stops ids of these features from training their tables; outputs do not change.

        A table that other features share still trains through those. Call it between a backward and the next forward.
        Captured CUDA graphs and compiled models respect it. It is not part of ``state_dict()``.

        Raises:
            KeyError: the collection has no such feature. RuntimeError: inside ``accumulate()``, whose single update has
            one set of frozen features.
        """
        self._set_frozen(set.union, features)

    def unfreeze(self, *features: str) -> None:
        """Undoes ``freeze`` for these features."""
        self._set_frozen(set.difference, features)

    def _set_frozen(self, changed: Callable, features: tuple[str, ...]) -> None:
        if unknown := [f for f in features if f not in self.feature_names]:
            raise KeyError(f"features {unknown} are not among the collection's, {self.feature_names}")
        if self._update is not None:
            self._update.refuse_in_block("freeze() or unfreeze()")
        self._layout.freeze(changed(self._layout.frozen, features))

    def check(self) -> None:
        """Waits for all lookups on a GPU and raises the first input error that was not raised before.

        A lookup on a GPU cannot raise in time: it skips the bad id, and the fused update of its batch is skipped. Later
        lookups raise the errors that have reached the host by then; ``state_dict()`` and this method wait for all of
        them. Errors of lookups inside ``torch.compile`` and of replayed CUDA graphs are raised by these two only, and
        do not name the lookup. On the CPU this method does nothing.

        Raises:
            IndexError, ValueError: the ids or offsets of an earlier lookup are bad. Each error is raised once; training
            may continue.
        """
        self._late_errors.check(self._layout.bad_position)

    # Stores.

    def prefetch(self, features) -> None:
        """Starts to read rows of the next batch, for tables in a file or in host memory, during the current one.

        Call it between two lookups, with the features of the second. Training is bitwise the same without it. With
        backing "device" it does nothing.

        Backing "disk": blocks are read, and a different batch may follow. If the rows of both batches together exceed
        the memory budget, nothing is read.

        Backing "host": in training, the batch's rows enter the cache as soon as the update of the previous lookup is
        done; on a GPU, on a side stream. The next lookup must then be of this batch, with the same, unmodified tensors:
        until it, other lookups, updates, ``flush()``, ``state_dict()``, copies and moves raise RuntimeError. Within
        ``accumulate()``, and once lookups are compiled, the rows enter no earlier than without the call.

        Args:
            features: as for ``forward``.

        Raises:
            As ``forward``, except MemoryError. RuntimeError: the rows of another prefetched batch are in the cache.
        """
        try:
            self._store.prefetch(lambda: self._call(*self._select_bags(features)), training=self.training)
        except (IndexError, ValueError) as error:
            explain(error, self.feature_names)
            raise

    def close(self, *, apply: bool = False) -> None:
        """Closes the file of tables on disk, which is unusable afterwards. Changes since the last ``flush()`` are lost.

        Args:
            apply: first applies the log of the last ``flush()``, ``<path>.log``, to the file. The file is then complete
                without the log, and holds only its last generation.

        Raises:
            OSError: the copying failed; nothing is closed or lost, and the call may be repeated. ValueError: the file
            is closed already, and ``apply`` is True.
        """
        self._store.close(apply=apply)

    def flush(self) -> None:
        """Writes the rows that changed in the row cache back to their tables; without a cache it does nothing.

        Rows stay cached, and training continues unchanged. ``state_dict()`` flushes first. Afterwards every table's
        ``weight`` is up to date, and tables on disk are durable: a crash leaves the state of the last ``flush()``, or
        that of one in progress. If nothing was trained or loaded since the last flush, the file keeps its generation.
        """
        if self.row_cache is not None:
            refuse_written(self._tied)
            self._store.flush(self._weights, self._layout.arguments(), self._rounding(), self.step)

    def reset_cache_states(self) -> None:
        """Empties the row cache, so that rows are read from their tables again; without a cache it does nothing.

        Call it after writing to tables in place, which the cache does not notice: ``flush()``, write, then this method.
        Use counts and statistics restart as well.

        Raises:
            RuntimeError: there were updates since the last ``flush()``; nothing was changed. Or a table in a file was
            written to, which lookups and ``flush()`` refuse as well.
        """
        if self.row_cache is not None:
            refuse_written(self._tied)
            self._store.reset(self.step)

    def memory_report(self) -> list[dict[str, object]]:
        """One dict per stored table: name, num_embeddings, embedding_dim, format, weight_bytes, state_bytes.

        With a row cache also: cached_rows and dirty_rows (in slots, and modified there), cache_bytes (the table's share
        of slots, tags, stamps and counts), lookups and hits (ids of training batches, and those of them that were
        cached), hit_rate (None before the first), inserted, evicted, written and left_out (rows inserted, rows evicted,
        evicted rows that had to be encoded, rows without a slot).
        """
        return self._store.memory_report()

    def tier_report(self) -> dict[str, int]:
        """Bytes of the tables in each memory tier, and bytes moved between tiers.

        cache_bytes: slots with their tags, stamps, flags and counts, and the rows' counts; row_bytes: encoded rows in
        memory; host_bytes: the part of row_bytes in host memory with backing "host"; file_bytes: rows in the file, 0
        without one; index_bytes: the in-memory index of the file's blocks; moved_bytes: encoded rows moved into slots
        or back; read_bytes and written_bytes: file traffic.
        """
        return self._store.tier_report(self._weights)

    def __repr__(self) -> str:
        """One line per table, and the optimizer; storage is not shown."""
        return shown(self, self.tables, f"optimizer={self.optimizer}")
