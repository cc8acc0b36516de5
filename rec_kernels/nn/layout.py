"""Where the tables of a collection lie, in the arguments of the ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
from torch import Tensor, nn

from rec_kernels.nn import bounds
from rec_kernels.nn.features import PARTITIONS, lookups, partitions
from rec_kernels.nn.host_memory import staying
from rec_kernels.nn.selected import SelectedKeys
from rec_kernels.nn.shared_bags import SharedBags
from rec_kernels.nn.state import StatePlaces
from rec_kernels.nn.tables import EmbeddingConfig, Storage, checked_tables

if TYPE_CHECKING:
    from rec_kernels.nn.ahead import Ahead
    from rec_kernels.nn.cached_tables import CachedTables
    from rec_kernels.nn.row_cache import CacheState

_ops = torch.ops.rec_kernels


class Layout(nn.Module):
    """A module with tables, whose weights are the buffer ``_weights`` that those who derive from it register.

    Args:
        tables, device, output_dtype, bounds_check, seed: ``rk.EmbeddingBagCollection``'s.
        storage: where the tables lie in the weights.
        places: where they lie in the optimizer's state.
        in_host: whether the weights stay in host memory when the module is on a GPU.
    """

    tables: Sequence[EmbeddingConfig]
    _pools = True  # whether ``forward`` makes one row of a bag
    _weights: Tensor
    _frozen: Tensor
    _seed: Tensor
    _bad_position: Tensor
    _table_ids: Tensor
    _columns_of_bags: Tensor

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        storage: Storage,
        places: StatePlaces,
        *,
        device: torch.device | str | None,
        output_dtype: torch.dtype,
        bounds_check: str,
        seed: int,
        in_host: bool,
    ) -> None:
        super().__init__()
        self._in_host = in_host
        self.tables, self.output_dtype, self.bounds_check, self.seed = tables, output_dtype, bounds_check, seed
        self._storage, self._places = storage, places
        self._frozen_features: set[str] = set()
        self._passes_frozen = False
        self._name_outputs()
        self._make_layout(device)

    def _checked(self, tables: Sequence[EmbeddingConfig]) -> list[EmbeddingConfig]:
        return checked_tables(tables, pooled=self._pools)

    def _name_outputs(self) -> None:
        self.feature_names = [f for t in self.tables for f in t.feature_names]
        shared = {f for f in self.feature_names if self.feature_names.count(f) > 1}
        self._output_keys = [f"{f}@{t.name}" if f in shared else f for t in self.tables for f in t.feature_names]
        if len(set(self._output_keys)) != len(self._output_keys):
            twice = sorted({key for key in self._output_keys if self._output_keys.count(key) > 1})
            raise ValueError(
                f"feature_names of the tables give more than one output the name {twice}: a table must name a feature "
                "once, and no feature be called <feature>@<table> as the outputs of one in several tables are"
            )
        self._output_dims = [t.embedding_dim for t in self.tables for _ in t.feature_names]
        self._stored = [s for t in self.tables for s in t.stored]

    def _make_layout(self, device: torch.device | str | None) -> None:
        self._features = lookups(self.tables)
        parts = [p for feature in self._features for p in feature.parts]
        layout = {
            "weight_offsets": [self._storage.starts[p.stored] for p in parts],
            "row_offsets": [self._places.rows[p.stored] for p in parts],
            "num_embeddings": [self._stored[p.stored].num_embeddings for p in parts],
            "embedding_dims": [self._stored[p.stored].embedding_dim for p in parts],
            "output_offsets": [feature.column + p.column for feature in self._features for p in feature.parts],
            "columns_of_bags": [p.column for p in parts],
            "table_ids": [p.stored for p in parts],
            "format_of": [self._storage.formats.index(self._stored[p.stored].format) for p in parts],
        }
        if self._places.is_elementwise:
            layout["moment_offsets"] = [self._places.starts[p.stored] for p in parts]
        self._is_partitioned = any(t.part for t in self._stored)
        if self._is_partitioned:
            layout |= partitions(self._features, self._stored)
        made = {f"_{name}": torch.tensor(n, dtype=torch.int64, device=device) for name, n in layout.items()}
        means = [getattr(feature.table, "pooling", "sum") == "mean" for feature in self._features]
        frozen = [f in self._frozen_features for f in self.feature_names]
        for name, flags in (("_mean", means), ("_frozen", frozen)):
            made[name] = torch.tensor(flags, dtype=torch.bool, device=device)
        for name, number in (("_seed", self.seed), ("_bad_position", bounds.NOTHING_BAD)):
            made[name] = torch.tensor(number, device=device)
        for name, tensor in made.items():
            self.register_buffer(name, tensor, persistent=False)
        self._made = list(made)
        self._any_mean = any(means)
        self._num_rows = self._places.rows[-1]
        self._widths = [feature.width for feature in self._features]
        dims = zip(self._features, self._output_dims, strict=True)
        self._combined_dims = [f.table.projection[1] if f.table.projection else dim for f, dim in dims]
        self._max_dim = max((t.embedding_dim for t in self._stored), default=0)
        self._multiplies = any(feature.multiplies for feature in self._features)
        self._combines_later = any(f.is_combined_later for f in self._features)
        self._projected = [f.table for f in self._features if f.table.projection]
        self._list_arguments()

    def _list_arguments(self) -> None:
        """What every call of an op is told: found once, because a small lookup takes no longer than finding it."""
        names = ["weight_offsets", "row_offsets", "num_embeddings", "embedding_dims", "output_offsets"]
        if self._is_partitioned:
            names += PARTITIONS
        if len(self._storage.formats) > 1:
            names.append("format_of")
        if self._any_mean:  # without, the backward needs no coefficients
            names.append("mean")
        self._tensor_arguments = [(name, f"_{name}") for name in names]
        self._other_arguments: dict[str, object] = {
            "output_dim": sum(self._widths),
            "num_rows": self._num_rows,
            "max_embedding_dim": self._max_dim,
        }
        if self._is_partitioned:
            self._other_arguments |= {
                "max_parts": max(len(feature.parts) for feature in self._features),
                "multiplies": self._multiplies,
            }
        if self._storage.is_bytes:
            self._other_arguments["formats"] = self._storage.formats

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Layout:
        # Moved, never cast. Parameters of tables are views of a buffer, and not this method's business.
        device = fn(torch.empty(0, device=self._device)).device
        if self._in_host:
            fn = staying(self._weights, fn)
        for name, buffer in self._buffers.items():
            if buffer is not None and name not in self._made:
                self._buffers[name] = uncast(buffer, fn)
        # What no state_dict brings is not for to_empty() to empty.
        if self._device.type == "meta" and device.type != "meta":
            self._make_layout(device)
        else:
            move_whole(self, self._made, device)
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple:
        # A pickle has no use for an ``init`` that was called, and often no way to write it.
        reduced: Any = super().__reduce_ex__(protocol)
        make, arguments, state, *others = reduced
        tables = {name: [t.without_init() for t in state[name]] for name in ("tables", "_projected")}
        return make, arguments, state | tables, *others

    @property
    def _device(self) -> torch.device:
        """Where lookups are made; the weights may be elsewhere."""
        return self._seed.device

    def _layout(self, bag_starts: Tensor | None = None, shared: SharedBags | None = None) -> dict[str, object]:
        buffers = self._buffers
        arguments: dict[str, object] = {name: buffers[buffer] for name, buffer in self._tensor_arguments}
        arguments |= self._other_arguments
        arguments["bounds_check"] = self.bounds_check
        if self._passes_frozen:
            arguments["frozen"] = self._frozen
        if shared is not None:
            arguments |= {"bag_starts": bag_starts, "inverse": shared.inverse, "groups": shared.groups}
        elif bag_starts is not None:  # every bag has a row of the output
            wide = max(self._widths, default=0)
            arguments |= {"bag_starts": bag_starts, "output_offsets": self._columns_of_bags, "output_dim": wide}
        return arguments

    def _output(self) -> dict[str, object]:
        # What is combined or projected afterwards is rounded afterwards.
        whole = self.output_dtype == torch.float32 or self._combines_later or self._projected
        return {} if whole else {"output_dtype": self.output_dtype}

    def _projections(self) -> list[Tensor]:
        """The matrices [D, dim] of the features that have one, in the order of features."""
        return [self._projection(table) for table in self._projected]

    def _projection(self, table: EmbeddingConfig) -> Tensor:
        raise NotImplementedError

    def _lookup(self, given: SelectedKeys, starts: Tensor | None = None, shared: SharedBags | None = None) -> Tensor:
        """The ops' output for bags of all features; with ``starts`` [F + 1] and no ``shared``, every bag has a row."""
        raise NotImplementedError

    def _note(self, status: Tensor, *what: Any) -> None:
        """Keeps what a lookup on a GPU says later of its input (``bounds.Reports.add``). Here, nobody is told."""


