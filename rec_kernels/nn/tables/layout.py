"""The ops' layout tensors of a collection, and helpers that move a module's tensors without casting them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rec_kernels.nn.jagged.select_features import NOTHING_BAD
from rec_kernels.nn.jagged.shared_bags import SharedBags
from rec_kernels.nn.tables.feature_map import FeatureMap
from rec_kernels.ops.table_layout import CachePlaces, TableLayout, set_frozen


class LayoutBuffers(nn.Module):
    """Layout tensors that the ops read on the device. They are derived from the tables' configs, so no state has them.

    Args:
        features: the collection's features. cache: sets and offsets of its tables in a row cache.
        bounds_check, seed: see ``rk.EmbeddingBagCollection``.

    Attributes:
        records: [parts, columns] int64, the layout; sizes: its ``layout_sizes``.
        records_<n>, of_optimizers: with several optimizers, the layout of each one's updates, and their sizes.
        seed: 0-dim int64, the seed of stochastic rounding.
        bad_position: 0-dim int64, the smallest bad position of lookups that do not report a status to the host.
        frozen: the features that ``freeze()`` has frozen.
        trained: for each stored table, True if it is trained; features of the others are frozen as well.
    """

    records: Tensor
    seed: Tensor
    bad_position: Tensor

    def __init__(
        self,
        features: FeatureMap,
        cache: CachePlaces | None,
        *,
        bounds_check: str,
        seed: int,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self._features, self._cache, self.bounds_check, self._seed = features, cache, bounds_check, seed
        self.frozen: set[str] = set()
        self.trained = [True] * len(features.stored)
        count = len(features.states)
        self._several = range(count if count > 1 else 0)  # optimizer indices; empty with a single optimizer
        self._make(device)

    def _make(self, device: torch.device | str | None) -> None:
        made = self._features.layout(self._flags(), self._cache, device)
        self.sizes = made.layout_sizes
        numbers = {"seed": self._seed, "bad_position": NOTHING_BAD}
        tensors = {name: torch.tensor(number, device=device) for name, number in numbers.items()}
        each = [self._features.layout(self._flags(), self._cache, device, optimizer=n) for n in self._several]
        self.of_optimizers = [own.layout_sizes for own in each]
        tensors |= {f"records_{n}": own.layout for n, own in enumerate(each)}
        for name, tensor in {"records": made.layout, **tensors}.items():
            self.register_buffer(name, tensor, persistent=False)

    def shared(self) -> LayoutBuffers:
        """Shares the tensors of lookups with another module that can be moved independently."""
        other = copy.copy(self)
        other._several = range(0)
        other._buffers = {name: self._buffers[name] for name in ("records", "seed", "bad_position")}
        return other

    @property
    def device(self) -> torch.device:
        """The device of lookups; weights may be in other memory."""
        return self._buffers["seed"].device

    def arguments(self, bag_starts: Tensor | None = None, shared: SharedBags | None = None) -> dict[str, object]:
        """The ops' layout arguments, with the features' bag starts and the bags that samples share, if given."""
        arguments: dict[str, object] = {
            "layout": self._buffers["records"],
            "layout_sizes": self.sizes,
            "bounds_check": self.bounds_check,
        }
        if bag_starts is not None:
            arguments["bag_starts"] = bag_starts
        if shared is not None:
            arguments |= {"inverse": shared.inverse, "groups": shared.groups}
        return arguments

    def of_updates(
        self, by_row: Sequence[int] = (), bag_starts: Tensor | None = None, shared: SharedBags | None = None
    ) -> list[dict[str, object]]:
        """``arguments`` for the update of each optimizer.

        Args:
            by_row: indices of stored tables that get an additional feature whose ids are rows. They are not cached.
        """
        numbers: Sequence[int | None] = self._several or [None]
        if by_row:
            layouts = [self._features.layout(self._flags(), None, self.device, by_row, n) for n in numbers]
        else:
            layouts = [self._layout(n) for n in numbers]
        own = [{"layout": made.layout, "layout_sizes": made.layout_sizes} for made in layouts]
        return [self.arguments(bag_starts, shared) | each for each in own]

    def _layout(self, number: int | None) -> TableLayout:
        """The layout of one of several optimizers' updates; None: that of lookups and of a single optimizer."""
        if number is None:
            return TableLayout(self._buffers["records"], self.sizes)
        return TableLayout(self._buffers[f"records_{number}"], self.of_optimizers[number])

    def freeze(self, features: set[str]) -> None:
        """Set, in place, the features that give no gradient."""
        self.frozen = features
        self._freeze()

    def set_trained(self, trained: list[bool]) -> None:
        """Set, in place, the stored tables that are trained.

        Raises:
            ValueError: only some parts of a feature would be trained.
        """
        for feature in self._features.features:
            if len({trained[i] for i in feature.parts}) > 1:
                names = [self._features.stored[i].name for i in feature.parts]
                raise ValueError(
                    f"requires_grad of the parts {names} of table {feature.table.name!r} must be equal, because "
                    f"they are trained together, got {[trained[i] for i in feature.parts]}"
                )
        self.trained = trained
        self._freeze()

    def _flags(self) -> list[bool]:
        """For each feature, True if it gives no gradient."""
        features = zip(self._features.feature_names, self._features.features, strict=True)
        return [name in self.frozen or not self.trained[f.parts[0]] for name, f in features]

    def _freeze(self) -> None:
        flags = self._flags()
        set_frozen(self._layout(None), flags)
        for number in self._several:
            others = [number != self._features.number_of(f.parts[0]) for f in self._features.features]
            set_frozen(self._layout(number), [a or b for a, b in zip(flags, others, strict=True)])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LayoutBuffers:
        # ``to_empty()`` must not discard tensors that no state_dict restores.
        device = fn(torch.empty(0, device=self.device)).device
        if self.device.type == "meta" and device.type != "meta":
            self._make(device)
        else:
            move_whole(self, list(self._buffers), device)
        return self


