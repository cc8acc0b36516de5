"""EmbeddingBagCollection: many tables, one kernel call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rec_kernels.nn import bounds
from rec_kernels.nn.accumulate import Lookup, Pending, join
from rec_kernels.nn.jagged import KeyedTensor, select_keys
from rec_kernels.nn.optimizers import Adam, FusedOptimizer, Optimizer
from rec_kernels.nn.state import KINDS, StatePlaces
from rec_kernels.nn.tables import (
    EmbeddingBagConfig,
    Storage,
    Tables,
    fit_formats,
    format_tensor,
    initialize,
    shown_format,
)
from rec_kernels.ops.row_formats import row_bytes

_ops = torch.ops.rec_kernels


class EmbeddingBagCollection(nn.Module):
    """Pooled lookups of many tables in one kernel call, optionally with the optimizer fused into the backward.

    Args:
        tables: the tables; several features may share one.
        device: where weights and state live.
        optimizer: ``rk.SGD``, ``rk.Adagrad``, ``rk.RowwiseAdagrad``, ``rk.Adam``, ``rk.RowwiseAdam`` or ``rk.LAMB``:
            each backward updates the touched rows at once, and no gradient of a table is ever stored. None: tables are
            ordinary parameters with dense torch gradients.
        bounds_check: what an id outside its table does: "error" (IndexError; on a GPU at a later call, see ``check``),
            "ignore" (left out) or "none" (not checked: only for trusted input).
        rounding: how updated rows of a format other than fp32 are encoded: "stochastic" (unbiased: updates smaller than
            a format's step are not lost) or "nearest".
        seed: of stochastic rounding; the noise depends on it, on ``step``, table, row and column, and on nothing else.
            Collections of one model should differ in it: both count their tables from 0.

    All tables live in one flat tensor; ``embedding_bags[name].weight`` are views of it: [E, D] float32, float16 or
    bfloat16 for formats fp32, fp16 and bf16, uint8 rows [E, row_bytes] for the others. They are listed by
    ``named_parameters()`` (``requires_grad`` is False when fused), as ``embedding_bags.<name>.weight`` in
    ``state_dict()``, the name of a format that rows do not show as ``embedding_bags.<name>.format``; the optimizer's
    state as ``embedding_bags.<name>.sum``, ``.exp_avg`` and ``.exp_avg_sq``, float32 [E, D] or, if row-wise, [E].
    ``.to(device)`` moves them; ``.half()`` and ``.bfloat16()`` leave them as they are.
    Formats other than fp32 train with a fused optimizer only; without one, no table of the collection has a gradient.
    Dense parameters elsewhere in the model are the user's optimizer's business.

    Raises:
        ValueError: no unique table names, unknown ``bounds_check`` or ``rounding``, a seed that is no 64-bit int.
    """

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        *,
        device: torch.device | str | None = None,
        optimizer: Optimizer | None = None,
        bounds_check: str = "error",
        rounding: str = "stochastic",
        seed: int = 0,
    ) -> None:
        super().__init__()
        names = [t.name for t in tables]
        if len(set(names)) != len(names):
            raise ValueError(f"table names must differ, got {names}")
        if bounds_check not in ("error", "ignore", "none"):
            raise ValueError(f"bounds_check must be 'error', 'ignore' or 'none', got {bounds_check!r}")
        if not isinstance(optimizer, (Optimizer, type(None))):
            raise ValueError(
                "optimizer must be rk.SGD, rk.Adagrad, rk.RowwiseAdagrad, rk.Adam, rk.RowwiseAdam, rk.LAMB or None, "
                f"got {optimizer!r}"
            )
        if rounding not in ("stochastic", "nearest"):
            raise ValueError(f"rounding must be 'stochastic' or 'nearest', got {rounding!r}")
        if not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
            raise ValueError(f"seed must be an int in [-2^63, 2^63), got {seed!r}")
        self.tables, self.optimizer, self.bounds_check = list(tables), optimizer, bounds_check
        self.rounding, self.seed = rounding, int(seed)
        self.embedding_bags = Tables(names)
        self._storage = Storage(self.tables)
        self._places = StatePlaces(self.tables, {} if optimizer is None else optimizer.state)
        self._name_outputs()
        self._make_layout(device)
        self._make_weights(device)
        self._pending: Pending | None = None
        self._convert = False
        rows = [t.num_embeddings for t in self.tables for _ in t.feature_names]
        self._reports = bounds.Reports(rows, bounds_check == "error")
        self.register_load_state_dict_post_hook(_retie_after_load)

    def _name_outputs(self) -> None:
        self.feature_names = [f for t in self.tables for f in t.feature_names]
        shared = {f for f in self.feature_names if self.feature_names.count(f) > 1}
        self._output_keys = [f"{f}@{t.name}" if f in shared else f for t in self.tables for f in t.feature_names]
        self._output_dims = [t.embedding_dim for t in self.tables for _ in t.feature_names]

    def _make_layout(self, device: torch.device | str | None) -> None:
        features = [i for i, t in enumerate(self.tables) for _ in t.feature_names]
        columns = [sum(self._output_dims[:f]) for f in range(len(features))]
        layout = {
            "weight_offsets": [self._storage.starts[i] for i in features],
            "row_offsets": [self._places.rows[i] for i in features],
            "num_embeddings": [self.tables[i].num_embeddings for i in features],
            "embedding_dims": self._output_dims,
            "output_offsets": columns,
            "table_ids": features,
            "format_of": [self._storage.formats.index(self.tables[i].format) for i in features],
        }
        if self._places.is_elementwise:
            layout["moment_offsets"] = [self._places.starts[i] for i in features]
        for name, numbers in layout.items():
            tensor = torch.tensor(numbers, dtype=torch.int64, device=device)
            self.register_buffer(f"_{name}", tensor, persistent=False)
        mean = torch.tensor([self.tables[i].pooling == "mean" for i in features], dtype=torch.bool, device=device)
        self.register_buffer("_mean", mean, persistent=False)
        self.register_buffer("_seed", torch.tensor(self.seed, device=device), persistent=False)
        nothing = torch.tensor(bounds.NOTHING_BAD, device=device)
        self.register_buffer("_bad_position", nothing, persistent=False)
        self._any_mean = any(t.pooling == "mean" for t in self.tables)
        self._num_rows = self._places.rows[-1]

    def _make_weights(self, device: torch.device | str | None) -> None:
        storage = self._storage
        self.register_buffer("_weights", _zeros(storage.starts[-1], storage.dtype, device), persistent=False)
        trains = self.optimizer is None and not storage.is_bytes
        for i, table in enumerate(self.tables):
            weight = nn.Parameter(storage.view(self._weights, i), requires_grad=trains)
            self.embedding_bags[table.name].weight = weight
            self.embedding_bags[table.name].in_bytes = storage.is_bytes
        self._token = torch.empty(0, dtype=torch.float32, device=device, requires_grad=True)
        if self.optimizer is not None:
            self.register_buffer(
                "lr", torch.tensor(self.optimizer.lr, dtype=torch.float32, device=device), persistent=False
            )
            self.register_buffer("step", torch.zeros((), dtype=torch.int64, device=device))
        for kind in KINDS:
            flat = _zeros(self._places.size(kind), torch.float32, device) if kind in self._places.kinds else None
            self.register_buffer(f"_{kind}", flat, persistent=False)
        if "exp_avg" in self._places.kinds:
            self.register_buffer("beta_powers", torch.ones(2, dtype=torch.float32, device=device))
        self._tie_tables()
        with torch.no_grad():
            for table in self.tables:
                initialize(self.embedding_bags[table.name].weight, table)
        self._fused_optimizer = None
        if self.optimizer is not None:
            tables = [self.embedding_bags[n].weight for n in self.embedding_bags]
            self._fused_optimizer = FusedOptimizer(tables, self.optimizer.lr, self.lr)

    def _tie_tables(self) -> None:
        """Makes every table's parameters views of the flat tensors, and names formats beside them."""
        for i, table in enumerate(self.tables):
            holder, view = self.embedding_bags[table.name], self._storage.view(self._weights, i)
            grad = holder.weight.grad
            if torch._has_compatible_shallow_copy_type(holder.weight, view):
                holder.weight.data = view
            else:
                holder.weight = nn.Parameter(view, requires_grad=holder.weight.requires_grad)
            if grad is not None and grad.device != view.device:
                holder.weight.grad = grad.to(view.device)
            if view.dtype == torch.uint8:
                holder.register_buffer("format", format_tensor(table.format, view.device))
            for kind in self._places.kinds:
                holder.register_buffer(kind, self._places.view(kind, self._buffers[f"_{kind}"], i))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> EmbeddingBagCollection:
        # Moved, never cast: the flat tensors first, then the tables as views of them.
        was_meta = self._weights.is_meta
        for name, buffer in self._buffers.items():
            if buffer is not None:
                moved = fn(buffer)
                self._buffers[name] = moved if moved.dtype == buffer.dtype else buffer.to(moved.device)
        device = self._weights.device
        self._token = torch.empty(0, dtype=torch.float32, device=device, requires_grad=True)
        if was_meta and not self._weights.is_meta:
            # to_empty(): what no state_dict brings has to be made anew.
            self._make_layout(device)
        self._tie_tables()
        if self._fused_optimizer is not None:
            self._fused_optimizer.retie([self.embedding_bags[n].weight for n in self.embedding_bags], self.lr)
        return self

    def __setstate__(self, state: dict) -> None:
        # Copying and unpickling give every parameter storage of its own.
        super().__setstate__(state)
        self._pending = None
        self._bad_position.fill_(bounds.NOTHING_BAD)  # as for _reports: what the original has found is the original's
        self._tie_tables()

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: object) -> None:
        # Before the first table is written: torch finds a wrong shape when it has loaded what fits.
        # It is torch's own copy of what the caller gave.
        fit_formats(state_dict, prefix, self.tables, convert=self._convert)
        for name, own in super().state_dict().items():
            given = state_dict.get(prefix + name, own)
            if getattr(given, "shape", None) != own.shape:
                found = list(given.shape) if hasattr(given, "shape") else type(given).__name__
                raise RuntimeError(
                    f"size mismatch for {prefix}{name}: the state has {found}, this collection has {list(own.shape)}; "
                    "none of its tables was changed"
                )
        super()._load_from_state_dict(state_dict, prefix, *args)

    def load_state_dict(self, state_dict: dict, strict: bool = True, assign: bool = False, *, convert: bool = False):
        """As ``torch.nn.Module``'s.

        Args:
            convert: whether tables that the state has in another row format are converted, rounded to the nearest.
                Otherwise they are refused. (``convert_formats()`` does so for a model that holds the collection.)

        Raises:
            RuntimeError: a wrong shape, or another format; no table was changed.
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
        """The fused optimizer's ``torch.optim.Optimizer`` face, for learning-rate schedulers.

        Raises:
            ValueError: the collection has none (``optimizer=None``).
        """
        if self._fused_optimizer is None:
            raise ValueError("this collection has no fused optimizer: it was built with optimizer=None")
        return self._fused_optimizer

    def forward(self, features) -> KeyedTensor:
        """Looks up a batch.

        Args:
            features: ``rk.KeyedJaggedTensor`` or TorchRec's, with at least the collection's features, in any order;
                its weights are the per-sample weights.

        Returns:
            KeyedTensor, values [B, sum of D] float32: one block of columns per feature, in table order. A feature
            of two tables appears as ``feature@table``, as in TorchRec.

        Raises:
            KeyError: a feature is missing. IndexError: an id is out of range (``bounds_check="error"``). ValueError:
            bad shapes, dtypes, devices or offsets. RuntimeError: fused tables inside DistributedDataParallel. Nothing
            has changed when one is raised. On a GPU, bad ids and offsets of earlier lookups are raised, see ``check``.
        """
        values, offsets, weights = select_keys(features, self.feature_names)
        bags, layout = (values, offsets, weights), self._layout()
        if self.optimizer is None and not self._storage.is_bytes:
            tables = [self.embedding_bags[t.name].weight for t in self.tables]
            pooled, status = _ops.embedding_bag_tables(self._weights, tables, *bags, **layout)
        elif self.optimizer is None or not torch.is_grad_enabled():
            pooled, status = _ops.embedding_bag(self._weights, *bags, **layout)
        else:
            _refuse_data_parallel()
            if self._pending is None:
                state, options = (*self._state(), self._token), self._options()
                pooled, status = _ops.embedding_bag_fused(*state, *bags, **layout, **options)
            else:
                pooled, status = _ops.embedding_bag(self._weights, *bags, **layout)
                pooled = self._pending.record(pooled, *bags, status)
        if bounds.reports_late(status):
            self._note(status, values, offsets)
        return KeyedTensor(self._output_keys, self._output_dims, pooled)

    def _note(self, status: Tensor, values: Tensor, offsets: Tensor) -> None:
        if bounds.cannot_copy(status):
            self._bad_position.copy_(torch.minimum(self._bad_position, status[0]))
        else:
            self._reports.add(status, values, offsets)

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

    def state_dict(self, *args: object, **options: object) -> dict[str, Tensor]:
        """As ``torch.nn.Module``'s, after ``check()``."""
        self.check()
        return super().state_dict(*args, **options)

    def _layout(self) -> dict[str, object]:
        return {
            "weight_offsets": self._weight_offsets,
            "row_offsets": self._row_offsets,
            "num_embeddings": self._num_embeddings,
            "embedding_dims": self._embedding_dims,
            "output_offsets": self._output_offsets,
            # Without it the backward needs no coefficients.
            "mean": self._mean if self._any_mean else None,
            "output_dim": sum(self._output_dims),
            "num_rows": self._num_rows,
            "max_embedding_dim": max(self._output_dims, default=0),
            "bounds_check": self.bounds_check,
        } | self._formats()

    def _formats(self) -> dict[str, object]:
        """What lookups have to know of rows that are not all float32."""
        if not self._storage.is_bytes:
            return {}
        several = len(self._storage.formats) > 1
        return {"formats": self._storage.formats, "format_of": self._format_of if several else None}

    def _state(self) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        return self._weights, self._sum, self.step, self.lr

    def _options(self) -> dict[str, object]:
        options = {"optimizer": self.optimizer.op_name, "eps": self.optimizer.eps}
        if self._places.is_elementwise:
            options["moment_offsets"] = self._moment_offsets
        if isinstance(self.optimizer, Adam):
            options |= {"exp_avg": self._exp_avg, "exp_avg_sq": self._exp_avg_sq, "beta_powers": self.beta_powers}
            options |= zip(("beta1", "beta2"), self.optimizer.betas, strict=True)
        if not self._storage.is_bytes:
            return options
        return options | {"rounding": self.rounding, "seed": self._seed, "table_ids": self._table_ids}

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
        self._pending = pending = Pending(self._token)
        try:
            yield
            if pending.lookups:
                self._apply_update(join(pending.lookups, len(self.feature_names)))
        finally:
            pending.close()
            self._pending = None

    def _apply_update(self, lookup: Lookup) -> None:
        with torch.no_grad():
            _ops.embedding_bag_backward_fused_(
                *self._state(), *lookup[:4], **self._layout(), **self._options(), status=lookup.status
            )

    def memory_report(self) -> list[dict[str, object]]:
        """One dict per table: name, num_embeddings, embedding_dim, format, weight_bytes, state_bytes."""
        return [
            {
                "name": t.name,
                "num_embeddings": t.num_embeddings,
                "embedding_dim": t.embedding_dim,
                "format": t.format,
                "weight_bytes": t.num_embeddings * row_bytes(t.format, t.embedding_dim),
                "state_bytes": self._places.bytes(i),
            }
            for i, t in enumerate(self.tables)
        ]

    def extra_repr(self) -> str:
        """Tables and optimizer, for printing."""
        tables = ", ".join(
            " ".join([f"{t.name}: {t.num_embeddings} x {t.embedding_dim}", *shown_format(t), t.pooling])
            for t in self.tables
        )
        return f"{tables}; optimizer={self.optimizer}"


