"""``torch.nn.Embedding`` and ``torch.nn.EmbeddingBag`` backed by a table of this package."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from rec_kernels.nn import pooled_lookups
from rec_kernels.nn.added_members import only_added
from rec_kernels.nn.arguments import check_choice
from rec_kernels.nn.collection_options import CollectionOptions, check_names
from rec_kernels.nn.embedding_bag_collection import EmbeddingBagCollection
from rec_kernels.nn.jagged.checks import check_bounds, has_data
from rec_kernels.nn.jagged.select_features import SelectedKeys
from rec_kernels.nn.tables.compression import Compression
from rec_kernels.nn.tables.config import EmbeddingBagConfig
from rec_kernels.ops.bad_ids import explain_input
from rec_kernels.ops.embedding_bag import check_ids, embedding_bag, read_bags, refuse_norms
from rec_kernels.ops.layout_records import check_tensor
from rec_kernels.ops.row_formats import FLOAT_FORMATS, dequantize_rows

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

_NAME = "weight"  # the table's name in its collection


class TableOptions(CollectionOptions, total=False):
    """Table options: arguments of ``rk.EmbeddingBagConfig`` and ``rk.EmbeddingBagCollection``."""

    compression: Compression | None
    init: Callable[[Tensor], object] | None


_CONFIG_OPTIONS = ("format", "compression", "init")


class _InitialRows:
    """Initializes a layer's rows: standard normal as in torch, or given rows; zeros for the padding row."""

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
    """Base class of ``rk.Embedding`` and ``rk.EmbeddingBag``: one table with torch.nn's interface.

    Without any of the ``TableOptions``, ``weight`` is an ordinary parameter. With one, it is the table of a collection
    that is hidden from module traversal, and the state has the layer's names (``weight``, ``sum``, ``step`` ...).
    """

    weight: nn.Parameter

    def __init__(
        self,
        config: dict[str, Any],
        weight: Tensor | None,
        sparse: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        options: TableOptions,
    ) -> None:
        super().__init__()
        check_names(type(self).__name__, options, TableOptions)
        given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        has_options, dtype, fill = bool(given), dtype or torch.float32, _InitialRows(weight)
        own: dict[str, Any] = {"init": fill, "format": _format_of_dtype(dtype)}
        own |= {name: given.pop(name) for name in _CONFIG_OPTIONS if name in given}
        table = EmbeddingBagConfig(**config, name=_NAME, feature_names=["input"], **own)
        if weight is not None:
            _check_initial(weight, table)
        if sparse and has_options:
            raise ValueError(
                "sparse must be False with options of the table: its gradient is dense or not stored at all"
            )
        self.sparse = sparse
        self.num_embeddings, self.embedding_dim = table.num_embeddings, table.embedding_dim
        self.padding_idx = table.padding_idx
        self.__dict__["collection"] = None
        if not has_options:
            self._add_parameter(weight, device, dtype)
            return
        fill.padding_idx = None if table.compression else table.padding_idx
        self.__dict__["collection"] = EmbeddingBagCollection([table], device=device, **given)
        fill.given = None  # ``init`` stays in the table's config
        self._expose_table()

    def _add_parameter(self, rows: Tensor | None, device: torch.device | str | None, dtype: torch.dtype) -> None:
        """Gives a layer without options its parameter: these rows, or torch's normal numbers."""
        if rows is not None:
            _format_of_dtype(rows.dtype, "_weight")
            self.weight = nn.Parameter(rows.contiguous())
            return
        self.weight = nn.Parameter(torch.empty(self.num_embeddings, self.embedding_dim, device=device, dtype=dtype))
        self.reset_parameters()

    if TYPE_CHECKING:

        @property
        def collection(self) -> EmbeddingBagCollection | None:
            """The collection that holds the table, for ``accumulate()``, ``fused_optimizer`` and others; or None."""

    def reset_parameters(self) -> None:
        """Draws the weight again, as ``torch.nn.Embedding`` does.

        Raises:
            RuntimeError: the layer has one of the ``TableOptions``: its table is initialized once, by ``init``.
        """
        if self.collection is not None:
            raise RuntimeError(
                "reset_parameters() requires a layer without options: create a new one, or write `weight`"
            )
        _InitialRows(None, self.padding_idx)(self.weight)

    # Lookups.

    def _pooled(self, ids: Tensor, offsets: Tensor, factors: Tensor | None) -> Tensor:
        """[bags, D]: pooled embeddings from the collection."""
        collection: Any = self.__dict__["collection"]
        if not torch.compiler.is_compiling():
            self._refuse_replaced(collection._tables)
        return pooled_lookups.look_up_bags(collection, SelectedKeys(ids, offsets, factors, None))

    def _rows(self, ids: Tensor) -> Tensor:
        """[N, D]: the rows of ids [N]."""
        each = torch.arange(ids.shape[0] + 1, device=ids.device)
        if self.collection is not None:
            return self._pooled(ids, each, None)
        options: dict[str, Any] = {"include_last_offset": True, "padding_idx": self.padding_idx, "sparse": self.sparse}
        return embedding_bag(ids, self.weight, each, mode="sum", output_dtype=self.weight.dtype, **options)

    def _refuse_replaced(self, holders) -> None:
        for stored in holders:
            if self._parameters.get(stored) is not holders[stored]._parameters["weight"]:
                raise RuntimeError(
                    f"{stored} has been replaced, but lookups still read the previous table: write it in place, "
                    "with load_state_dict(), or with copy_() under torch.no_grad(); only a layer without "
                    "options accepts another parameter"
                )

    # Moves, copies and states delegate to the collection, under the layer's names.

    def _table_parameters(self) -> dict[str, nn.Parameter]:
        """The collection's parameters under the layer's names."""
        holders = self.collection.embedding_bags
        shown = {}
        for stored in holders:
            shown[stored] = holders[stored].weight
            if "projection" in holders[stored]._parameters:
                shown["projection"] = holders[stored].projection
        return shown

    def _expose_table(self) -> None:
        self._parameters.update(self._table_parameters())

    def _only_added(self) -> AbstractContextManager[None]:
        """Hides the collection's parameters and leaves those that a subclass added."""
        return only_added(self, parameters=self._table_parameters())

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # torch.distributed.checkpoint accesses every entry of a state as an attribute.
            if (collection := self.__dict__.get("collection")) is not None:
                for own, stored in self._state_names().items():
                    if own == name or own.startswith(f"{name}."):
                        return functools.reduce(getattr, stored.removesuffix(own[len(name) :]).split("."), collection)
            raise

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        if self.collection is None:
            return super()._apply(fn, recurse)
        self.collection._apply(fn)
        with self._only_added():
            super()._apply(fn, recurse)
        self._expose_table()
        return self

    def train(self, mode: bool = True) -> Self:
        """Sets the mode of the layer, and thus whether lookups insert rows into a cache."""
        if self.collection is not None:
            self.collection.train(mode)
        return super().train(mode)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Sets ``requires_grad`` as ``torch.nn.Module`` does; False also freezes a table of a fused optimizer."""
        if self.collection is None:
            return super().requires_grad_(requires_grad)
        self.collection.requires_grad_(requires_grad)
        with self._only_added():
            return super().requires_grad_(requires_grad)

    def __getstate__(self) -> dict:
        state = super().__getstate__()
        if self.collection is None:
            return state
        # The collection pickles its parameters; their names alone keep the order here.
        return {**state, "_parameters": self._parameters | dict.fromkeys(self._table_parameters())}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        if self.collection is not None:
            self._expose_table()

    def _state_names(self) -> dict[str, str]:
        """Maps the layer's state names to the collection's."""
        return {_layer_name(name): name for name in nn.Module.state_dict(self.collection)}

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        if self.collection is None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            return
        for name, tensor in self.collection.state_dict(keep_vars=keep_vars).items():
            destination[prefix + _layer_name(name)] = tensor
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
            rest = (strict, missing_keys, unexpected_keys, error_msgs)
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
            return
        names = self._state_names()
        given = {name.removeprefix(prefix): t for name, t in state_dict.items() if name.startswith(prefix)}
        known = {names[name]: t for name, t in given.items() if name in names}
        assign = local_metadata.get("assign_to_params_buffers", False)
        try:
            missing = self.collection.load_state_dict(known, strict=False, assign=assign).missing_keys
        except RuntimeError as error:
            error_msgs.append(str(error).replace(f"embedding_bags.{_NAME}.", prefix))
            return
        self._expose_table()
        unexpected: list[str] = []
        with self._only_added():
            rest = (strict, missing_keys, unexpected, error_msgs)
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
        unexpected_keys += [name for name in unexpected if name.removeprefix(prefix) not in names]
        if strict:
            missing_keys += [prefix + _layer_name(name) for name in missing]

    def _describe(self, *options: str) -> str:
        """Sizes, options of the layer, and options of its table."""
        text = [f"{self.num_embeddings}, {self.embedding_dim}", *options]
        if self.padding_idx is not None:
            text.append(f"padding_idx={self.padding_idx}")
        if self.collection is not None:
            table = self.collection.tables[0]
            text += [f"format={table.format}"] * (table.format != "fp32")
            text += [f"compression={table.compression}"] * (table.compression is not None)
            text.append(f"optimizer={self.collection.optimizer}")
        return ", ".join(text)


def _layer_name(name: str) -> str:
    """The layer's name of a tensor in its collection's state; parts of a compressed table keep their index."""
    if not name.startswith("embedding_bags."):
        return name
    _, stored, kind = name.split(".")
    return kind + stored.removeprefix(_NAME)


def _format_of_dtype(dtype: torch.dtype, name: str = "dtype") -> str:
    if dtype not in FLOAT_FORMATS:
        raise ValueError(f"{name} must be torch.float32, float16 or bfloat16, got {dtype}")
    return FLOAT_FORMATS[dtype]


def _is_zeros(row: Tensor) -> bool:
    """True if a row is known to be that of an empty bag; reading it takes less time than replacing rows of a batch."""
    return has_data(row) and not is_in_torch_dispatch_mode() and not row.view(torch.uint8).any()


def _check_rows(embeddings: Tensor) -> None:
    check_tensor("embeddings", embeddings)
    if embeddings.dim() != 2:
        raise ValueError(f"embeddings must have two dimensions, got {list(embeddings.shape)}")


def _check_initial(weight: Tensor, table: EmbeddingBagConfig) -> None:
    check_tensor("_weight", weight)
    if table.compression is not None or not isinstance(table.init, _InitialRows):
        raise ValueError("_weight sets all rows of the table, so compression and init must be None")
    size = [table.num_embeddings, table.embedding_dim]
    if list(weight.shape) != size or not weight.is_floating_point():
        raise ValueError(f"_weight must be floats {size}, got {weight.dtype} {list(weight.shape)}")


class Embedding(EmbeddingLayer):
    """``torch.nn.Embedding`` with an optional fused optimizer, and optionally fewer bytes per row.

    Args:
        num_embeddings, embedding_dim: E, D. padding_idx: an id whose row starts as zeros and gets no gradient; negative
            values count from the end. In a compressed table, lookups return zeros for it. E is None if every int64 is
            a valid id, with ``compression=rk.Hash(buckets)``; a negative ``padding_idx`` is then an id itself.
        sparse: whether the gradient is a sparse tensor; only for layers without ``options``.
        _weight: initial rows, or None. _freeze: whether the weight is excluded from training.
        device, dtype: of the weight. With ``options``, torch.float16 and bfloat16 select formats "fp16" and "bf16".
        max_norm, norm_type, scale_grad_by_freq: only the defaults are supported.
        options: table options: optimizer, format, compression, init, cache, output_dtype, bounds_check, rounding, seed,
            as for ``rk.EmbeddingBagConfig`` and ``rk.EmbeddingBagCollection``, except that rows start as in torch,
            normal with variance 1. Without options, ``weight`` is a parameter of its dtype with torch's gradients.
            Rows in a ``format`` that is no dtype are trained by a fused ``optimizer`` only; else they get no gradient.

    Attributes:
        weight: [E, D], or byte rows [E, row_bytes] if the format is not a dtype; ``weight_0``, ``weight_1`` ... for a
            compressed table of several parts. With a fused optimizer the state also has ``step`` and the moments.
        collection: the ``rk.EmbeddingBagCollection`` that holds the table, or None without options.

    Raises:
        NotImplementedError: max_norm, norm_type or scale_grad_by_freq. ValueError: as the collection;
        ``sparse`` together with options. TypeError: an unknown option; ``_weight`` is not a tensor.
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
        super().__init__(sizes, _weight, sparse, device, dtype, options)
        if _freeze:
            self.requires_grad_(False)

    @classmethod
    def from_pretrained(
        cls, embeddings: Tensor, freeze: bool = True, padding_idx: int | None = None, **options: Any
    ) -> Embedding:
        """Creates a layer with the rows ``embeddings`` [E, D]; ``freeze``: whether to exclude them from training.

        Raises:
            TypeError: ``embeddings`` is not a tensor. ValueError: it does not have two dimensions.
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
            ``[*input.shape, D]``; of the weight's dtype, or with table options of ``output_dtype``, by default float32.

        Raises:
            IndexError: an id is out of range. On a GPU ``collection.check()`` raises it, with a position in
            ``input.reshape(-1)``. ValueError: a wrong dtype or device.
        """
        check_ids(input)
        ids = input.reshape(-1)
        is_compressed = self.collection is not None and self.collection.tables[0].compression is not None
        # Read the padding row first: a file keeps only the last loaded rows in memory, and the backward needs those.
        padding = None if self.padding_idx is None or is_compressed else self._padding_row(ids.device)
        try:
            rows = self._rows(ids)
        except (IndexError, ValueError) as error:
            explain_input(error, input.shape, pools=False)
            raise
        if padding is not None and not _is_zeros(padding):
            rows = torch.where((ids == self.padding_idx)[:, None], padding.to(rows.dtype), rows)
        return rows.view(*input.shape, self.embedding_dim)

    def _padding_row(self, device: torch.device) -> Tensor:
        """[1, D]: the padding row, which uses of the weight outside of lookups may train."""
        if self.collection is None:
            return self.weight.detach()[self.padding_idx : self.padding_idx + 1]
        weight = self.collection.embedding_bags[_NAME].weight  # it may be in page-locked host memory, or in a file
        row = self.collection._store.row(weight, self.padding_idx).to(device, non_blocking=True)
        format = self.collection.tables[0].format
        return dequantize_rows(row, format, self.embedding_dim) if row.dtype == torch.uint8 else row

    def extra_repr(self) -> str:
        """Shows sizes and options when printed."""
        return self._describe()