def uncast(t: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    """Applies ``fn``; if it casts the tensor, only move the tensor to the device of the result."""
    moved = fn(t)
    return moved if moved.dtype == t.dtype else t.to(moved.device)


def register_memory(
    module: nn.Module, weights: Tensor, state: Mapping[str, Tensor], *, is_bytes: bool
) -> dict[str, Tensor]:
    """Sets a collection's flat rows as ``_weights``, and registers the scalars of its optimizer state as buffers.

    The flat tensors are not buffers: code that copies, broadcasts or averages a module's members already handles the
    tables and state, which are views of them. Byte rows are a buffer, which AveragedModel copies, not averages.

    Returns:
        The flat tensors of the state.
    """
    if is_bytes:
        module.register_buffer("_weights", weights, persistent=False)
    else:
        module._weights = weights
    for name, number in state.items():
        if not name.startswith("_"):
            module.register_buffer(name, number, persistent=name != "lr")
    return {name: flat for name, flat in state.items() if name.startswith("_")}


def tensors_of(module: Any) -> dict[str, Any]:
    """All tensors of a collection that an update reads and writes, by the names of ``register_memory``."""
    return {"_weights": module._weights, **module._memory, **module._buffers}


def mark_static(*tensors: Tensor) -> None:
    """Marks tensors as static for torch.compile, like torch._dynamo.mark_static_address, but faster.

    Buffers are static by default. A CUDA graph would copy other tensors before each replay.
    """
    for tensor in tensors:
        tensor._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]


def move_whole(module: nn.Module, names: list[str], device: torch.device) -> None:
    """Moves some of a module's buffers with their values, even under ``to_empty()``."""
    for name in names:
        module._buffers[name] = module._buffers[name].to(device)


def move_buffers(module: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
    """Applies ``fn`` to a module's buffers without casting them."""
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = uncast(buffer, fn)


def move_memory(module: Any, fn: Callable[[Tensor], Tensor]) -> None:
    """Applies ``fn`` to the tensors of ``register_memory``."""
    move_buffers(module, fn)
    if "_weights" not in module._buffers:
        module._weights = uncast(module._weights, fn)
    module._memory = {name: uncast(flat, fn) for name, flat in module._memory.items()}


def move(module: nn.Module, name: str, fn: Callable[[Tensor], Tensor]) -> None:
    """Applies ``fn`` to a parameter and its gradient as ``torch.nn.Module._apply`` does, without casting them."""
    old = module._parameters[name]
    with torch.no_grad():
        new, grad = uncast(old, fn), None if old.grad is None else uncast(old.grad, fn)
    if torch._has_compatible_shallow_copy_type(old, new):
        old.data = new
    else:
        old = module._parameters[name] = nn.Parameter(new, requires_grad=old.requires_grad)
    old.grad = grad
