"""EmbeddingCollection: lookups of many tables that are not pooled, in one kernel call."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from rec_kernels.nn.collection import TableCollection
from rec_kernels.nn.inverse_jagged import InverseKeyedJaggedTensor
from rec_kernels.nn.jagged import JaggedTensor
from rec_kernels.nn.jagged_checks import check_offsets
from rec_kernels.nn.layout import Layout, ServedTables
from rec_kernels.nn.selected import SelectedKeys, select_keys


class SequenceLookups(Layout):
    """Lookups that are not pooled, for modules with a ``_lookup``."""

    _pools = False

    def forward(self, features) -> dict[str, JaggedTensor]:
        """Looks up a batch.

        Args:
            features: ``rk.KeyedJaggedTensor`` or TorchRec's, with at least the collection's features, in any order.
                Rows are multiplied by its weights, if it has any.

        Returns:
            feature -> ``rk.JaggedTensor`` of its rows: values [N_f, D_f] of ``output_dtype`` in the order of the ids,
            offsets [B + 1]. A feature of two tables appears as ``feature@table``. On a GPU, where the rows of a feature
            begin is read from ``features.offset_per_key()``, which waits for the device unless it is known already.

        Raises:
            As ``rk.EmbeddingBagCollection``; in messages about ids, every id is a bag of its feature. On a GPU, of
            the offsets only those where features begin are looked at.
        """
        given = self._select(features)
        rows = self._rows(given)
        bags = given.bag_starts(len(self.feature_names))
        bounds = _bounds(features, self.feature_names, given, bags)
        blocks = rows.split([stop - start for start, stop in itertools.pairwise(bounds)]) if bags[1:] else ()
        output = {}
        for f, (key, dim, block) in enumerate(zip(self._output_keys, self._output_dims, blocks, strict=True)):
            offsets = given.offsets[bags[f] : bags[f + 1] + 1]
            output[key] = JaggedTensor._of(block[:, :dim], offsets - offsets[:1])
        return output

    def rows(self, features) -> Tensor:
        """[N, largest D]: what ``forward`` returns, before it is cut into features; columns behind a D are zeros.

        For ``torch.compile`` and CUDA graphs: it asks the device for nothing if the keys of ``features`` are the
        collection's ``feature_names`` in their order, and all of one batch size.
        """
        return self._rows(self._select(features))

    def _select(self, features) -> SelectedKeys:
        if isinstance(features, InverseKeyedJaggedTensor):
            raise TypeError(
                "lookups that are not pooled take no rk.InverseKeyedJaggedTensor: give them features.to_kjt(), or wrap "
                "the module in rk.deduplicated if its features are in one group"
            )
        given = select_keys(features, self.feature_names, exact=True)
        check_offsets(features.offsets(), features.values().shape[0])
        return given

    def _rows(self, given: SelectedKeys) -> Tensor:
        return self._lookup(*self._bags_of(given))

    def _bags_of(self, given: SelectedKeys) -> tuple[SelectedKeys, Tensor]:
        """Every id as a bag of its own."""
        count, offsets = given.values.shape[0], given.offsets
        each = torch.arange(count + 1, device=offsets.device)
        features = len(self.feature_names)
        batch = (offsets.shape[0] - 1) // max(features, 1)
        starts: Any
        if given.strides:
            starts = given.bag_starts(features)
        elif torch.compiler.is_compiling() or not batch:  # where the batch depends on data, it is not to be asked for
            starts = torch.arange(features + 1, device=offsets.device) * batch
        else:  # a view, on a device without a kernel
            starts = slice(None, None, batch)
        return given._replace(offsets=each), offsets[starts].long().contiguous()


class ServedEmbeddings(SequenceLookups, ServedTables):
    """What ``EmbeddingCollection.for_serving`` returns."""


class EmbeddingCollection(SequenceLookups, TableCollection):
    """A row for each id, in one kernel call for all tables: sequence embeddings.

    Everything but the output is ``rk.EmbeddingBagCollection``'s: formats, fused optimizers, ``accumulate()``,
    ``set_grad_scaler()``, ``freeze()``, ``state_dict()`` with the names ``embedding_bags.<table>.weight``, errors.

    Args:
        tables: ``rk.EmbeddingConfig``, of any dimensions. Of ``rk.EmbeddingBagConfig``, the pooling is not used.

    The others are ``rk.EmbeddingBagCollection``'s.

    Raises:
        ValueError: a table's compression has not compose "per_id"; and as ``rk.EmbeddingBagCollection``.
    """

    def for_serving(self) -> ServedEmbeddings:
        """As ``rk.EmbeddingBagCollection``'s, with ``forward`` and ``rows``."""
        return ServedEmbeddings(self)


def _bounds(features, keys: list[str], given: SelectedKeys, bags: list[int]) -> list[int]:
    """[F + 1]: where each feature's ids start."""
    if list(features.keys()) == keys and hasattr(features, "offset_per_key"):
        return list(features.offset_per_key())
    return given.offsets[bags].tolist()
