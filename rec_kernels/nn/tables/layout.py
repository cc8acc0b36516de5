"""The layout of a collection's tables on its device, and how a module's tensors are moved without a cast."""

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
    """Tensors of the layout that the ops read on the device. No state has them: the tables' configs determine them.

    Args:
        features: what the layout is of. cache: places of its tables in a row cache.
        bounds_check, seed: ``rk.EmbeddingBagCollection``'s.

    Attributes:
        records: [parts, columns] int64, the layout; sizes: its ``layout_sizes``.
        records_<n>, of_optimizers: of several optimizers, the layouts by which each one updates, and their sizes.
        seed: 0-dim int64, of stochastic rounding.
        bad_position: 0-dim int64, the smallest bad position of lookups whose status the host does not see.
        frozen: the features whose ids give no gradient by ``freeze()``.
        trained: which stored tables are to be trained; features of the others are frozen, too.
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
        self._several = range(count if count > 1 else 0)  # the numbers of the optimizers, if there are several
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
        """Shares the tensors of lookups with another module, which can be moved by itself."""
        other = copy.copy(self)
        other._several = range(0)
        other._buffers = {name: self._buffers[name] for name in ("records", "seed", "bad_position")}
        return other

    @property
    def device(self) -> torch.device:
        """Device of lookups; weights may be elsewhere."""
        return self._buffers["seed"].device

    def arguments(self, bag_starts: Tensor | None = None, shared: SharedBags | None = None) -> dict[str, object]:
        """The ops' arguments: the layout, which bags the features have, and which of these the samples share."""
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
        """``arguments`` by which each optimizer updates.

        Args:
            by_row: stored tables that have a feature behind the others, whose ids are rows. They are in no cache.
        """
        numbers: Sequence[int | None] = self._several or [None]
        if by_row:
            layouts = [self._features.layout(self._flags(), None, self.device, by_row, n) for n in numbers]
        else:
            layouts = [self._layout(n) for n in numbers]
        own = [{"layout": made.layout, "layout_sizes": made.layout_sizes} for made in layouts]
        return [self.arguments(bag_starts, shared) | each for each in own]

    def _layout(self, number: int | None) -> TableLayout:
        """The layout by which an optimizer updates, one of several; None: that of lookups, and of the only one."""
        if number is None:
            return TableLayout(self._buffers["records"], self.sizes)
        return TableLayout(self._buffers[f"records_{number}"], self.of_optimizers[number])

    def freeze(self, features: set[str]) -> None:
        """Changes, in place, which features give no gradient."""
        self.frozen = features
        self._freeze()

    def set_trained(self, trained: list[bool]) -> None:
        """Changes, in place, which stored tables are trained.

        Raises:
            ValueError: a feature would be trained in some of its parts and not in others.
        """
        for feature in self._features.features:
            if len({trained[part.stored] for part in feature.parts}) > 1:
                names = [self._features.stored[part.stored].name for part in feature.parts]
                raise ValueError(
                    f"requires_grad of the parts {names} of table {feature.table.name!r} must be the same: they are "
                    f"trained together, got {[trained[part.stored] for part in feature.parts]}"
                )
        self.trained = trained
        self._freeze()

    def _flags(self) -> list[bool]:
        """Flags of features that give no gradient."""
        features = zip(self._features.feature_names, self._features.features, strict=True)
        return [name in self.frozen or not self.trained[f.parts[0].stored] for name, f in features]

    def _freeze(self) -> None:
        flags = self._flags()
        set_frozen(self._layout(None), flags)
        for number in self._several:
            others = [number != self._features.number_of(f.parts[0].stored) for f in self._features.features]
            set_frozen(self._layout(number), [a or b for a, b in zip(flags, others, strict=True)])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LayoutBuffers:
        # ``to_empty()`` must not empty what no state_dict brings back.
        device = fn(torch.empty(0, device=self.device)).device
        if self.device.type == "meta" and device.type != "meta":
            self._make(device)
        else:
            move_whole(self, list(self._buffers), device)
        return self


def uncast(t: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    """``fn`` of a tensor; the tensor where ``fn`` would have it, if ``fn`` casts it."""
    moved = fn(t)
    return moved if moved.dtype == t.dtype else t.to(moved.device)


def register_memory(
    module: nn.Module, weights: Tensor, state: Mapping[str, Tensor | None], *, is_bytes: bool
) -> dict[str, Tensor | None]:
    """Gives a collection its rows, flat, as ``_weights``, and registers the numbers among its optimizer's state.

    Whoever copies, broadcasts or averages a module's members does so to tables and state, which are views of flat
    tensors: these are no buffers. Rows in bytes are one, of which AveragedModel copies the last: bytes have no average.

    Returns:
        The others of the state: flat tensors.
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
    """All of a collection's tensors that an update reads and writes, by the names of ``register_memory``."""
    return {"_weights": module._weights, **module._memory, **module._buffers}


def mark_static(*tensors: Tensor | None) -> None:
    """Tells torch.compile that tensors stay where they are, as torch._dynamo.mark_static_address, which takes longer.

    It knows so of buffers. A CUDA graph would copy other tensors before each replay.
    """
    for tensor in tensors:
        if tensor is not None:
            tensor._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]


def move_whole(module: nn.Module, names: list[str], device: torch.device) -> None:
    """Moves some of a module's buffers with their numbers, whatever is done to the others."""
    for name in names:
        module._buffers[name] = module._buffers[name].to(device)


def move_buffers(module: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
    """Applies ``fn`` to a module's buffers, and never casts them."""
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = uncast(buffer, fn)


def move_memory(module: Any, fn: Callable[[Tensor], Tensor]) -> None:
    """Applies ``fn`` to what ``register_memory`` has given a collection."""
    move_buffers(module, fn)
    if "_weights" not in module._buffers:
        module._weights = uncast(module._weights, fn)
    module._memory = {name: None if flat is None else uncast(flat, fn) for name, flat in module._memory.items()}


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
