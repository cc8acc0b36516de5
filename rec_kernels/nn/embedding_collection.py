"""EmbeddingCollection: a row for each id of many tables, in one kernel call."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from rec_kernels.nn import sequence_lookups
from rec_kernels.nn.collection import TableCollection
from rec_kernels.nn.jagged.select_features import SelectedKeys
from rec_kernels.nn.jagged.tensors import JaggedTensor
from rec_kernels.nn.served import ServedTables, in_format
from rec_kernels.nn.tables.config import EmbeddingConfig
from rec_kernels.nn.tables.load_state import rename
from rec_kernels.nn.tables.parameters import Tables


class EmbeddingCollection(TableCollection):
    """A row for each id, in one kernel call for all tables: sequence embeddings.

    Everything but the output is ``rk.EmbeddingBagCollection``'s: formats, fused optimizers, ``accumulate()``,
    ``set_grad_scaler()``, ``freeze()``, errors. The tables are ``embeddings``, as TorchRec's: a state has the names
    ``embeddings.<table>.weight``, and one whose names are those of ``rk.EmbeddingBagCollection`` loads, too.

    Args:
        tables: ``rk.EmbeddingConfig`` or TorchRec's, of any dimensions. Of ``rk.EmbeddingBagConfig``, the pooling is
            not used.

    The others are ``rk.EmbeddingBagCollection``'s.

    Raises:
        ValueError: a table's compression has not compose "per_id"; and as ``rk.EmbeddingBagCollection``.
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
                a dict for ``rk.KeyedJaggedTensor.from_dict``. Rows are multiplied by its weights, if it has any.

        Returns:
            feature -> ``rk.JaggedTensor`` of its rows: values [N_f, D_f] of ``output_dtype`` in the order of the ids,
            offsets [B + 1]. A feature of two tables appears as ``feature@table``. On a GPU, where the rows of a feature
            begin is read from ``features.offset_per_key()``, which waits for the device unless it is known already.

        Raises:
            As ``rk.EmbeddingBagCollection``; in messages about ids, every id is a bag of its feature. On a GPU, of
            the offsets only those where features begin are looked at.
        """
        return sequence_lookups.look_up(self, features)

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The tables' configs, by TorchRec's name for ``tables``."""
        return list(self.tables)

    def embedding_dim(self) -> int:
        """The tables' embedding dimension, by TorchRec's name.

        Raises:
            ValueError: tables have different ones, which TorchRec's cannot.
        """
        dims = sorted(set(self._features.output_dims))
        if len(dims) != 1:
            raise ValueError(f"embedding_dim() is of tables of one dimension, and these have {dims}")
        return dims[0]

    def embedding_names_by_table(self) -> list[list[str]]:
        """The names that the features of each table have in the output, as TorchRec's."""
        names = iter(self._features.output_keys)
        return [list(itertools.islice(names, len(table.feature_names))) for table in self.tables]

    def need_indices(self) -> bool:
        """False: rows come without their ids, unlike those of TorchRec's collections of ``need_indices=True``."""
        return False

    def rows(self, features) -> Tensor:
        """[N, largest D]: what ``forward`` returns, before it is cut into features; columns behind a D are zeros.

        For ``torch.compile`` and CUDA graphs: it asks the device for nothing if the keys of ``features`` are the
        collection's ``feature_names`` in their order, and all of one batch size.
        """
        return sequence_lookups.look_up_rows(self, features)

    def for_serving(self, format: str | Mapping[str, str] | None = None) -> ServedEmbeddings:
        """Returns a module with ``forward`` and ``rows``; see ``rk.EmbeddingBagCollection.for_serving``."""
        return ServedEmbeddings(in_format(EmbeddingCollection, self, format), self)

    @property
    def embedding_bags(self) -> Tables:
        """``embeddings``, by the name that it has in ``rk.EmbeddingBagCollection``: for code that takes both kinds."""
        return self.embeddings

    def _load_from_state_dict(self, state_dict: dict, prefix: str, local_metadata: dict, *args: object) -> None:
        rename(state_dict, f"{prefix}embedding_bags.", f"{prefix}embeddings.")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def _bags_of(self, features) -> tuple[SelectedKeys, Tensor | None]:
        return sequence_lookups.bags_of(self, features)


class ServedEmbeddings(ServedTables):
    """Result of ``EmbeddingCollection.for_serving``."""

    if TYPE_CHECKING:

        def __call__(self, features: Any) -> dict[str, JaggedTensor]: ...

    def forward(self, features) -> dict[str, JaggedTensor]:
        """Looks up as ``rk.EmbeddingCollection.forward``."""
        return sequence_lookups.look_up(self, features)

    def rows(self, features) -> Tensor:
        """Looks up as ``rk.EmbeddingCollection.rows``."""
        return sequence_lookups.look_up_rows(self, features)
