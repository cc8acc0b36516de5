"""Where the tables of a collection lie, in the arguments of the ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
from torch import Tensor, nn

from rec_kernels.nn import bounds
from rec_kernels.nn.features import lookups, partitions
from rec_kernels.nn.host_memory import staying
from rec_kernels.nn.selected import SelectedKeys
from rec_kernels.nn.shared_bags import SharedBags
from rec_kernels.nn.state import StatePlaces
from rec_kernels.nn.tables import EmbeddingConfig, Storage, checked_tables
from rec_kernels.ops.autograd import call
from rec_kernels.ops.table_layout import CachePlaces, table_layout

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
    _layout_records: Tensor
    _seed: Tensor
    _bad_position: Tensor

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
        parts = [self._stored[p.stored] for feature in self._features for p in feature.parts]
        numbers = [p.stored for feature in self._features for p in feature.parts]
        means = [getattr(feature.table, "pooling", "sum") == "mean" for feature in self._features]
        is_partitioned = any(t.part for t in self._stored)
        made = table_layout(
            [t.num_embeddings for t in parts],
            [t.embedding_dim for t in parts],
            weight_offsets=[self._storage.starts[i] for i in numbers],
            row_offsets=[self._places.rows[i] for i in numbers],
            state_offsets=[self._places.starts[i] for i in numbers],
            formats=[t.format for t in parts] if self._storage.is_bytes else None,
            table_ids=numbers,
            mean=means,
            frozen=[f in self._frozen_features for f in self.feature_names],
            cache=self._cache_places(),
            num_rows=self._places.rows[-1],
            device=device,
            partitions=partitions(self._features, self._stored) if is_partitioned else None,
        )
        self._layout_sizes = made.layout_sizes
        self.register_buffer("_layout_records", made.layout, persistent=False)
        for name, number in (("_seed", self.seed), ("_bad_position", bounds.NOTHING_BAD)):
            self.register_buffer(name, torch.tensor(number, device=device), persistent=False)
        self._made = ["_layout_records", "_seed", "_bad_position"]
        self._widths = [feature.width for feature in self._features]
        dims = zip(self._features, self._output_dims, strict=True)
        self._combined_dims = [f.table.projection[1] if f.table.projection else dim for f, dim in dims]
        self._combines_later = any(f.is_combined_later for f in self._features)
        self._projected = [f.table for f in self._features if f.table.projection]

    def _cache_places(self) -> CachePlaces | None:
        """Where rows of the tables may lie in the row cache, if there is one."""
        cache: Any = self.__dict__["_modules"].get("row_cache")
        return None if cache is None else cache.places()

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
        arguments: dict[str, object] = {
            "layout": self._buffers["_layout_records"],
            "layout_sizes": self._layout_sizes,
            "bounds_check": self.bounds_check,
        }
        if bag_starts is not None:
            arguments["bag_starts"] = bag_starts
        if shared is not None:
            arguments |= {"inverse": shared.inverse, "groups": shared.groups}
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
        self._layout_records, self._layout_sizes = source._layout_records, source._layout_sizes
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
        layout |= self._output() | cache | {"per_sample_weights": given.weights}
        return call(_ops.embedding_bag.layout, self._weights, given.values, given.offsets, **layout)[0]


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
