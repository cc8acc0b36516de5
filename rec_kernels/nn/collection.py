"""What collections of tables have in common: storage, state, the fused optimizer, checkpoints."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rec_kernels.nn import bounds
from rec_kernels.nn.accumulate import Lookup, Pending, join
from rec_kernels.nn.ahead import Ahead
from rec_kernels.nn.arguments import check_choice
from rec_kernels.nn.assigned import allocate, assigns, copied
from rec_kernels.nn.cached_tables import holds_rows
from rec_kernels.nn.layout import move
from rec_kernels.nn.loss_scaling import ScaledLosses
from rec_kernels.nn.optimizers import FusedOptimizer, Optimizer
from rec_kernels.nn.processes import refuse_data_parallel
from rec_kernels.nn.row_cache import CacheState, RowCache, choose_cache
from rec_kernels.nn.selected import SelectedKeys
from rec_kernels.nn.shared_bags import SharedBags
from rec_kernels.nn.state import KINDS, StatePlaces
from rec_kernels.nn.tables import (
    EmbeddingConfig,
    Storage,
    Tables,
    describe,
    fit_formats,
    format_tensor,
    initialize,
    leave_bytes,
    zeros,
)
from rec_kernels.nn.tied import Tied, refuse_replaced, show
from rec_kernels.ops.autograd import arguments_of, call
from rec_kernels.ops.row_formats import FLOAT_DTYPES
from rec_kernels.ops.table_layout import TableLayout, set_frozen
from rec_kernels.ops.version_counters import call_in_place

_ops = torch.ops.rec_kernels


class TableCollection(ScaledLosses):
    """Tables in one flat tensor, their optimizer and its state. Lookups are the subclasses'.

    The arguments are ``rk.EmbeddingBagCollection``'s.
    """

    process_local = False
    _told_of_processes = False

    lr: Tensor
    step: Tensor
    _sum: Tensor | None

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        *,
        device: torch.device | str | None = None,
        optimizer: Optimizer | None = None,
        output_dtype: torch.dtype = torch.float32,
        bounds_check: str = "error",
        rounding: str = "stochastic",
        seed: int = 0,
        cache: RowCache | None = None,
    ) -> None:
        tables = self._checked(tables)
        stored = [s for t in tables for s in t.stored]
        names = [s.name for s in stored]
        if len(set(names)) != len(names):
            raise ValueError(f"table names must differ, those of parts too, got {names}")
        check_choice("bounds_check", bounds_check, ("error", "ignore", "none"))
        if not isinstance(optimizer, (Optimizer, type(None))):
            raise ValueError(
                "optimizer must be rk.SGD, rk.Adagrad, rk.RowwiseAdagrad, rk.Adam, rk.RowwiseAdam, rk.LAMB or None, "
                f"got {optimizer!r}"
            )
        check_choice("rounding", rounding, ("stochastic", "nearest"))
        if not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
            raise ValueError(f"seed must be an int in [-2^63, 2^63), got {seed!r}")
        if output_dtype not in FLOAT_DTYPES.values():
            raise ValueError(f"output_dtype must be torch.float32, float16 or bfloat16, got {output_dtype}")
        if cache is not None and (not isinstance(cache, RowCache) or optimizer is None):
            raise ValueError(
                f"cache must be an rk.RowCache, and the collection have a fused optimizer, or None, got {cache!r} and "
                f"optimizer {optimizer!r}"
            )
        kinds = {} if optimizer is None else optimizer.state
        super().__init__(
            tables,
            Storage(stored),
            StatePlaces(stored, kinds, getattr(optimizer, "state_dtype", torch.float32)),
            device=device,
            output_dtype=output_dtype,
            bounds_check=bounds_check,
            seed=int(seed),
            in_host=cache is not None and cache.backing == "host",
        )
        self.optimizer, self.rounding = optimizer, rounding
        self.embedding_bags = Tables(names)
        self._file, self._ahead = self._open_file(cache, device), Ahead()
        try:
            self._make_weights(device)
            self.row_cache = None if cache is None else CacheState(cache, self._stored, self._features, device=device)
            if cache is not None:  # its places are part of the layout
                self._make_layout(device)
        except BaseException:
            self.close()  # whoever keeps the error keeps the collection, and would have the file locked
            raise
        if self._file is not None:
            self.register_buffer("file_generation", torch.tensor(self._file.file.generation, device="cpu"))
        self._pending, self._convert = None, False
        rows = [t.num_embeddings for t in self.tables for _ in t.feature_names]
        self._reports = bounds.Reports(rows, bounds_check == "error")

    def _make_weights(self, device: torch.device | str | None) -> None:
        storage, file = self._storage, self._file
        self.register_buffer("_weights", self._new_weights(device), persistent=False)
        if file is not None:
            self.register_buffer("file_identity", torch.tensor(file.identity, device="cpu"))
        trains = self._trained_by_torch
        for i, table in enumerate(self._stored):
            weight = nn.Parameter(storage.view(self._weights, i), requires_grad=trains)
            self.embedding_bags[table.name].weight = weight
            self.embedding_bags[table.name].in_bytes = storage.is_bytes
            self.embedding_bags[table.name].in_file = file is not None
        for config in self.tables:
            if config.projection:
                matrix = torch.empty(config.projection, dtype=torch.float32, device=device)
                self.embedding_bags[config.name].projection = nn.Parameter(nn.init.xavier_uniform_(matrix))
        self._renew_token()
        if self.optimizer is not None:
            self.register_buffer(
                "lr", torch.tensor(self.optimizer.lr, dtype=torch.float32, device=device), persistent=False
            )
            self.register_buffer("step", torch.zeros((), dtype=torch.int64, device=device))
        for kind in KINDS:
            known = kind in self._places.kinds
            flat = zeros(self._places.size(kind), self._places.dtype(kind), device) if known else None
            self.register_buffer(f"_{kind}", flat, persistent=False)
        if "exp_avg" in self._places.kinds:
            self.register_buffer("beta_powers", torch.ones(2, dtype=torch.float32, device=device))
        self._tie_tables()
        self._initialize()
        self._fused_optimizer = None
        if self.optimizer is not None:
            weights = [self.embedding_bags[n].weight for n in self.embedding_bags]
            self._fused_optimizer = FusedOptimizer(weights, self.optimizer.lr, self.lr)

    @torch.no_grad()
    def _initialize(self) -> None:
        file = self._file
        for i, table in enumerate(self._stored):
            weight = self.embedding_bags[table.name].weight
            if file is None:
                initialize(weight, table)
            elif file.is_new:
                initialize(weight, table, file.rows_at_once(i), functools.partial(file.load_table, i))
        if file is not None and file.is_new:
            file.flush(apply=True)  # nobody asks for the file before it had rows

    def _projection(self, table: EmbeddingConfig) -> Tensor:
        return self.embedding_bags[table.name].projection

    def _tie_tables(self) -> None:
        """Makes every table's parameters views of the flat tensors, and names formats beside them."""
        self._tied = Tied(self._weights, [], [], [], [])
        for i, table in enumerate(self._stored):
            holder, view = self.embedding_bags[table.name], self._storage.view(self._weights, i)
            grad = holder.weight.grad
            if torch._has_compatible_shallow_copy_type(holder.weight, view):
                show(holder.weight, view)
            else:
                holder.weight = nn.Parameter(view, requires_grad=holder.weight.requires_grad)
            if grad is not None and grad.device != view.device:
                holder.weight.grad = grad.to(view.device)
            if view.dtype == torch.uint8:
                holder.register_buffer("format", format_tensor(table.format, view.device))
                holder.weight.__dict__["requires_grad_"] = leave_bytes
            for kind in self._places.kinds:
                holder.register_buffer(kind, self._places.view(kind, self._buffers[f"_{kind}"], i))
            self._tied.add(table.name, holder._parameters, view)

    def _tie_optimizer(self) -> None:
        if self._fused_optimizer is not None:
            weights = [self.embedding_bags[n].weight for n in self.embedding_bags]
            self._fused_optimizer.retie(weights, self.lr, self._shown_token())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TableCollection:
        if self._file is not None and fn(torch.empty(0, dtype=torch.uint8, device="cpu")).device.type != "cpu":
            raise NotImplementedError(
                f"tables on disk ({self._file.path}) cannot be moved: their file backs host memory"
            )
        if self._file is not None:  # even a cast that is undone would read all of their file
            given, window = fn, self._weights
            fn = lambda t: t if t is window else given(t)  # noqa: E731
        self._ahead.refuse("moving the collection")
        refuse_replaced(self._tied)
        # The flat tensors first, then the tables as views of them.
        super()._apply(fn, recurse)
        if self.row_cache is not None:
            self.row_cache._apply(fn)
        for table in self.tables:
            if table.projection:
                move(self.embedding_bags[table.name], "projection", fn)
        self._renew_token()
        self._tie_tables()
        self._tie_optimizer()
        return self

    def _load_from_state_dict(self, state_dict: dict, prefix: str, local_metadata: dict, *args: object) -> None:
        # Before the first table is written: torch finds a wrong shape when it has loaded what fits.
        # It is torch's own copy of what the caller gave.
        fit_formats(state_dict, prefix, self._stored, convert=self._convert)
        states = {n: t for n, t in super().state_dict().items() if not n.startswith("row_cache.")}
        for name, own in states.items():
            given = state_dict.get(prefix + name, own)
            if getattr(given, "shape", None) != own.shape:
                found = list(given.shape) if hasattr(given, "shape") else type(given).__name__
                raise RuntimeError(
                    f"size mismatch for {prefix}{name}: the state has {found}, this collection has {list(own.shape)}; "
                    "none of its tables was changed"
                )
        if assigns(local_metadata) and self._weights.is_meta:
            allocate(self, {name: state_dict.get(prefix + name) for name in states}, prefix)
        if self._file is not None:
            self._check_generation(state_dict, prefix)
            if not any(name.startswith(f"{prefix}row_cache.") for name in state_dict):
                state_dict.update(self.row_cache.own_state(f"{prefix}row_cache."))
            elif not self.row_cache.fits(state_dict, f"{prefix}row_cache."):
                self.flush()  # the cache will be emptied
        elif choose_cache(self.row_cache, state_dict, prefix, self._stored):
            self.flush()
        if any(f"{prefix}embedding_bags.{t.name}.weight" in state_dict for t in self._stored):
            self._ahead.forget()  # the cache is another one then, too
        self._wait()
        super()._load_from_state_dict(state_dict, prefix, copied(local_metadata), *args)

    def load_state_dict(self, state_dict: Mapping, strict: bool = True, assign: bool = False, *, convert: bool = False):
        """As ``torch.nn.Module``'s.

        Args:
            assign: also copies: tables stay where they are, and so do the parameters. Of a collection on the meta
                device, memory is taken first, on the device of the state's ``step`` or, without one, first table.
            convert: whether tables that the state has in another row format are converted, rounded to the nearest.
                Otherwise they are refused. (``convert_formats()`` does so for a model that holds the collection.)

        Raises:
            RuntimeError: a wrong shape, or another format; no table was changed. With ``assign``, a state that has
            some of a collection on the meta device, and not all.
        """
        with self.convert_formats() if convert else contextlib.nullcontext():
            return super().load_state_dict(state_dict, strict, assign)

    @contextlib.contextmanager
    def convert_formats(self) -> Iterator[None]:
        """Within the block, a state whose tables are in other row formats is converted when it is loaded."""
        self._convert = True
        try:
            yield
        finally:
            self._convert = False

    @property
    def fused_optimizer(self) -> FusedOptimizer:
        """The fused optimizer's ``torch.optim.Optimizer`` face, for learning-rate schedulers and ``GradScaler.step``.

        Raises:
            ValueError: the collection has none (``optimizer=None``).
        """
        if self._fused_optimizer is None:
            raise ValueError("this collection has no fused optimizer: it was built with optimizer=None")
        return self._fused_optimizer

    @holds_rows
    def _lookup(self, given: SelectedKeys, starts: Tensor | None = None, shared: SharedBags | None = None) -> Tensor:
        if not torch.compiler.is_compiling():
            refuse_replaced(self._tied)
            self._reports.raise_arrived(self._bad_position)  # before anything changes
        bags, cache = (given.values, given.offsets, given.weights), {}
        if self.row_cache is not None:
            cache = self.row_cache.arguments(self._slots((*bags[:2], starts), self._layout(starts)))
        layout = self._layout(starts, shared) | self._output() | cache | {"per_sample_weights": given.weights}
        if tables := self._differentiated(given.weights):
            output, status = call(_ops.embedding_bag_tables.layout, self._weights, tables, *bags[:2], **layout)
        elif self.optimizer is None or not torch.is_grad_enabled():
            output, status = call(_ops.embedding_bag.layout, self._weights, *bags[:2], **layout)
        else:
            refuse_data_parallel(self)
            if self._pending is None:
                state, options = (*self._state(), self._token), self._options() | self._scaling()
                if cache:
                    options["cache_dirty"] = self.row_cache.dirty
                output, status = call(_ops.embedding_bag_fused.layout, *state, *bags[:2], **layout, **options)
                self._watch(output)
            else:
                output, status = call(_ops.embedding_bag.layout, self._weights, *bags[:2], **layout)
                output = self._pending.record(output, shared, *bags, status, starts)
        if bounds.reports_late(status):
            self._note(status, given, starts, shared)
        if self._file is not None and output.requires_grad:
            output.register_hook(functools.partial(self._load_again, self._file.loads, bags[:2], starts))
        return output

    def _differentiated(self, factors: Tensor | None) -> list[Tensor]:
        """The tables, where torch may want gradients of them: a list, which costs a call time for each of them."""
        if self.optimizer is not None or self._storage.is_bytes or not torch.is_grad_enabled():
            return []
        bags = self.embedding_bags  # looked up once
        tables: list[Tensor] = [bags[t.name].weight for t in self._stored]
        return tables if any(t.requires_grad for t in (*tables, factors) if t is not None) else []

    def _note(self, status: Tensor, *what: Any) -> None:
        self._reports.add(status, self._bad_position, *what)

    def freeze(self, *features: str) -> None:
        """From now on, ids of these features give their tables no gradient; outputs stay as they are.

        A table that other features share still learns from those. Call it between a backward and the next forward.
        Captured CUDA graphs and compiled models follow. Not part of ``state_dict()``.

        Raises:
            KeyError: the collection has no such feature. RuntimeError: inside ``accumulate()``, whose one update has
            one set of frozen features.
        """
        self._set_frozen(self._frozen_features | self._known(features))

    def unfreeze(self, *features: str) -> None:
        """The reverse of ``freeze``."""
        self._set_frozen(self._frozen_features - self._known(features))

    def _known(self, features: tuple[str, ...]) -> set[str]:
        unknown = [f for f in features if f not in self.feature_names]
        if unknown:
            raise KeyError(f"features {unknown} are not among the collection's, {self.feature_names}")
        return set(features)

    def _set_frozen(self, features: set[str]) -> None:
        if self._pending is not None:
            raise RuntimeError("freeze() and unfreeze() inside accumulate(): call them before the block or after it")
        self._frozen_features = features
        layout = TableLayout(self._layout_records, self._layout_sizes)
        set_frozen(layout, [f in features for f in self.feature_names])

    def check(self) -> None:
        """Waits for the lookups made on a GPU and raises the first error in their input that has not been told yet.

        There, a lookup cannot raise: it goes on without the bad id, and the fused update of its batch is skipped. The
        next lookups raise what has become known by then, ``state_dict()`` and this method wait for all there is. Of
        lookups inside ``torch.compile`` and of replayed CUDA graphs only these two know, and not which one it was. On
        the CPU there is nothing to do.

        Raises:
            IndexError, ValueError: the ids or offsets of an earlier lookup are bad. Each is told once; training may go
            on.
        """
        self._reports.check(self._bad_position)

    def state_dict(self, *args: Any, **options: Any) -> Any:
        """As ``torch.nn.Module``'s, after ``check()`` and ``flush()``."""
        self.check()
        self.flush()
        if self._file is not None:
            self.file_generation.fill_(self._file.file.generation)
        return super().state_dict(*args, **options)

    def _state(self) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        held = self._buffers  # nn.Module looks attributes up in several places, and each costs as long as all of these
        return held["_weights"], held["_sum"], held["step"], held["lr"]

    def _options(self) -> dict[str, object]:
        options = self.optimizer.options()
        if "exp_avg" in self._places.kinds:
            options |= {"exp_avg": self._exp_avg, "exp_avg_sq": self._exp_avg_sq, "beta_powers": self.beta_powers}
        if not self._storage.is_bytes and not self._places.is_rounded:
            return options
        return options | self._rounding()

    def _rounding(self) -> dict[str, object]:
        return {"rounding": self.rounding, "seed": self._seed}

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Several micro-batches, one update: as if their rows had been one batch.

        Within the block, lookups read the tables as they are, and backwards leave them alone. At its end, the fused
        optimizer runs once with all gradients, and ``step`` counts one; without a backward nothing happens. Losses are
        added up: divide them where the mean is meant. The update has the bits of one batch that holds, per feature,
        micro-batch after micro-batch in the order of their backwards, if the pooled outputs' gradients are the same.
        Until then, copies of every micro-batch's ids and of the gradient of its pooled output are kept.

        An exception in the block drops what was collected: tables, state and ``step`` are as before the block.
        Gradients of per-sample weights arrive in each backward. ``torch.compile`` breaks the graph at a lookup inside
        a block.

        Raises:
            ValueError: the collection has no fused optimizer. RuntimeError: the block is inside another one of the same
            collection. RuntimeError, from a backward: it is inside and its lookup was not, or the other way round.
        """
        if self.optimizer is None:
            raise ValueError(
                "accumulate() is for a fused optimizer, and this collection was built with optimizer=None: its "
                "gradients add up by themselves until optimizer.zero_grad()"
            )
        if self._pending is not None:
            raise RuntimeError("accumulate() inside accumulate() of the same collection: end the outer block first")
        scaling = self._scaling()
        self._pending = pending = Pending(self._token)
        try:
            yield
            if pending.lookups:
                self._apply_update(join(pending.lookups, len(self.feature_names)), scaling)
        finally:
            pending.close()
            self._pending = None
        self._insert_after_update()

    def _apply_update(self, lookup: Lookup, scaling: dict[str, Tensor]) -> None:
        self._ahead.refuse("an update")
        options = self._options() | ({} if self.row_cache is None else self.row_cache.update_arguments())
        if self._file is not None:
            self._load_for_update((lookup.values, lookup.offsets), lookup.bag_starts)
        options |= self._layout(lookup.bag_starts, lookup.shared) | self._found_by(scaling, lookup.grad)
        bags = {"grad": lookup.grad, "values": lookup.values, "offsets": lookup.offsets}
        given = arguments_of("embedding_bag_backward_fused_.layout", self._state(), options | bags)
        given |= {"per_sample_weights": lookup.weights, "status": lookup.status}
        with torch.no_grad():
            call_in_place("embedding_bag_backward_fused_.layout", given)

    def extra_repr(self) -> str:
        """Tables and optimizer, for printing."""
        return f"{', '.join(map(describe, self.tables))}; optimizer={self.optimizer}"