class ServedTables(Layout):
    """The tables of a collection for lookups only: one buffer, no parameter, no optimizer, no state.

    Args:
        source: the collection, whose memory it shares.
    """

    row_cache: CacheState | None
    _ahead: Ahead

    def __init__(self, source: CachedTables) -> None:
        if source._file is not None:
            raise NotImplementedError(
                f"tables in {source._file.path} cannot be served by a module without the file: look up in the "
                "collection in eval() mode, or load the rows into one in memory"
            )
        super().__init__(
            source.tables,
            source._storage,
            source._places,
            device=source._device,
            output_dtype=source.output_dtype,
            bounds_check=source.bounds_check,
            seed=source.seed,
            in_host=source._in_host,
        )
        self.register_buffer("_weights", source._weights)
        self.row_cache = None if source.row_cache is None else source.row_cache.shared()
        self._ahead = source._ahead  # whose rows come into the same slots
        for table in self.tables:
            if table.projection:
                self.register_buffer(f"_projection_{table.name}", source._projection(table).detach())

    def _projection(self, table: EmbeddingConfig) -> Tensor:
        return self._buffers[f"_projection_{table.name}"]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ServedTables:
        super()._apply(fn, recurse)
        if self.row_cache is not None:
            self.row_cache._apply(fn)
        return self

    def _lookup(self, given: SelectedKeys, starts: Tensor | None = None, shared: SharedBags | None = None) -> Tensor:
        layout = self._layout(starts, shared)
        cache = {}
        if self.row_cache is not None:
            self._ahead.wait()
            slots = self.row_cache.lookup((given.values, given.offsets), self._layout(starts))
            cache = self.row_cache.arguments(slots)
        layout |= self._output() | cache
        return _ops.embedding_bag(self._weights, given.values, given.offsets, given.weights, **layout)[0]


def uncast(t: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    """``fn`` of a tensor; the tensor where ``fn`` would have it, if ``fn`` casts it."""
    moved = fn(t)
    return moved if moved.dtype == t.dtype else t.to(moved.device)


def move_whole(module: nn.Module, names: Sequence[str], device: torch.device) -> None:
    """Moves some of a module's buffers with their numbers, whatever is done to the others."""
    for name in names:
        module._buffers[name] = module._buffers[name].to(device)


def move(module: nn.Module, name: str, fn: Callable[[Tensor], Tensor]) -> None:
    """Applies ``fn`` to a parameter and its gradient as ``torch.nn.Module._apply`` does, but never casts them."""
    old = module._parameters[name]
    with torch.no_grad():
        new, grad = uncast(old, fn), None if old.grad is None else uncast(old.grad, fn)
    if torch._has_compatible_shallow_copy_type(old, new):
        old.data = new
    else:
        old = module._parameters[name] = nn.Parameter(new, requires_grad=old.requires_grad)
    old.grad = grad
