"""EmbeddingBagCollection: many tables, one kernel call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rec_kernels.nn.accumulate import Lookup, Pending, join
from rec_kernels.nn.jagged import KeyedTensor, select_keys
from rec_kernels.nn.optimizers import SGD, FusedOptimizer, RowwiseAdagrad
from rec_kernels.ops.embedding_bag import table_starts

_ops = torch.ops.rec_kernels


@dataclass(frozen=True)
class EmbeddingBagConfig:
    """One table.

    Args:
        num_embeddings: E, rows; at least 1.
        embedding_dim: D, columns; at least 1.
        name: the table's name, different for every table of a collection, without dots.
        feature_names: the features looked up in this table; each gets D columns of the output.
        pooling: "sum" or "mean".
        format: "fp32".
        init: called once with the [E, D] weight to fill it in place; None: uniform in +-1/sqrt(E).
    """

    num_embeddings: int
    embedding_dim: int
    name: str
    feature_names: list[str]
    pooling: str = "sum"
    format: str = "fp32"
    init: Callable[[Tensor], object] | None = None

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        name: str,
        feature_names: list[str],
        pooling: str = "sum",
        format: str = "fp32",
        init: Callable[[Tensor], object] | None = None,
    ) -> None:
        if num_embeddings < 1 or embedding_dim < 1:
            raise ValueError(f"table {name!r}: num_embeddings and embedding_dim must be at least 1")
        if not name or "." in name:
            raise ValueError(f"table name {name!r} must be non-empty and without dots")
        if not feature_names or isinstance(feature_names, str):
            raise ValueError(f"table {name!r}: feature_names must be a non-empty list of names, got {feature_names!r}")
        if pooling not in ("sum", "mean"):
            raise ValueError(f"table {name!r}: pooling must be 'sum' or 'mean', got {pooling!r}")
        if format != "fp32":
            raise ValueError(f"table {name!r}: format must be 'fp32', got {format!r}")
        for field, value in (
            ("num_embeddings", num_embeddings),
            ("embedding_dim", embedding_dim),
            ("name", name),
            ("feature_names", list(feature_names)),
            ("pooling", pooling),
            ("format", format),
            ("init", init),
        ):
            object.__setattr__(self, field, value)


class _Table(nn.Module):
    """Holds one table's parameters, which are views of the collection's flat tensors."""

    weight: nn.Parameter


class _Tables(nn.Module):
    """name -> _Table. Unlike nn.ModuleDict, any name is allowed, "type" and "keys" too."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self._modules.update({name: _Table() for name in names})

    def __getitem__(self, name: str) -> _Table:
        return self._modules[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)

    def __contains__(self, name: str) -> bool:
        return name in self._modules


