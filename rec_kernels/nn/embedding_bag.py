"""EmbeddingBagCollection: many tables, one kernel call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rec_kernels import _library
from rec_kernels.nn import bounds
from rec_kernels.nn.collection import TableCollection
from rec_kernels.nn.distinct import select_distinct
from rec_kernels.nn.features import FeatureLookup
from rec_kernels.nn.inverse_jagged import InverseKeyedJaggedTensor
from rec_kernels.nn.jagged import KeyedTensor
from rec_kernels.nn.layout import Layout, ServedTables
from rec_kernels.nn.selected import SelectedKeys, select_keys
from rec_kernels.nn.shared_bags import SharedBags, starts_on
from rec_kernels.nn.tables import EmbeddingBagConfig
from rec_kernels.ops.grouped_projection import grouped_projection

_ops = torch.ops.rec_kernels


class PooledLookups(Layout):
    """Lookups of bags, for modules with a ``_lookup``."""

    def forward(self, features) -> KeyedTensor:
        """Looks up a batch.

        Args:
            features: ``rk.KeyedJaggedTensor``, ``rk.InverseKeyedJaggedTensor`` or TorchRec's, with at least the
                collection's features, in any order; its weights are the per-sample weights. Features with batch sizes
                of their own need inverse indices, which say what the rows of the full batch are. Each distinct bag is
                looked up, combined and projected once.

        Returns:
            KeyedTensor, values [B, sum of D] of ``output_dtype``: one block of columns per feature, in table order. A
            feature of two tables appears as ``feature@table``, as in TorchRec.

        Raises:
            KeyError: a feature is missing. IndexError: an id is out of range (``bounds_check="error"``). ValueError:
            bad shapes, dtypes, devices or offsets. RuntimeError: fused tables inside DistributedDataParallel. Nothing
            has changed when one is raised. On a GPU, bad ids and offsets of earlier lookups are raised, see ``check``.
        """
        given, shared = select_distinct(features, self.feature_names)
        if shared is not None:
            pooled = self._of_shared(given, shared)
        elif given.strides is not None:
            raise ValueError(
                "the features have batch sizes of their own and no inverse indices, so there is no batch that their "
                "outputs could be rows of: use by_feature()"
            )
        else:
            pooled = self._finish(self._lookup(given))
        return KeyedTensor._of(self._output_keys, self._output_dims, pooled)

    def by_feature(self, features) -> dict[str, Tensor]:
        """As ``forward``, but one [B_f, D_f] tensor for each feature, whose batch sizes may differ.

        Of an ``rk.InverseKeyedJaggedTensor``, [B, D_f].
        """
        if isinstance(features, InverseKeyedJaggedTensor):
            return self.forward(features).to_dict()
        given, starts = self._bags_of(self._select(features))
        pooled = self._lookup(given, starts)
        if starts is None:
            return KeyedTensor._of(self._output_keys, self._output_dims, self._finish(pooled)).to_dict()
        return dict(zip(self._output_keys, self._finish_each(pooled, given.strides), strict=True))

    def _select(self, features) -> SelectedKeys:
        if isinstance(features, InverseKeyedJaggedTensor):
            return select_distinct(features, self.feature_names)[0]
        return select_keys(features, self.feature_names)

    def _finish(self, pooled: Tensor) -> Tensor:
        """[B, sum of D] of ``output_dtype``: pooled parts that lie side by side combined, narrow columns projected."""
        if self._combines_later:
            blocks = zip(self._features, pooled.split(self._widths, dim=1), strict=True)
            pooled = torch.cat([feature.combined(block) for feature, block in blocks], dim=1)
        matrices = self._projections()
        if not matrices:
            return pooled.to(self.output_dtype)
        flat = torch.cat([matrix.reshape(-1) for matrix in matrices])
        return grouped_projection(pooled, flat, self._combined_dims, self._output_dims).to(self.output_dtype)

    def _finish_each(self, rows: Tensor, strides: list[int]) -> list[Tensor]:
        """The same of bags of all features: one [bags, D] for each."""
        blocks = zip(self._features, rows.split(strides), strict=True)
        return [self._finish_feature(feature, block) for feature, block in blocks]

    def _finish_feature(self, feature: FeatureLookup, block: Tensor) -> Tensor:
        """The same of one feature's columns."""
        block = feature.combined(block[:, : feature.width])
        if not feature.table.projection:
            return block.to(self.output_dtype)
        matrix = self._projection(feature.table)
        dims = list(matrix.shape)
        return grouped_projection(block.float(), matrix.reshape(-1), dims[1:], dims[:1]).to(self.output_dtype)

    def _bags_of(self, given: SelectedKeys) -> tuple[SelectedKeys, Tensor | None]:
        """With where features begin, if they have batch sizes of their own that the lookup is to know."""
        strides, device = given.strides, given.offsets.device
        if strides is None or (self._hands_out_later(device) and all(size == strides[0] for size in strides)):
            return given, None
        return given, starts_on(strides, device)

    def _hands_out_later(self, device: torch.device) -> bool:
        """Whether distinct bags are looked up before samples get them: to be combined or projected first, or by Triton.

        The Triton kernels know no shared bags, nor batch sizes that differ.
        """
        compiled = device.type != "cuda" or _library.cuda_unavailable is None
        return bool(self._combines_later or self._projected) or not compiled

    def _of_shared(self, given: SelectedKeys, shared: SharedBags) -> Tensor:
        """[B, sum of D] of ``output_dtype``, of bags that samples share."""
        given, starts = self._bags_of(given)
        if not self._hands_out_later(given.offsets.device) and shared.fits_ops():
            return self._lookup(given, starts, shared)
        pooled = self._lookup(given, starts)
        if starts is not None:
            return self._hand_out(self._finish_each(pooled, shared.sizes), shared)
        pooled = self._finish(pooled)
        if shared.is_one_group():
            return self._expand(pooled, shared.of_group(shared.groups[0]))
        return self._hand_out(list(pooled.split(self._output_dims, dim=1)), shared)

    def _hand_out(self, blocks: list[Tensor], shared: SharedBags) -> Tensor:
        """[B, sum of D] of [bags, D] of each feature."""
        for group, members in shared.together().items():
            distinct = torch.cat([blocks[f] for f in members], dim=1)
            wide = self._expand(distinct, shared.of_group(group))
            widths = [self._output_dims[f] for f in members]
            for f, block in zip(members, wide.split(widths, dim=1), strict=True):
                blocks[f] = block
        return torch.cat(blocks, dim=1)

    def _expand(self, rows: Tensor, shared: SharedBags) -> Tensor:
        """[B, C]: of the rows [bags, C] of a group, those that the samples have."""
        wide, status = _ops.expand(rows, shared.inverse[0])
        if bounds.reports_late(status):
            self._note(status, None, None, shared)
        return wide


