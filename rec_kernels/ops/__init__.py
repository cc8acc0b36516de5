"""The ops: each file holds one op's public function, its fake (shape) kernel and its autograd formula."""

from rec_kernels import _library  # noqa: F401  (registers the schemas that the imports below need)
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