class EmbeddingBag(EmbeddingLayer):
    """``torch.nn.EmbeddingBag`` with an optional fused optimizer, and optionally fewer bytes per row.

    All other arguments are ``rk.Embedding``'s; the padding id is left out of its bag.

    Args:
        mode: "sum", "mean" or "max". The gradient of a column's maximum goes to the first row that has it, as in torch.
        include_last_offset: whether ``offsets`` ends with the number of ids.

    Attributes:
        weight, collection: as for ``rk.Embedding``.

    Raises:
        As ``rk.Embedding``. ValueError: another mode; "max" with ``bounds_check`` "ignore" or "none".
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
            _check_max_bounds(options.get("bounds_check", "error"))
        sizes = {"num_embeddings": num_embeddings, "embedding_dim": embedding_dim, "padding_idx": padding_idx}
        pooling = {"pooling": "mean" if mode == "mean" else "sum"}
        super().__init__(sizes | pooling, _weight, sparse, device, dtype, options)
        self.mode, self.include_last_offset = mode, include_last_offset

    @classmethod
    def from_pretrained(cls, embeddings: Tensor, freeze: bool = True, **options: Any) -> EmbeddingBag:
        """Creates a layer with the rows ``embeddings`` [E, D]; ``freeze``: whether to exclude them from training.

        Raises:
            TypeError: ``embeddings`` is not a tensor. ValueError: it does not have two dimensions.
        """
        _check_rows(embeddings)
        given: Any = {"_weight": embeddings, **options}
        return cls(*embeddings.shape, **given).requires_grad_(not freeze)

    if TYPE_CHECKING:

        def __call__(
            self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
        ) -> Tensor: ...

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Pools bags of ids.

        Args:
            input: int32 or int64 ids: [B, L], or [N] with ``offsets``.
            offsets: [B], the start of each bag in ``input``; [B + 1] with ``include_last_offset``.
            per_sample_weights: shape of ``input``, a factor per id; not with "max". With "mean", the weighted sum is
                divided by the number of ids.

        Returns:
            [B, D], zeros for an empty bag; of the weight's dtype, or with table options of ``output_dtype``, by default
            float32. Sums are float32 and rounded once.

        Raises:
            IndexError: an id is out of range; on a GPU ``collection.check()`` raises it. ValueError: wrong shapes,
            dtypes or devices; decreasing offsets. TypeError: an argument is not a tensor. NotImplementedError:
            per-sample weights with "max".
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
                output_dtype=self.weight.dtype,
            )
        ids, ends, factors = read_bags(input, offsets, per_sample_weights, self.include_last_offset)
        if self.mode == "max" and factors is not None:
            raise NotImplementedError('per_sample_weights with mode "max", as in torch')
        try:
            return self._max_pooled(ids, ends) if self.mode == "max" else self._pooled(ids, ends, factors)
        except (IndexError, ValueError) as error:
            explain_input(error, input.shape, pools=self.mode != "max")
            raise

    def _max_pooled(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """[B, D]: the column-wise maximum of each bag's rows."""
        check_bounds(offsets, ids.shape[0], "bag {}".format)
        if self.collection is not None:
            _check_max_bounds(self.collection.bounds_check)
        rows = self._rows(ids)
        is_padding = None if self.padding_idx is None else ids == self.padding_idx
        places = pooled_lookups.argmax_rows(rows.detach(), offsets.long(), is_padding)
        return torch.cat([rows, rows.new_zeros(1, rows.shape[1])]).gather(0, places)

    def extra_repr(self) -> str:
        """Shows sizes and options when printed."""
        return self._describe(f"mode={self.mode!r}")


def _check_max_bounds(bounds_check: str) -> None:
    if bounds_check != "error":
        raise ValueError(f'bounds_check must be "error" for mode "max", got {bounds_check!r}')