class ServedEmbeddingBags(PooledLookups, ServedTables):
    """What ``EmbeddingBagCollection.for_serving`` returns."""


class EmbeddingBagCollection(PooledLookups, TableCollection):
    """Pooled lookups of many tables in one kernel call, optionally with the optimizer fused into the backward.

    Args:
        tables: the tables; several features may share one.
        device: where weights and state live.
        optimizer: ``rk.SGD``, ``rk.Adagrad``, ``rk.RowwiseAdagrad``, ``rk.Adam``, ``rk.RowwiseAdam`` or ``rk.LAMB``:
            each backward updates the touched rows at once, and no gradient of a table is ever stored. None: tables are
            ordinary parameters with dense torch gradients.
        output_dtype: of the pooled embeddings: torch.float32, float16 or bfloat16. Sums are float32 and rounded at the
            end; gradients come back in the same type and are used as float32.
        bounds_check: what an id outside its table does: "error" (IndexError; on a GPU at a later call, see ``check``),
            "ignore" (left out) or "none" (not checked: only for trusted input).
        rounding: how updated rows of a format other than fp32, and state in bfloat16, are encoded: "stochastic"
            (unbiased: updates smaller than a format's step are not lost) or "nearest".
        seed: of stochastic rounding; the noise depends on it, on ``step``, table, row and column, and on nothing else.
            Collections of one model should differ in it: both count their tables from 0.
        cache: a ``rk.RowCache``: some rows are kept, read and trained in float32; None: none. It needs an optimizer.
            ``embedding_bags[name].weight`` is up to date after ``flush()``, ``state_dict()`` always.

    All tables live in one flat tensor; ``embedding_bags[name].weight`` are views of it: [E, D] float32, float16 or
    bfloat16 for formats fp32, fp16 and bf16, uint8 rows [E, row_bytes] for the others. They are listed by
    ``named_parameters()`` (``requires_grad`` is False when fused), as ``embedding_bags.<name>.weight`` in
    ``state_dict()``, the name of a format that rows do not show as ``embedding_bags.<name>.format``; the optimizer's
    state as ``embedding_bags.<name>.sum``, ``.exp_avg`` and ``.exp_avg_sq``: [E, D] of the optimizer's ``state_dtype``
    or, if row-wise, float32 [E].
    ``.to(device)`` moves them; ``.half()`` and ``.bfloat16()`` leave them as they are.
    Formats other than fp32 train with a fused optimizer only; without one, no table of the collection has a gradient.
    Dense parameters elsewhere in the model are the user's optimizer's business.
    A loss that ``torch.amp.GradScaler`` multiplies needs ``set_grad_scaler``: else gradients are as much too large.
    With a fused optimizer, tables are the process's own: where torch.distributed has several, a lookup that will update
    them warns once, unless ``process_local`` of the collection has been set to True.

    Raises:
        ValueError: ``tables`` that are no configs, no unique table names, features that give two outputs one name,
            unknown ``output_dtype``, ``bounds_check`` or ``rounding``, a seed that is no 64-bit int.
    """

    tables: Sequence[EmbeddingBagConfig]

    def for_serving(self) -> ServedEmbeddingBags:
        """A module with the same ``forward`` and ``by_feature`` and nothing else, which shares the tables' memory.

        For ``torch.export`` and inference: its tables are one buffer, which a saved program has once. On a GPU, bad ids
        and offsets are left out of sums, as ever, and nobody is told.
        """
        return ServedEmbeddingBags(self)
