"""``torch.nn.Embedding`` and ``torch.nn.EmbeddingBag`` with a table of this package behind them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor, nn

from rec_kernels.nn import pooled_lookups
from rec_kernels.nn.added_members import only_added
from rec_kernels.nn.arguments import check_choice
from rec_kernels.nn.embedding_bag_collection import EmbeddingBagCollection
from rec_kernels.nn.jagged.checks import check_bounds
from rec_kernels.nn.jagged.select_features import SelectedKeys
from rec_kernels.nn.tables.compression import Compression
from rec_kernels.nn.tables.config import EmbeddingBagConfig
from rec_kernels.nn.tables.optimizers import Optimizer
from rec_kernels.nn.tables.row_cache import RowCache
from rec_kernels.ops.bad_ids import explain_input
from rec_kernels.ops.embedding_bag import check_ids, embedding_bag, read_bags, refuse_norms
from rec_kernels.ops.layout_records import check_tensor
from rec_kernels.ops.row_formats import FLOAT_DTYPES, dequantize_rows

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

_NAME = "weight"  # of the table in its collection


class TableOptions(TypedDict, total=False):
    """How the table is kept and trained: arguments of ``rk.EmbeddingBagConfig`` and ``rk.EmbeddingBagCollection``."""

    optimizer: Optimizer | None
    format: str
    compression: Compression | None
    init: Callable[[Tensor], object] | None
    cache: RowCache | None
    output_dtype: torch.dtype
    bounds_check: str
    rounding: str
    seed: int


_OF_CONFIG = ("format", "compression", "init")


class _Filled:
    """Fills rows with what a layer begins with: torch's normal numbers, or given rows; zeros for the padding."""

    def __init__(self, given: Tensor | None, padding_idx: int | None = None) -> None:
        self.given, self.padding_idx = given, padding_idx

    def __call__(self, rows: Tensor) -> None:
        with torch.no_grad():
            if self.given is not None:
                rows.copy_(self.given)
                return
            rows.normal_()
            if self.padding_idx is not None:
                rows[self.padding_idx] = 0


