"""One table whose rows are made along a path: a shared row, then a function that only few ids have.

Source: "path-based compositional embeddings" of H.-J. M. Shi et al., "Compositional Embeddings Using Complementary
Partitions for Memory-Efficient Recommendation Systems", KDD 2020 (arXiv:1909.02107), section 4.2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rec_kernels.nn.compression import Hash
from rec_kernels.nn.embedding import EmbeddingCollection
from rec_kernels.nn.jagged import KeyedJaggedTensor
from rec_kernels.nn.one_table import check_bags, check_choice
from rec_kernels.nn.tables import EmbeddingConfig

_ops = torch.ops.rec_kernels


class PathEmbeddingBag(nn.Module):
    """Bags of one table of which few rows are kept: ids that share a row have a function each that tells them apart.

    With m = ceil(E / collisions), the vector of an id is ``function[id // m](row[id % m])``: the partitions of
    ``rk.QuotientRemainder``, with a function in the place of its second table. A function is a matrix, or a
    perceptron of one hidden layer with ReLU. Vectors are made once for each id of a batch, whatever bags have it.

    Args:
        num_embeddings: E, ids.
        embedding_dim: D, columns of the output.
        collisions: ids that share a row, and how many functions there are; at least 1.
        hidden: width of the functions' hidden layer; None: they are matrices, without biases.
        base_dim: columns of the rows; None: D.
        name: of the table of rows.
        pooling: "sum" or "mean".
        format: of the rows, as in ``rk.EmbeddingConfig``.
        device, optimizer, rounding, seed: as ``rk.EmbeddingCollection``'s.
        bounds_check: what an id out of range does: "error" (IndexError on the CPU; left out on a GPU, where nobody is
            told) or "ignore" (left out).

    ``rows`` is the ``rk.EmbeddingCollection`` of the one table. The functions are float32 parameters for the optimizer
    of the dense parameters: ``weight`` [collisions, D, base_dim]; or ``hidden_weight`` [collisions, hidden, base_dim],
    ``hidden_bias`` [collisions, hidden], ``weight`` [collisions, D, hidden] and ``bias`` [collisions, D]. How many ids
    each function has is asked of the device: on a GPU a forward waits once.

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
        optimizer=None,
        bounds_check: str = "error",
        rounding: str = "stochastic",
        seed: int = 0,
    ) -> None:
        super().__init__()
        base_dim = embedding_dim if base_dim is None else base_dim
        sizes = {"num_embeddings": num_embeddings, "embedding_dim": embedding_dim, "collisions": collisions}
        for size, value in (sizes | {"base_dim": base_dim, "hidden": 1 if hidden is None else hidden}).items():
            if value < 1:
                raise ValueError(f"{size} = {value} must be at least 1")
        check_choice("pooling", pooling, ("sum", "mean"))
        check_choice("bounds_check", bounds_check, ("error", "ignore"))
        self.num_embeddings, self.embedding_dim, self.hidden = num_embeddings, embedding_dim, hidden
        self.pooling, self.bounds_check = pooling, bounds_check
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
            return nn.Parameter(torch.zeros(self.collisions, *shape, device=device))

        hidden = self.hidden
        self.weight = parameter(self.embedding_dim, base_dim if hidden is None else hidden)
        if hidden is not None:
            self.hidden_weight, self.hidden_bias = parameter(hidden, base_dim), parameter(hidden)
            self.bias = parameter(self.embedding_dim)
        for k in range(self.collisions):
            if hidden is None:
                nn.init.orthogonal_(self.weight.data[k])  # keeps the variance of rows, and tells ids apart
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
        values, offsets, weights, bad = check_bags(features, self.num_embeddings, self.bounds_check)
        good = ~bad
        ids, found = torch.unique(values[good].long(), return_inverse=True)
        places = torch.full_like(values, -1, dtype=torch.int64)  # no row of the vectors: left out
        places[good] = found
        options = {"pooling": self.pooling, "bounds_check": "ignore"}
        return _ops.embedding_bag(self._vectors(ids), places, offsets, weights, **options)[0]

    def _vectors(self, ids: Tensor) -> Tensor:
        """[U, D] of ascending ids, so that those of one function are side by side."""
        each = torch.arange(len(ids) + 1, device=ids.device)
        rows = self.rows.rows(KeyedJaggedTensor(self.rows.feature_names, ids, offsets=each))
        sizes = torch.bincount(ids // self.buckets, minlength=self.collisions).tolist()
        vectors = [self._function(k, part) for k, part in enumerate(rows.split(sizes)) if len(part)]
        return torch.cat(vectors) if vectors else rows.new_zeros(0, self.embedding_dim)

    def _function(self, k: int, rows: Tensor) -> Tensor:
        if self.hidden is None:
            return rows @ self.weight[k].t()
        hidden = torch.addmm(self.hidden_bias[k], rows, self.hidden_weight[k].t()).relu()
        return torch.addmm(self.bias[k], hidden, self.weight[k].t())

    def extra_repr(self) -> str:
        """Sizes, for printing."""
        function = "matrices" if self.hidden is None else f"perceptrons of {self.hidden} hidden"
        return f"{self.num_embeddings} x {self.embedding_dim}, {self.collisions} {function}, {self.pooling}"
