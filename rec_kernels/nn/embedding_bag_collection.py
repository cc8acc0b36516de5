"""EmbeddingBagCollection: pooled lookups of many tables in one kernel call."""

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
        tables: table configs, ``rk.EmbeddingBagConfig`` or TorchRec's. Several features may share one table.
        device: device of the weights and the optimizer state.
        optimizer: ``rk.SGD``, ``rk.Adagrad``, ``rk.RowwiseAdagrad``, ``rk.Adam``, ``rk.AdamW``, ``rk.RowwiseAdam`` or
            ``rk.LAMB``: each backward updates the rows it touches, and no table gradient is stored. A config's own
            ``optimizer`` takes precedence for its table. None: tables are ordinary parameters with dense torch
            gradients, unless every table has its own optimizer.
        output_dtype: dtype of the pooled embeddings: torch.float32, float16 or bfloat16. Pooling sums in float32 and
            rounds once, at the end; gradients arrive in the same dtype and are converted to float32.
        bounds_check: how an id outside its table is handled: "error" (IndexError; on a GPU a later call raises it, see
            ``check``), "ignore" (the id is skipped) or "none" (no check: only for trusted input).
        rounding: rounding of updated rows in formats other than fp32, and of bfloat16 state: "stochastic" (unbiased:
            updates smaller than one step of the format are not lost) or "nearest".
        seed: seed of stochastic rounding. The noise depends on the seed, ``step``, table, row and column only. Give
            each collection of a model its own seed, because every collection numbers its tables from 0.
        is_weighted: whether lookups multiply rows by the batch's weights. None: if the batch has weights; True: the
            batch must have weights; False: weights are ignored, as with TorchRec's default ``is_weighted=False``.
        cache: an ``rk.RowCache``, which holds some rows in float32 to read and train them there; None: no cache. It
            requires a fused optimizer. ``embedding_bags[name].weight`` is up to date after ``flush()``,
            ``state_dict()`` always.

    All tables live in one flat tensor; ``embedding_bags[name].weight`` are views of it: [E, D] float32, float16 or
    bfloat16 for the formats fp32, fp16 and bf16, and uint8 rows [E, row_bytes] for all others. ``named_parameters()``
    lists them (``rk.dense_parameters`` omits fused tables). ``state_dict()`` stores them as
    ``embedding_bags.<name>.weight``, and the format name as ``embedding_bags.<name>.format`` where the rows do not show
    it. Optimizer state is stored as ``embedding_bags.<name>.sum``, ``.exp_avg`` and ``.exp_avg_sq``: [E, D] of the
    optimizer's ``state_dtype``, or float32 [E] for row-wise optimizers.

    ``.to(device)`` moves the tables; ``.half()`` and ``.bfloat16()`` do not change them.

    Without a fused optimizer, tables have dense gradients of their dtype. Formats other than fp32, fp16 and bf16 train
    with a fused optimizer only: without one, no table of the collection has a gradient, and the first lookup in
    training mode warns unless ``requires_grad_(False)`` was called.

    Dense parameters elsewhere in the model need an optimizer of their own.

    A loss scaled by ``torch.amp.GradScaler`` needs ``set_grad_scaler``; otherwise the gradients are too large by the
    scale.

    A fused optimizer updates the tables of this process only. If torch.distributed has several processes, the first
    lookup whose backward will update the tables warns, unless ``process_local`` of the collection is True.

    Raises:
        ValueError: ``tables`` are not configs, table names repeat, two outputs would have one name,
            ``output_dtype``, ``bounds_check``, ``rounding`` or ``is_weighted`` is unknown, or the seed is not a 64-bit
            int; with ``optimizer=None``, a table has an ``lr``, or some tables have an ``optimizer`` and others do not.
            At a lookup: the batch has no weights, and ``is_weighted`` is True.
    """

    embedding_bags: Tables

    if TYPE_CHECKING:

        def __call__(self, features: Any) -> KeyedTensor: ...

    def forward(self, features) -> KeyedTensor:
        """Looks up a batch.

        Args:
            features: ``rk.KeyedJaggedTensor``, ``rk.InverseKeyedJaggedTensor`` or TorchRec's, with at least the
                collection's features, in any order, or a dict as for ``rk.KeyedJaggedTensor.from_dict``. Its weights
                are per-sample weights. Features with batch sizes of their own need inverse indices, which map each
                sample of the full batch to a bag. Each distinct bag is looked up, combined and projected once.

        Returns:
            KeyedTensor with values [B, sum of D] of ``output_dtype``: one block of columns per feature, in table order.
            A feature of two tables appears as ``feature@table``, as in TorchRec.

        Raises:
            KeyError: a feature is missing. IndexError: an id is out of range (``bounds_check="error"``). ValueError:
            bad shapes, dtypes, devices or offsets. RuntimeError: fused tables inside DistributedDataParallel. No state
            has changed when an error is raised. On a GPU, bad ids and offsets of earlier lookups raise, see ``check``.
        """
        return pooled_lookups.look_up(self, features)

    def embedding_bag_configs(self) -> list[EmbeddingConfig]:
        """The table configs: TorchRec's name for ``tables``, which its models, such as DLRM, call."""
        return list(self.tables)

    def by_feature(self, features) -> dict[str, Tensor]:
        """Looks up as ``forward`` and returns a [B_f, D_f] tensor per feature; batch sizes may differ.

        For an ``rk.InverseKeyedJaggedTensor``, the tensors are [B, D_f].
        """
        return pooled_lookups.look_up_by_feature(self, features)

    def for_serving(self, format: str | Mapping[str, str] | None = None) -> ServedEmbeddingBags:
        """Returns a module with only ``forward`` and ``by_feature``, which shares the tables' memory.

        Use it for ``torch.export`` and inference: all tables are one buffer, which a saved program stores once. On a
        GPU, bad ids and offsets are left out of the sums, and no error is reported.

        Args:
            format: row format, such as "int4", or a dict from table name to format. Rows in another format are rounded
                to nearest once, into new memory on the lookup device; later training does not change them. Rows in a
                row cache are encoded first, and the served module has no cache. None: share the collection's memory.
                Printing the module shows bytes before and after; ``memory_report()`` shows them per table.

        Raises:
            KeyError: ``format`` names an unknown table. ValueError: a format that tables cannot have.
            NotImplementedError: the tables are in a file.
        """
        return ServedEmbeddingBags(in_format(EmbeddingBagCollection, self, format), self)

    def _select_bags(self, features) -> tuple[SelectedKeys, Tensor | None]:
        return pooled_lookups.bags_of(self, features)


class ServedEmbeddingBags(ServedTables):
    """Inference module returned by ``EmbeddingBagCollection.for_serving``."""

    if TYPE_CHECKING:

        def __call__(self, features: Any) -> KeyedTensor: ...

    def forward(self, features) -> KeyedTensor:
        """Looks up as ``rk.EmbeddingBagCollection.forward``."""
        return pooled_lookups.look_up(self, features)

    def by_feature(self, features) -> dict[str, Tensor]:
        """Looks up as ``rk.EmbeddingBagCollection.by_feature``."""
        return pooled_lookups.look_up_by_feature(self, features)
