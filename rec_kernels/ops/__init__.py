"""The ops: one file each, with what the op means, its fake (shape) kernel and its autograd formula."""

from rec_kernels import _library  # noqa: F401  (the schemas must be registered before what follows)
from rec_kernels.ops import (  # noqa: F401
    dot_interaction,
    embedding_bag,
    embedding_bag_autograd,
    expand,
    factorization_machine,
    fake_quantize,
    flops,
    grouped_projection,
    jagged_bucketize,
    jagged_dedup,
    jagged_index_select,
    jagged_overlaps,
    jagged_permute,
    jagged_windows,
    row_cache,
    row_formats,
    scale_rows,
    version_counters,
)