class EmbeddingBagCollection(nn.Module):
    """Pooled lookups of many tables in one kernel call, optionally with the optimizer fused into the backward.

    Args:
        tables: the tables; several features may share one.
        device: where weights and state live.
        optimizer: ``rk.SGD`` or ``rk.RowwiseAdagrad``: each backward updates the touched rows at once, and no gradient
            of a table is ever stored. None: tables are ordinary parameters with dense torch gradients.
        bounds_check: what an id outside its table does: "error" (IndexError), "ignore" (left out) or "none" (not
            checked: only for trusted input).

    All tables live in one flat float32 tensor; ``embedding_bags[name].weight`` are views of it, listed by
    ``named_parameters()`` (``requires_grad`` is False when fused), as ``embedding_bags.<name>.weight`` in
    ``state_dict()``; row-wise state as ``embedding_bags.<name>.sum``. ``.to(device)`` moves them; ``.half()`` and
    ``.bfloat16()`` leave them float32. Dense parameters elsewhere in the model are the user's optimizer's business.

    Raises:
        ValueError: no unique table names, unknown ``bounds_check``.
    """

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        *,
        device: torch.device | str | None = None,
        optimizer: SGD | RowwiseAdagrad | None = None,
        bounds_check: str = "error",
    ) -> None:
        super().__init__()
        names = [t.name for t in tables]
        if len(set(names)) != len(names):
            raise ValueError(f"table names must differ, got {names}")
        if bounds_check not in ("error", "ignore", "none"):
            raise ValueError(f"bounds_check must be 'error', 'ignore' or 'none', got {bounds_check!r}")
        if not isinstance(optimizer, (SGD, RowwiseAdagrad, type(None))):
            raise ValueError(f"optimizer must be rk.SGD, rk.RowwiseAdagrad or None, got {optimizer!r}")
        self.tables, self.optimizer, self.bounds_check = list(tables), optimizer, bounds_check
        self.embedding_bags = _Tables(names)
        self._starts = table_starts([t.num_embeddings * t.embedding_dim for t in tables])
        self._name_outputs()
        self._make_layout(device)
        self._make_weights(device)
        self._pending: Pending | None = None
        self.register_load_state_dict_post_hook(_retie_after_load)

    def _name_outputs(self) -> None:
        self.feature_names = [f for t in self.tables for f in t.feature_names]
        shared = {f for f in self.feature_names if self.feature_names.count(f) > 1}
        self._output_keys = [f"{f}@{t.name}" if f in shared else f for t in self.tables for f in t.feature_names]
        self._output_dims = [t.embedding_dim for t in self.tables for _ in t.feature_names]

    def _make_layout(self, device: torch.device | str | None) -> None:
        rows = [0]
        for table in self.tables:
            rows.append(rows[-1] + table.num_embeddings)
        features = [i for i, t in enumerate(self.tables) for _ in t.feature_names]
        columns = [sum(self._output_dims[:f]) for f in range(len(features))]
        layout = {
            "weight_offsets": [self._starts[i] for i in features],
            "row_offsets": [rows[i] for i in features],
            "num_embeddings": [self.tables[i].num_embeddings for i in features],
            "embedding_dims": self._output_dims,
            "output_offsets": columns,
        }
        for name, numbers in layout.items():
            tensor = torch.tensor(numbers, dtype=torch.int64, device=device)
            self.register_buffer(f"_{name}", tensor, persistent=False)
        mean = torch.tensor([self.tables[i].pooling == "mean" for i in features], dtype=torch.bool, device=device)
        self.register_buffer("_mean", mean, persistent=False)
        self._any_mean = any(t.pooling == "mean" for t in self.tables)
        self._num_rows = rows[-1]

    def _make_weights(self, device: torch.device | str | None) -> None:
        self.register_buffer("_weights", _zeros(self._starts[-1], device), persistent=False)
        for table in self.tables:
            self.embedding_bags[table.name].weight = nn.Parameter(torch.empty(0), requires_grad=self.optimizer is None)
        self._token = torch.empty(0, device=device, requires_grad=True)
        if self.optimizer is not None:
            self.register_buffer("lr", torch.tensor(self.optimizer.lr, device=device), persistent=False)
            self.register_buffer("step", torch.zeros((), dtype=torch.int64, device=device))
        has_sum = self.optimizer is not None and self.optimizer.has_sum
        self.register_buffer("_sum", _zeros(self._num_rows, device) if has_sum else None, persistent=False)
        self._tie_tables()
        with torch.no_grad():
            for table in self.tables:
                weight = self.embedding_bags[table.name].weight
                if table.init is not None:
                    table.init(weight)
                else:
                    bound = table.num_embeddings**-0.5
                    weight.uniform_(-bound, bound)
        self._fused_optimizer = None
        if self.optimizer is not None:
            tables = [self.embedding_bags[n].weight for n in self.embedding_bags]
            self._fused_optimizer = FusedOptimizer(tables, self.optimizer.lr, self.lr)

    def _tie_tables(self) -> None:
        """Makes every table's parameters views of the flat tensors."""
        row = 0
        for table, start in zip(self.tables, self._starts, strict=False):
            holder, size = self.embedding_bags[table.name], table.num_embeddings * table.embedding_dim
            view = self._weights[start : start + size].view(table.num_embeddings, table.embedding_dim)
            grad = holder.weight.grad
            if torch._has_compatible_shallow_copy_type(holder.weight, view):
                holder.weight.data = view
            else:
                holder.weight = nn.Parameter(view, requires_grad=holder.weight.requires_grad)
            if grad is not None and grad.device != view.device:
                holder.weight.grad = grad.to(view.device)
            if self._sum is not None:
                holder.register_buffer("sum", self._sum[row : row + table.num_embeddings])
            row += table.num_embeddings

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> EmbeddingBagCollection:
        # Moved, never cast: the flat tensors first, then the tables as views of them.
        was_meta = self._weights.is_meta
        for name, buffer in self._buffers.items():
            if buffer is not None:
                moved = fn(buffer)
                self._buffers[name] = moved if moved.dtype == buffer.dtype else buffer.to(moved.device)
        device = self._weights.device
        self._token = torch.empty(0, device=device, requires_grad=True)
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
        self._tie_tables()

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: object) -> None:
        # Before the first table is written: torch finds a wrong shape when it has loaded what fits.
        for name, own in self.state_dict().items():
            given = state_dict.get(prefix + name, own)
            if getattr(given, "shape", None) != own.shape:
                found = list(given.shape) if hasattr(given, "shape") else type(given).__name__
                raise RuntimeError(
                    f"size mismatch for {prefix}{name}: the state has {found}, this collection has {list(own.shape)}; "
                    "none of its tables was changed"
                )
        super()._load_from_state_dict(state_dict, prefix, *args)

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
            has changed when one is raised.
        """
        values, offsets, weights = select_keys(features, self.feature_names)
        bags, layout = (values, offsets, weights), self._layout()
        if self.optimizer is None:
            tables = [self.embedding_bags[t.name].weight for t in self.tables]
            pooled, _ = _ops.embedding_bag_tables(self._weights, tables, *bags, **layout)
        elif not torch.is_grad_enabled():
            pooled, _ = _ops.embedding_bag(self._weights, *bags, **layout)
        else:
            _refuse_data_parallel()
            if self._pending is None:
                pooled, _ = _ops.embedding_bag_fused(*self._state(), self._token, *bags, **layout, **self._options())
            else:
                pooled, status = _ops.embedding_bag(self._weights, *bags, **layout)
                pooled = self._pending.record(pooled, *bags, status)
        return KeyedTensor(self._output_keys, self._output_dims, pooled)

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
        }

    def _state(self) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        return self._weights, self._sum, self.step, self.lr

    def _options(self) -> dict[str, object]:
        return {"optimizer": self.optimizer.op_name, "eps": self.optimizer.eps}

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
        has_sum = self._sum is not None
        return [
            {
                "name": t.name,
                "num_embeddings": t.num_embeddings,
                "embedding_dim": t.embedding_dim,
                "format": t.format,
                "weight_bytes": t.num_embeddings * t.embedding_dim * 4,
                "state_bytes": t.num_embeddings * 4 if has_sum else 0,
            }
            for t in self.tables
        ]

    def extra_repr(self) -> str:
        """Tables and optimizer, for printing."""
        tables = ", ".join(f"{t.name}: {t.num_embeddings} x {t.embedding_dim} {t.pooling}" for t in self.tables)
        return f"{tables}; optimizer={self.optimizer}"


def _refuse_data_parallel() -> None:
    # DDP has no hook for a module at its construction. While it runs a forward, it says so here.
    if getattr(DistributedDataParallel, "_active_ddp_module", None) is not None:
        raise RuntimeError(
            "an EmbeddingBagCollection with a fused optimizer cannot be trained inside DistributedDataParallel: each "
            "process would update its tables with the gradients of its own rows only, DDP synchronises no update made "
            "in the backward, and the replicas would differ silently; build the collection with optimizer=None"
        )


def _zeros(size: int, device: torch.device | str | None) -> Tensor:
    """[size] float32 zeros; in the CPU's memory on huge pages, where the system offers them."""
    flat = torch.empty(size, device=device)
    if flat.device.type == "cpu":
        _ops._advise_huge_pages(flat)  # before the first touch, which is what allocates the pages
    return flat.zero_()


def _retie_after_load(collection: EmbeddingBagCollection, _) -> None:
    # load_state_dict(assign=True) swaps parameters in that own their storage.
    with torch.no_grad():
        row = 0
        for table, start in zip(collection.tables, collection._starts, strict=False):
            holder, size = collection.embedding_bags[table.name], table.num_embeddings * table.embedding_dim
            flat = collection._weights[start : start + size].view(table.num_embeddings, table.embedding_dim)
            if holder.weight.data_ptr() != flat.data_ptr():
                flat.copy_(holder.weight)
            if collection._sum is not None and holder.sum.data_ptr() != collection._sum[row:].data_ptr():
                collection._sum[row : row + table.num_embeddings].copy_(holder.sum)
            row += table.num_embeddings
    collection._tie_tables()
