"""EmbeddingBagCollection: many tables, one kernel call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rec_kernels.nn import pooled_lookups
from rec_kernels.nn.collection import TableCollection
from rec_kernels.nn.jagged.keyed_tensor import KeyedTensor
from rec_kernels.nn.jagged.select_features import SelectedKeys
from rec_kernels.nn.served import ServedTables, in_format
from rec_kernels.nn.tables.config import EmbeddingConfig
from rec_kernels.nn.tables.parameters import Tables


class EmbeddingBagCollection(TableCollection):
    """Pooled lookups of many tables in one kernel call, optionally with the optimizer fused into the backward.

    Args:
        tables: the tables, as ``rk.EmbeddingBagConfig`` or TorchRec's; several features may share one.
        device: where weights and state live.
        optimizer: ``rk.SGD``, ``rk.Adagrad``, ``rk.RowwiseAdagrad``, ``rk.Adam``, ``rk.AdamW``, ``rk.RowwiseAdam`` or
            ``rk.LAMB``: each backward updates the touched rows, and no gradient of a table is stored. A table whose
            config has an ``optimizer`` is updated by that one. None: tables are ordinary parameters with dense torch
            gradients, unless all of them have their own optimizer.
        output_dtype: of the pooled embeddings: torch.float32, float16 or bfloat16. Sums are float32 and rounded at the
            end; gradients come back in the same type and are used as float32.
        bounds_check: what an id outside its table does: "error" (IndexError; on a GPU at a later call, see ``check``),
            "ignore" (left out) or "none" (not checked: only for trusted input).
        rounding: how updated rows of a format other than fp32, and state in bfloat16, are encoded: "stochastic"
            (unbiased: updates smaller than a format's step are not lost) or "nearest".
        seed: of stochastic rounding; the noise depends on it, on ``step``, table, row and column, and on nothing else.
            Collections of one model should differ in it: both count their tables from 0.
        is_weighted: whether lookups multiply rows by the batch's weights. None: if it has some; True: it must have
            some; False: they are not used, as in TorchRec's of ``is_weighted=False``, its default.
        cache: a ``rk.RowCache``: some rows are kept, read and trained in float32; None: none. It needs an optimizer.
            ``embedding_bags[name].weight`` is up to date after ``flush()``, ``state_dict()`` always.

    All tables live in one flat tensor; ``embedding_bags[name].weight`` are views of it: [E, D] float32, float16 or
    bfloat16 for formats fp32, fp16 and bf16, uint8 rows [E, row_bytes] for the others. They are listed by
    ``named_parameters()`` (``rk.dense_parameters`` leaves out fused ones), as ``embedding_bags.<name>.weight`` in
    ``state_dict()``, the name of a format that rows do not show as ``embedding_bags.<name>.format``; the optimizer's
    state as ``embedding_bags.<name>.sum``, ``.exp_avg`` and ``.exp_avg_sq``: [E, D] of the optimizer's ``state_dtype``
    or, if row-wise, float32 [E].
    ``.to(device)`` moves them; ``.half()`` and ``.bfloat16()`` leave them as they are.
    Formats other than fp32 train with a fused optimizer only; without one, no table of the collection has a gradient,
    and the first lookup of training warns, unless ``requires_grad_(False)`` was called.
    Dense parameters elsewhere in the model are the user's optimizer's business.
    A loss that ``torch.amp.GradScaler`` multiplies needs ``set_grad_scaler``: else gradients are as much too large.
    With a fused optimizer, tables are the process's own: where torch.distributed has several, a lookup that will update
    them warns once, unless ``process_local`` of the collection has been set to True.

    Raises:
        ValueError: ``tables`` that are no configs, no unique table names, features that give two outputs one name,
            unknown ``output_dtype``, ``bounds_check``, ``rounding`` or ``is_weighted``, a seed that is no 64-bit int;
            with ``optimizer=None``, an ``lr`` of a table, or an ``optimizer`` of some tables and not of all. At a
            lookup: the batch has no weights, and ``is_weighted`` is True.
    """

    embedding_bags: Tables

    if TYPE_CHECKING:

        def __call__(self, features: Any) -> KeyedTensor: ...

    def forward(self, features) -> KeyedTensor:
        """Looks up a batch.

        Args:
            features: ``rk.KeyedJaggedTensor``, ``rk.InverseKeyedJaggedTensor`` or TorchRec's, with at least the
                collection's features, in any order, or a dict for ``rk.KeyedJaggedTensor.from_dict``. Its weights are
                the per-sample weights. Features with batch sizes of their own need inverse indices, which say what the
                rows of the full batch are. Each distinct bag is looked up, combined and projected once.

        Returns:
            KeyedTensor, values [B, sum of D] of ``output_dtype``: one block of columns per feature, in table order. A
            feature of two tables appears as ``feature@table``, as in TorchRec.

        Raises:
            KeyError: a feature is missing. IndexError: an id is out of range (``bounds_check="error"``). ValueError:
            bad shapes, dtypes, devices or offsets. RuntimeError: fused tables inside DistributedDataParallel. Nothing
            has changed when one is raised. On a GPU, bad ids and offsets of earlier lookups are raised, see ``check``.
        """
        return pooled_lookups.look_up(self, features)

    def embedding_bag_configs(self) -> list[EmbeddingConfig]:
        """The tables' configs, by TorchRec's name for ``tables``: models of TorchRec, as its DLRM, ask for them."""
        return list(self.tables)

    def by_feature(self, features) -> dict[str, Tensor]:
        """Looks up as ``forward``, and returns a [B_f, D_f] tensor for each feature, whose batch sizes may differ.

        Of an ``rk.InverseKeyedJaggedTensor``, [B, D_f].
        """
        return pooled_lookups.look_up_by_feature(self, features)

    def for_serving(self, format: str | Mapping[str, str] | None = None) -> ServedEmbeddingBags:
        """A module with the same ``forward`` and ``by_feature`` and nothing else, which shares the tables' memory.

        For ``torch.export`` and inference: its tables are one buffer, which a saved program has once. On a GPU, bad ids
        and offsets are left out of sums, as ever, and nobody is told.

        Args:
            format: of the rows, "int4" say, or a dict of formats for some tables by their names. Rows in another format
                are rounded to the nearest, once, into memory of their own on the device of lookups, and later training
                does not change them. A row cache's rows are encoded first, and the module has no cache. None: the
                collection's own memory. Printing the module shows bytes before and after, ``memory_report()`` per
                table.

        Raises:
            KeyError: ``format`` names a table that is not there. ValueError: a format that tables cannot have.
            NotImplementedError: the tables are in a file.
        """
        return ServedEmbeddingBags(in_format(EmbeddingBagCollection, self, format), self)

    def _bags_of(self, features) -> tuple[SelectedKeys, Tensor | None]:
        return pooled_lookups.bags_of(self, features)


class ServedEmbeddingBags(ServedTables):
    """Result of ``EmbeddingBagCollection.for_serving``."""

    if TYPE_CHECKING:

        def __call__(self, features: Any) -> KeyedTensor: ...

    def forward(self, features) -> KeyedTensor:
        """Looks up as ``rk.EmbeddingBagCollection.forward``."""
        return pooled_lookups.look_up(self, features)

    def by_feature(self, features) -> dict[str, Tensor]:
        """Looks up as ``rk.EmbeddingBagCollection.by_feature``."""
        return pooled_lookups.look_up_by_feature(self, features)
