"""Path-based compositional embedding table: each vector is a shared row transformed by a per-bucket function.

Source: "path-based compositional embeddings" of H.-J. M. Shi et al., "Compositional Embeddings Using Complementary
Partitions for Memory-Efficient Recommendation Systems", KDD 2020 (arXiv:1909.02107), section 4.2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rec_kernels.models.one_table import OneTable, without_autocast
from rec_kernels.nn.arguments import positive_integer
from rec_kernels.nn.embedding_collection import EmbeddingCollection
from rec_kernels.nn.jagged.tensors import KeyedJaggedTensor
from rec_kernels.nn.tables.compression import Hash
from rec_kernels.nn.tables.config import EmbeddingConfig
from rec_kernels.nn.tables.optimizers import Optimizer

_ops = torch.ops.rec_kernels


class PathEmbeddingBag(OneTable):
    """Pooled embeddings of a compressed table: ids share rows, and each id sharing a row has its own function of it.

    With m = ceil(E / collisions), the vector of an id is ``function[id // m](row[id % m])``. The partitions are those
    of ``rk.QuotientRemainder``, with a function instead of the second table. A function is a matrix, or a perceptron
    with one hidden ReLU layer. Each distinct id of a batch is computed once, regardless of how many bags contain it.

    Args:
        num_embeddings: E, number of ids.
        embedding_dim: D, columns of the output.
        collisions: number of ids that share a row, at least 1, and number of functions (fewer if ceil(E / m) is less).
        hidden: width of the functions' hidden layer; None: each function is a matrix without bias.
        base_dim: columns of the shared rows; None: D.
        name: name of the table of shared rows.
        pooling: "sum" or "mean".
        format: row format of the table, as in ``rk.EmbeddingConfig``.
        device, optimizer, rounding, seed: as in ``rk.EmbeddingCollection``. (The functions are initialized from torch's
            default generator.)
        bounds_check: handling of ids out of range: "error" (IndexError on the CPU; skipped silently on a GPU and inside
            ``torch.compile``) or "ignore" (skipped).

    ``rows`` is the ``rk.EmbeddingCollection`` with the table. The functions are dense parameters, updated by the dense
    optimizer, and stay float32 even under autocast: ``weight`` [collisions, D, base_dim]; or ``hidden_weight``
    [collisions, hidden, base_dim], ``hidden_bias`` [collisions, hidden], ``weight`` [collisions, D, hidden] and
    ``bias`` [collisions, D]. The forward reads the number of ids per function from the device: on a GPU it
    synchronizes, and ``torch.compile`` breaks the graph there (with ``fullgraph=True`` it raises).

    Raises:
        ValueError: a size below 1, or an unknown choice; the message names it.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        collisions: int,
        *,
        hidden: int | None = None,
        base_dim: int | None = None,
        name: str = "path",
        pooling: str = "sum",
        format: str = "fp32",
        device: torch.device | str | None = None,
        optimizer: Optimizer | None = None,
        bounds_check: str = "error",
        rounding: str = "stochastic",
        seed: int = 0,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, pooling, bounds_check)
        collisions = positive_integer("collisions", collisions)
        base_dim = positive_integer("base_dim", embedding_dim if base_dim is None else base_dim)
        self.hidden = None if hidden is None else positive_integer("hidden", hidden)
        self.buckets = -(-num_embeddings // collisions)
        self.collisions = -(-num_embeddings // self.buckets)  # drop functions without ids
        table = EmbeddingConfig(
            num_embeddings, base_dim, name=name, feature_names=[name], format=format, compression=Hash(self.buckets)
        )
        self.rows = EmbeddingCollection(
            [table], device=device, optimizer=optimizer, bounds_check="ignore", rounding=rounding, seed=seed
        )
        self._make_functions(base_dim, device)

    def _make_functions(self, base_dim: int, device: torch.device | str | None) -> None:
        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(self.collisions, *shape, dtype=torch.float32, device=device))

        hidden = self.hidden
        self.weight = parameter(self.embedding_dim, base_dim if hidden is None else hidden)
        if hidden is not None:
            self.hidden_weight, self.hidden_bias = parameter(hidden, base_dim), parameter(hidden)
            self.bias = parameter(self.embedding_dim)
        for k in range(self.collisions):
            if hidden is None:
                # Orthogonal: preserves the variance of the rows, and distinguishes the ids that share one.
                nn.init.orthogonal_(self.weight.data[k], gain=max(self.embedding_dim / base_dim, 1) ** 0.5)
            else:
                nn.init.kaiming_uniform_(self.hidden_weight.data[k], nonlinearity="relu")
                nn.init.xavier_uniform_(self.weight.data[k])

    def forward(self, features) -> Tensor:
        """Looks up and pools a batch.

        Args:
            features: ``rk.JaggedTensor`` or TorchRec's: ids [N] int32 or int64, offsets [B + 1], weights [N] or None.

        Returns:
            [B, D] float32. Each id's vector is rounded as torch's matrix products round; pooling follows the order of
            docs/numerics.md.

        Raises:
            IndexError: an id is out of range. ValueError: wrong shapes, dtypes or offsets.
        """
        values, offsets, weights, bad = self._unpack(features)
        valid = ~bad
        ids, inverse = torch.unique(values[valid].long(), return_inverse=True)
        positions = torch.full_like(values, -1, dtype=torch.int64)  # -1 is out of range: the lookup skips it
        positions[valid] = inverse
        options = {"pooling": self.pooling, "bounds_check": "ignore"}
        with without_autocast(values):
            vectors = self._unique_vectors(ids)
        return _ops.embedding_bag.table(vectors, positions, offsets, weights, **options)[0]

    def _unique_vectors(self, ids: Tensor) -> Tensor:
        """Computes the vectors [U, D] of ascending ids; the ids of one function are then contiguous."""
        offsets = torch.arange(len(ids) + 1, device=ids.device)
        rows = self.rows.rows(KeyedJaggedTensor._from_parts(self.rows.feature_names, ids, offsets))
        sizes = torch.bincount(ids // self.buckets, minlength=self.collisions).tolist()
        # Unbind each parameter once: the gradient of one function's slice would be as large as the whole parameter.
        names = ("weight",) if self.hidden is None else ("hidden_bias", "hidden_weight", "bias", "weight")
        functions = zip(*(self._parameters[name].unbind(0) for name in names), strict=True)
        parts = list(zip(functions, rows.split(sizes), strict=True))
        outputs = [_apply_function(part, *function) for function, part in parts if len(part)]
        # Apply at least one function, so that an empty batch also gets gradients.
        return torch.cat(outputs or [_apply_function(rows, *parts[0][0])])

    def extra_repr(self) -> str:
        """Sizes for ``repr``."""
        function = "matrices" if self.hidden is None else f"perceptrons of {self.hidden} hidden"
        return f"{self.num_embeddings} x {self.embedding_dim}, {self.collisions} {function}, {self.pooling}"


def _apply_function(rows: Tensor, *function: Tensor) -> Tensor:
    """Applies one function, rows [n, base_dim] -> [n, D]."""
    if len(function) == 1:
        return rows @ function[0].t()
    hidden_bias, hidden_weight, bias, weight = function
    return torch.addmm(bias, torch.addmm(hidden_bias, rows, hidden_weight.t()).relu(), weight.t())