class EmbeddingLayer(nn.Module):
    """One table behind torch.nn's interface: what ``rk.Embedding`` and ``rk.EmbeddingBag`` share.

    Without an option in ``TableOptions``, ``weight`` is a parameter as any. With one, it is the table of a collection
    that no traversal of modules sees: its state has the layer's names (``weight``, ``sum``, ``step`` ...).
    """

    weight: nn.Parameter

    def __init__(
        self,
        config: dict[str, Any],
        weight: Tensor | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        options: TableOptions,
    ) -> None:
        super().__init__()
        unknown = sorted(set(options) - set(TableOptions.__annotations__))
        if unknown:
            raise TypeError(f"{type(self).__name__}() got an unexpected keyword argument {unknown[0]!r}")
        given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        own: dict[str, Any] = {name: given.pop(name) for name in _OF_CONFIG if name in given}
        dtype = dtype or torch.float32
        if dtype != torch.float32:
            format = _format_of(dtype)
            if given or own:
                own.setdefault("format", format)
        fill = _Filled(weight)
        table = EmbeddingBagConfig(**config, name=_NAME, feature_names=["input"], **{"init": fill, **own})
        if weight is not None:
            _check_given(weight, table)
        self.num_embeddings, self.embedding_dim = table.num_embeddings, table.embedding_dim
        self.padding_idx = table.padding_idx
        self.__dict__["collection"] = None
        if not given and not own:
            self._add_parameter(weight, device, dtype)
            return
        fill.padding_idx = None if table.compression else table.padding_idx
        self.__dict__["collection"] = EmbeddingBagCollection([table], device=device, **given)
        fill.given = None  # the table's config keeps ``init``
        self._show()

    def _add_parameter(self, rows: Tensor | None, device: torch.device | str | None, dtype: torch.dtype) -> None:
        """Gives a layer without options its parameter: these rows, or torch's normal numbers."""
        if rows is not None:
            _format_of(rows.dtype, "_weight")
            self.weight = nn.Parameter(rows.contiguous())
            return
        self.weight = nn.Parameter(torch.empty(self.num_embeddings, self.embedding_dim, device=device, dtype=dtype))
        self.reset_parameters()

    if TYPE_CHECKING:

        @property
        def collection(self) -> EmbeddingBagCollection | None:
            """The collection of the one table, for ``accumulate()``, ``fused_optimizer`` and the like; or None."""

    def reset_parameters(self) -> None:
        """Draws the weight anew, as ``torch.nn.Embedding`` does.

        Raises:
            RuntimeError: the layer has one of ``TableOptions``: its table is drawn once, by ``init``.
        """
        if self.collection is not None:
            raise RuntimeError("reset_parameters() is for a layer without options: make a new one, or write `weight`")
        _Filled(None, self.padding_idx)(self.weight)

    # Lookups.

    def _pooled(self, ids: Tensor, offsets: Tensor, factors: Tensor | None) -> Tensor:
        """[bags, D]: bags looked up in the collection."""
        collection: Any = self.__dict__["collection"]
        if not torch.compiler.is_compiling():
            self._refuse_replaced(collection._held)
        return pooled_lookups.look_up_bags(collection, SelectedKeys(ids, offsets, factors, None))

    def _rows(self, ids: Tensor, *, sparse: bool = False) -> Tensor:
        """[N, D]: the rows of ids [N]."""
        each = torch.arange(ids.shape[0] + 1, device=ids.device)
        if self.collection is not None:
            return self._pooled(ids, each, None)
        options: dict[str, Any] = {"include_last_offset": True, "padding_idx": self.padding_idx, "sparse": sparse}
        return embedding_bag(ids, self.weight, each, mode="sum", **options)

    def _refuse_replaced(self, holders) -> None:
        for stored in holders:
            if self._parameters.get(stored) is not holders[stored]._parameters["weight"]:
                raise RuntimeError(
                    f"{stored} has been replaced, and lookups read the table that it was: write it in place, with "
                    "load_state_dict(), or with copy_() under torch.no_grad(); only a layer without options takes "
                    "another parameter"
                )

    # Moves, copies and states: the collection's, under the layer's names.

    def _shown(self) -> dict[str, nn.Parameter]:
        """The collection's parameters under the layer's names."""
        holders = self.collection.embedding_bags
        shown = {}
        for stored in holders:
            shown[stored] = holders[stored].weight
            if "projection" in holders[stored]._parameters:
                shown["projection"] = holders[stored].projection
        return shown

    def _show(self) -> None:
        self._parameters.update(self._shown())

    def _only_added(self) -> AbstractContextManager[None]:
        """Hides the collection's parameters, which leaves those that a subclass added."""
        return only_added(self, parameters=self._shown())

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # torch.distributed.checkpoint looks up what a state has by its name.
            if (collection := self.__dict__.get("collection")) is not None:
                for own, stored in self._names().items():
                    if own == name or own.startswith(f"{name}."):
                        return functools.reduce(getattr, stored.removesuffix(own[len(name) :]).split("."), collection)
            raise

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        if self.collection is None:
            return super()._apply(fn, recurse)
        self.collection._apply(fn)
        with self._only_added():
            super()._apply(fn, recurse)
        self._show()
        return self

    def train(self, mode: bool = True) -> Self:
        """Sets the mode of the layer, and with it whether lookups take rows into a cache."""
        if self.collection is not None:
            self.collection.train(mode)
        return super().train(mode)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Sets ``requires_grad`` as ``torch.nn.Module`` does; False freezes a table that a fused optimizer trains."""
        if self.collection is None:
            return super().requires_grad_(requires_grad)
        self.collection.requires_grad_(requires_grad)
        with self._only_added():
            return super().requires_grad_(requires_grad)

    def __getstate__(self) -> dict:
        state = super().__getstate__()
        if self.collection is None:
            return state
        # The collection keeps its parameters; here, their names keep the order.
        return {**state, "_parameters": self._parameters | dict.fromkeys(self._shown())}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        if self.collection is not None:
            self._show()

    def _names(self) -> dict[str, str]:
        """The layer's name of each tensor of its state -> the collection's."""
        return {_own_name(name): name for name in nn.Module.state_dict(self.collection)}

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        if self.collection is None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            return
        for name, tensor in self.collection.state_dict(keep_vars=keep_vars).items():
            destination[prefix + _own_name(name)] = tensor
        with self._only_added():
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: dict,
        prefix: str,
        local_metadata: dict,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        if self.collection is None:
            told = (strict, missing_keys, unexpected_keys, error_msgs)
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *told)
            return
        names = self._names()
        given = {name.removeprefix(prefix): t for name, t in state_dict.items() if name.startswith(prefix)}
        known = {names[name]: t for name, t in given.items() if name in names}
        assign = local_metadata.get("assign_to_params_buffers", False)
        try:
            missing = self.collection.load_state_dict(known, strict=False, assign=assign).missing_keys
        except RuntimeError as error:
            error_msgs.append(str(error).replace(f"embedding_bags.{_NAME}.", prefix))
            return
        self._show()
        unexpected: list[str] = []
        with self._only_added():
            told = (strict, missing_keys, unexpected, error_msgs)
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *told)
        unexpected_keys += [name for name in unexpected if name.removeprefix(prefix) not in names]
        if strict:
            missing_keys += [prefix + _own_name(name) for name in missing]

    def _describe(self, *options: str) -> str:
        """The sizes, options of the layer, and what the collection says of the table."""
        text = [f"{self.num_embeddings}, {self.embedding_dim}", *options]
        if self.padding_idx is not None:
            text.append(f"padding_idx={self.padding_idx}")
        if self.collection is not None:
            table = self.collection.tables[0]
            text += [f"format={table.format}"] * (table.format != "fp32")
            text += [f"compression={table.compression}"] * (table.compression is not None)
            text.append(f"optimizer={self.collection.optimizer}")
        return ", ".join(text)


def _own_name(name: str) -> str:
    """A layer's name of a tensor in its collection's state: of parts of a compressed table with their numbers."""
    if not name.startswith("embedding_bags."):
        return name
    _, stored, kind = name.split(".")
    return kind + stored.removeprefix(_NAME)


def _format_of(dtype: torch.dtype, name: str = "dtype") -> str:
    names = {known: format for format, known in FLOAT_DTYPES.items()}
    if dtype not in names:
        raise ValueError(f"{name} must be torch.float32, float16 or bfloat16, got {dtype}")
    return names[dtype]


def _check_rows(embeddings: Tensor) -> None:
    check_tensor("embeddings", embeddings)
    if embeddings.dim() != 2:
        raise ValueError(f"embeddings must have two dimensions, got {list(embeddings.shape)}")


def _check_given(weight: Tensor, table: EmbeddingBagConfig) -> None:
    check_tensor("_weight", weight)
    if table.compression is not None or not isinstance(table.init, _Filled):
        raise ValueError("_weight is all of the table's rows: it goes with neither compression nor init")
    size = [table.num_embeddings, table.embedding_dim]
    if list(weight.shape) != size or not weight.is_floating_point():
        raise ValueError(f"_weight must be floats {size}, got {weight.dtype} {list(weight.shape)}")


class Embedding(EmbeddingLayer):
    """``torch.nn.Embedding`` that may have its optimizer fused into the backward, and rows in fewer bytes.

    Args:
        num_embeddings, embedding_dim: E, D. padding_idx: an id whose row begins as zeros and that gives no gradient;
            negative ones count from the end. Of a compressed table, lookups have zeros for it. E is None where every
            int64 is an id, with ``compression=rk.Hash(buckets)``; a negative ``padding_idx`` is that id then.
        sparse: whether the gradient is a sparse tensor; of layers without ``options``.
        _weight: the rows to begin with, or None. _freeze: whether nothing trains them.
        device, dtype: of the weight. Beside ``options``, torch.float16 and bfloat16 are formats "fp16" and "bf16".
        max_norm, norm_type, scale_grad_by_freq: only the defaults.
        options: of the table: optimizer, format, compression, init, cache, output_dtype, bounds_check, rounding, seed,
            as of ``rk.EmbeddingBagConfig`` and ``rk.EmbeddingBagCollection``, except that rows begin as torch's, normal
            with variance 1. Without options, ``weight`` is a parameter with torch's gradients, of its dtype. Rows of
            another ``format`` than fp32 are trained by a fused ``optimizer`` only: without one they have no gradient.

    Attributes:
        weight: [E, D], or rows of bytes [E, row_bytes] of a format that is no dtype; ``weight_0``, ``weight_1`` ... of
            a compressed table of several parts. With a fused optimizer the state has ``step`` and the moments, too.
        collection: the ``rk.EmbeddingBagCollection`` of the one table, or None without options.

    Raises:
        NotImplementedError: max_norm, norm_type or scale_grad_by_freq. ValueError: as the collection;
        ``sparse`` beside options. TypeError: an unknown option; a ``_weight`` that is no tensor.
    """

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        _freeze: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[TableOptions],
    ) -> None:
        refuse_norms("rk.Embedding", max_norm, norm_type, scale_grad_by_freq)
        sizes = {"num_embeddings": num_embeddings, "embedding_dim": embedding_dim, "padding_idx": padding_idx}
        super().__init__(sizes, _weight, device, dtype, options)
        self.sparse = _checked_sparse(sparse, self.collection)
        if _freeze:
            self.requires_grad_(False)

    @classmethod
    def from_pretrained(
        cls, embeddings: Tensor, freeze: bool = True, padding_idx: int | None = None, **options: Any
    ) -> Embedding:
        """A layer with these rows [E, D]; ``freeze``: whether nothing trains them.

        Raises:
            TypeError: ``embeddings`` are no tensor. ValueError: they have not two dimensions.
        """
        _check_rows(embeddings)
        given: Any = {"padding_idx": padding_idx, "_weight": embeddings, "_freeze": freeze, **options}
        return cls(*embeddings.shape, **given)

    if TYPE_CHECKING:

        def __call__(self, input: Tensor) -> Tensor: ...

    def forward(self, input: Tensor) -> Tensor:
        """Looks up ids.

        Args:
            input: int32 or int64 ids of any shape.

        Returns:
            ``[*input.shape, D]``, float32 unless ``output_dtype`` says otherwise.

        Raises:
            IndexError: an id out of range. On a GPU ``collection.check()`` tells, and counts positions in
            ``input.reshape(-1)``. ValueError: another dtype or device.
        """
        check_ids(input)
        ids = input.reshape(-1)
        is_compressed = self.collection is not None and self.collection.tables[0].compression is not None
        # It is read before the others: a file has only the rows of the last load, which a backward needs again.
        padding = None if self.padding_idx is None or is_compressed else self._padding_row(ids.device)
        try:
            rows = self._rows(ids, sparse=self.sparse)
        except (IndexError, ValueError) as error:
            explain_input(error, input.shape, pools=False)
            raise
        if padding is not None:
            rows = torch.where((ids == self.padding_idx)[:, None], padding.to(rows.dtype), rows)
        return rows.view(*input.shape, self.embedding_dim)

    def _padding_row(self, device: torch.device) -> Tensor:
        """[1, D]: the row of the padding, which other uses of the weight than lookups may train."""
        if self.collection is None:
            return self.weight.detach()[self.padding_idx : self.padding_idx + 1]
        weight = self.collection.embedding_bags[_NAME].weight  # it may be in page-locked host memory, or in a file
        row = self.collection._store.row(weight, self.padding_idx).to(device, non_blocking=True)
        format = self.collection.tables[0].format
        return dequantize_rows(row, format, self.embedding_dim) if row.dtype == torch.uint8 else row

    def extra_repr(self) -> str:
        """Sizes and options, for printing."""
        return self._describe()


class EmbeddingBag(EmbeddingLayer):
    """``torch.nn.EmbeddingBag`` that may have its optimizer fused into the backward, and rows in fewer bytes.

    All arguments but two are ``rk.Embedding``'s; an id of padding is left out of its bag.

    Args:
        mode: "sum", "mean" or "max". The first of the rows with a column's maximum has its gradient, as in torch.
        include_last_offset: whether ``offsets`` ends with the number of ids.

    Attributes:
        weight, collection: ``rk.Embedding``'s.

    Raises:
        As ``rk.Embedding``. ValueError: another mode; "max" beside ``bounds_check`` "ignore" or "none".
    """

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        _weight: Tensor | None = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[TableOptions],
    ) -> None:
        refuse_norms("rk.EmbeddingBag", max_norm, norm_type, scale_grad_by_freq)
        check_choice("mode", mode, ("sum", "mean", "max"))
        if mode == "max":
            _check_largest(options.get("bounds_check", "error"))
        sizes = {"num_embeddings": num_embeddings, "embedding_dim": embedding_dim, "padding_idx": padding_idx}
        pooling = {"pooling": "mean" if mode == "mean" else "sum"}
        super().__init__(sizes | pooling, _weight, device, dtype, options)
        self.mode, self.include_last_offset = mode, include_last_offset
        self.sparse = _checked_sparse(sparse, self.collection)

    @classmethod
    def from_pretrained(cls, embeddings: Tensor, freeze: bool = True, **options: Any) -> EmbeddingBag:
        """A layer with these rows [E, D]; ``freeze``: whether nothing trains them.

        Raises:
            TypeError: ``embeddings`` are no tensor. ValueError: they have not two dimensions.
        """
        _check_rows(embeddings)
        given: Any = {"_weight": embeddings, **options}
        return cls(*embeddings.shape, **given).requires_grad_(not freeze)

    if TYPE_CHECKING:

        def __call__(
            self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
        ) -> Tensor: ...

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Pools bags.

        Args:
            input: int32 or int64 ids: [B, L], or [N] with ``offsets``.
            offsets: [B] where bags begin in ``input``; [B + 1] with ``include_last_offset``.
            per_sample_weights: input's shape, each id's factor; not with "max". Of "mean", the weighted sum is divided
                by the number of ids.

        Returns:
            [B, D], float32 unless ``output_dtype`` says otherwise; zeros for an empty bag.

        Raises:
            IndexError: an id out of range; on a GPU ``collection.check()`` tells. ValueError: wrong shapes, dtypes or
            devices; offsets that fall. TypeError: an argument is no tensor. NotImplementedError: factors with "max".
        """
        if self.collection is None and self.mode != "max":
            return embedding_bag(
                input,
                self.weight,
                offsets,
                mode=self.mode,
                sparse=self.sparse,
                per_sample_weights=per_sample_weights,
                include_last_offset=self.include_last_offset,
                padding_idx=self.padding_idx,
            )
        ids, ends, factors = read_bags(input, offsets, per_sample_weights, self.include_last_offset)
        if self.mode == "max" and factors is not None:
            raise NotImplementedError('per_sample_weights with mode "max", as in torch')
        try:
            return self._largest(ids, ends) if self.mode == "max" else self._pooled(ids, ends, factors)
        except (IndexError, ValueError) as error:
            explain_input(error, input.shape, pools=self.mode != "max")
            raise

    def _largest(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """[B, D]: the largest of each column of a bag's rows."""
        check_bounds(offsets, ids.shape[0], "bag {}".format)
        if self.collection is not None:
            _check_largest(self.collection.bounds_check)
        rows = self._rows(ids, sparse=self.sparse)
        is_padding = None if self.padding_idx is None else ids == self.padding_idx
        places = _places_of_largest(rows.detach(), offsets.long(), is_padding)
        return torch.cat([rows, rows.new_zeros(1, rows.shape[1])]).gather(0, places)

    def extra_repr(self) -> str:
        """Sizes and options, for printing."""
        return self._describe(f"mode={self.mode!r}")


def _check_largest(bounds_check: str) -> None:
    if bounds_check != "error":
        raise ValueError(f'bounds_check must be "error" for mode "max", got {bounds_check!r}')


def _places_of_largest(rows: Tensor, offsets: Tensor, is_padding: Tensor | None) -> Tensor:
    """[B, D] int64: for each column of a bag, the first of rows [N, D] with its maximum, NaN if any is; N: it has none.

    Args:
        offsets: [B + 1] int64. is_padding: [N] bool, of rows that are in no bag; or None.
    """
    count, bags = rows.shape[0], offsets.shape[0] + 1  # the first and the last are of rows in no bag
    numbers = torch.arange(count, device=rows.device)
    bag = torch.searchsorted(offsets, numbers, right=True)
    if is_padding is not None:
        bag = bag.masked_fill(is_padding, bags - 1)
    bag = bag[:, None].expand_as(rows)
    largest = rows.new_full((bags, rows.shape[1]), -torch.inf).scatter_reduce(0, bag, rows, "amax")
    found = torch.where((rows == largest.gather(0, bag)) | rows.isnan(), numbers[:, None], count)
    return found.new_full(largest.shape, count).scatter_reduce(0, bag, found, "amin")[1:-1]


def _checked_sparse(sparse: bool, collection: EmbeddingBagCollection | None) -> bool:
    if sparse and collection is not None:
        raise ValueError(
            "sparse must be False beside options of the table: no gradient of it is stored, or a dense one"
        )
    return sparse
