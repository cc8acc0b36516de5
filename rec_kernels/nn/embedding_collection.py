"""EmbeddingCollection: one embedding row per id for many tables, in one kernel call."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rec_kernels.nn import sequence_lookups
from rec_kernels.nn.collection import TableCollection
from rec_kernels.nn.jagged.jagged_tensor import JaggedTensor
from rec_kernels.nn.jagged.select_features import SelectedKeys
from rec_kernels.nn.served import ServedTables, in_format
from rec_kernels.nn.tables.config import EmbeddingConfig
from rec_kernels.nn.tables.load_state import rename
from rec_kernels.nn.tables.parameters import Tables


class EmbeddingCollection(TableCollection):
    """Sequence embeddings: one row per id, in one kernel call for all tables.

    Everything except the output works as in ``rk.EmbeddingBagCollection``: formats, fused optimizers, ``accumulate()``,
    ``set_grad_scaler()``, ``freeze()``, errors. The tables are ``embeddings``, as in TorchRec: a state has the names
    ``embeddings.<table>.weight``. A state with the names of ``rk.EmbeddingBagCollection`` loads as well.

    Args:
        tables: ``rk.EmbeddingConfig`` or TorchRec's; dimensions may differ. The pooling of an
            ``rk.EmbeddingBagConfig`` is ignored.

    The other arguments are ``rk.EmbeddingBagCollection``'s.

    Raises:
        ValueError: a table's compression does not have compose "per_id"; and as ``rk.EmbeddingBagCollection``.
    """

    embeddings: Tables
    _pools = False
    _holder = "embeddings"

    if TYPE_CHECKING:

        def __call__(self, features: Any) -> dict[str, JaggedTensor]: ...

    def forward(self, features) -> dict[str, JaggedTensor]:
        """Looks up a batch.

        Args:
            features: ``rk.KeyedJaggedTensor`` or TorchRec's, with at least the collection's features, in any order, or
                a dict as for ``rk.KeyedJaggedTensor.from_dict``. Rows are multiplied by its weights, if it has any.

        Returns:
            feature -> ``rk.JaggedTensor`` of its rows: values [N_f, D_f] of ``output_dtype`` in the order of the ids,
            offsets [B + 1]. A feature of two tables appears as ``feature@table``. On a GPU, the split into features
            calls ``features.offset_per_key()``, which waits for the device unless the host already knows it.

        Raises:
            As ``rk.EmbeddingBagCollection``; messages about ids count every id as a bag of its feature. On a GPU, only
            the offsets at the start of each feature are checked.
        """
        return sequence_lookups.look_up(self, features)

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The table configs: TorchRec's name for ``tables``."""
        return list(self.tables)

    def embedding_dim(self) -> int:
        """The embedding dimension shared by all tables, as in TorchRec.

        Raises:
            ValueError: the dimensions differ, which TorchRec does not allow.
        """
        dims = sorted(set(self._features.output_dims))
        if len(dims) != 1:
            raise ValueError(f"embedding_dim() requires tables of equal dimensions, got {dims}")
        return dims[0]

    def embedding_names_by_table(self) -> list[list[str]]:
        """The output names of the features of each table, as in TorchRec."""
        names = iter(self._features.output_keys)
        return [list(itertools.islice(names, len(table.feature_names))) for table in self.tables]

    def need_indices(self) -> bool:
        """False: the output has rows without their ids, unlike TorchRec's with ``need_indices=True``."""
        return False

    def rows(self, features) -> Tensor:
        """[N, largest D]: the rows of ``forward`` before the split into features; columns after a row's D are zeros.

        Use it with ``torch.compile`` and CUDA graphs: it never waits for the device if the keys of ``features`` are the
        collection's ``feature_names`` in the same order and all features have one batch size.
        """
        return sequence_lookups.look_up_rows(self, features)

    def for_serving(self, format: str | Mapping[str, str] | None = None) -> ServedEmbeddings:
        """Returns a module with only ``forward`` and ``rows``; see ``rk.EmbeddingBagCollection.for_serving``."""
        return ServedEmbeddings(in_format(EmbeddingCollection, self, format), self)

    @property
    def embedding_bags(self) -> Tables:
        """``embeddings`` under its name in ``rk.EmbeddingBagCollection``, for code that handles both."""
        return self.embeddings

    def _load_from_state_dict(self, state_dict: dict, prefix: str, local_metadata: dict, *args: object) -> None:
        rename(state_dict, f"{prefix}embedding_bags.", f"{prefix}embeddings.")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def _select_bags(self, features) -> tuple[SelectedKeys, Tensor | None]:
        return sequence_lookups.bags_of(self, features)


class ServedEmbeddings(ServedTables):
    """Inference module returned by ``EmbeddingCollection.for_serving``."""

    if TYPE_CHECKING:

        def __call__(self, features: Any) -> dict[str, JaggedTensor]: ...

    def forward(self, features) -> dict[str, JaggedTensor]:
        """Looks up as ``rk.EmbeddingCollection.forward``."""
        return sequence_lookups.look_up(self, features)

    def rows(self, features) -> Tensor:
        """Looks up as ``rk.EmbeddingCollection.rows``."""
        return sequence_lookups.look_up_rows(self, features)
