"""One table whose rows are made along a path: a shared row, then a function that only few ids have.

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
    """Bags of one table of which few rows are kept: ids that share a row have a function each that tells them apart.

    With m = ceil(E / collisions), the vector of an id is ``function[id // m](row[id % m])``: the partitions of
    ``rk.QuotientRemainder``, with a function in the place of its second table. A function is a matrix, or a
    perceptron of one hidden layer with ReLU. Vectors are made once for each id of a batch, whatever bags have it.

    Args:
        num_embeddings: E, ids.
        embedding_dim: D, columns of the output.
        collisions: how many ids share a row, at least 1, and how many functions there are; fewer, where ceil(E / m) is
            less.
        hidden: width of the functions' hidden layer; None: they are matrices, without biases.
        base_dim: columns of the rows; None: D.
        name: of the table of rows.
        pooling: "sum" or "mean".
        format: of the rows, as in ``rk.EmbeddingConfig``.
        device, optimizer, rounding, seed: as ``rk.EmbeddingCollection``'s. (Functions start as torch's generator says.)
        bounds_check: what an id out of range does: "error" (IndexError on the CPU; left out on a GPU and inside
            ``torch.compile``, where nobody is told) or "ignore" (left out).

    ``rows`` is the ``rk.EmbeddingCollection`` of the one table. The functions are parameters for the optimizer of the
    dense parameters, which stay float32, also under autocast: ``weight`` [collisions, D, base_dim]; or
    ``hidden_weight`` [collisions, hidden, base_dim], ``hidden_bias`` [collisions, hidden], ``weight`` [collisions, D,
    hidden] and ``bias`` [collisions, D]. How many ids each function has is asked of the device: on a GPU a forward
    waits for it, and ``torch.compile`` breaks its graph there (with ``fullgraph=True`` it raises).

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
        self.collisions = -(-num_embeddings // self.buckets)  # functions of no id are left out
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
                # Keeps the variance of rows, and tells ids apart.
                nn.init.orthogonal_(self.weight.data[k], gain=max(self.embedding_dim / base_dim, 1) ** 0.5)
            else:
                nn.init.kaiming_uniform_(self.hidden_weight.data[k], nonlinearity="relu")
                nn.init.xavier_uniform_(self.weight.data[k])

    def forward(self, features) -> Tensor:
        """Looks up a batch.

        Args:
            features: ``rk.JaggedTensor`` or TorchRec's: ids [N] int32 or int64, offsets [B + 1], weights [N] or None.

        Returns:
            [B, D] float32. Each id's vector has the rounding of torch's matrix products; they are pooled in the order
            of docs/numerics.md.

        Raises:
            IndexError: an id is out of range. ValueError: wrong shapes, dtypes or offsets.
        """
        values, offsets, weights, bad = self._read(features)
        good = ~bad
        ids, found = torch.unique(values[good].long(), return_inverse=True)
        places = torch.full_like(values, -1, dtype=torch.int64)  # no row of the vectors: left out
        places[good] = found
        options = {"pooling": self.pooling, "bounds_check": "ignore"}
        with without_autocast(values):
            vectors = self._vectors(ids)
        return _ops.embedding_bag.table(vectors, places, offsets, weights, **options)[0]

    def _vectors(self, ids: Tensor) -> Tensor:
        """[U, D] of ascending ids, so that those of one function are side by side."""
        each = torch.arange(len(ids) + 1, device=ids.device)
        rows = self.rows.rows(KeyedJaggedTensor._from_parts(self.rows.feature_names, ids, each))
        sizes = torch.bincount(ids // self.buckets, minlength=self.collisions).tolist()
        # Each parameter is taken apart once: a gradient of one function's slice is as large as that of all.
        names = ("weight",) if self.hidden is None else ("hidden_bias", "hidden_weight", "bias", "weight")
        functions = zip(*(self._parameters[name].unbind(0) for name in names), strict=True)
        parts = list(zip(functions, rows.split(sizes), strict=True))
        # At least one of them, so that an empty batch has gradients, too.
        return torch.cat([_vectors_of(part, *f) for f, part in parts if len(part)] or [_vectors_of(rows, *parts[0][0])])

    def extra_repr(self) -> str:
        """Sizes, for printing."""
        function = "matrices" if self.hidden is None else f"perceptrons of {self.hidden} hidden"
        return f"{self.num_embeddings} x {self.embedding_dim}, {self.collisions} {function}, {self.pooling}"


def _vectors_of(rows: Tensor, *function: Tensor) -> Tensor:
    """[n, D] of rows [n, base_dim] of one function."""
    if len(function) == 1:
        return rows @ function[0].t()
    hidden_bias, hidden_weight, bias, weight = function
    return torch.addmm(bias, torch.addmm(hidden_bias, rows, hidden_weight.t()).relu(), weight.t())