def _refuse_data_parallel() -> None:
    # DDP has no hook for a module at its construction. While it runs a forward, it says so here.
    if getattr(DistributedDataParallel, "_active_ddp_module", None) is not None:
        raise RuntimeError(
            "an EmbeddingBagCollection with a fused optimizer cannot be trained inside DistributedDataParallel: each "
            "process would update its tables with the gradients of its own rows only, DDP synchronises no update made "
            "in the backward, and the replicas would differ silently; build the collection with optimizer=None"
        )


@torch.library.register_fake("rec_kernels::_advise_huge_pages")
def _(flat: Tensor) -> bool:
    return False  # a fake tensor has no memory


def _zeros(size: int, dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
    """[size] zeros; in the CPU's memory on huge pages, where the system offers them."""
    flat = torch.empty(size, dtype=dtype, device=device)
    if flat.device.type == "cpu":
        _ops._advise_huge_pages(flat)  # before the first touch, which is what allocates the pages
    return flat.zero_()


def _retie_after_load(collection: EmbeddingBagCollection, _) -> None:
    # load_state_dict(assign=True) swaps parameters in that own their storage.
    places = collection._places
    with torch.no_grad():
        for i, table in enumerate(collection.tables):
            holder, flat = collection.embedding_bags[table.name], collection._storage.view(collection._weights, i)
            if holder.weight.data_ptr() != flat.data_ptr():
                flat.copy_(holder.weight)
            for kind in places.kinds:
                own = places.view(kind, collection._buffers[f"_{kind}"], i)
                if holder._buffers[kind].data_ptr() != own.data_ptr():
                    own.copy_(holder._buffers[kind])
    collection._tie_tables()
