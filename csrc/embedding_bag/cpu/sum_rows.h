// Segment sums of rows: the gradients of the samples that share a row, in the order of docs/numerics.md.
#pragma once

#include "core/cpu/scratch.h"
#include "jagged/jagged.h"

namespace rec_kernels {

// Gradient rows grouped by the output row that they are summed into: output row u sums gradient rows
// order[starts[u]], ..., order[starts[u + 1] - 1]. Without an order, gradient rows are already sorted.
struct RowOrder {
  Scratch<int64_t> starts, order;

  const int64_t* from(int64_t position) const { return order ? order.get() + position : nullptr; }
};

// Sorts `count` row indices in [0, rows) with at most max_workers threads; 1 if the caller is already parallel.
RowOrder order_by_row(const Integers& indices, int64_t count, int64_t rows, int64_t max_workers = INT64_MAX);

// out[u] = the sum of the rows of `grad` with index u, for u in [0, rows); zeros without any. Only the first `columns`
// floats of each row are used; strides are in floats.
void sum_rows(const float* grad, int64_t grad_stride, const RowOrder& sorted, int64_t rows, int64_t columns, float* out,
              int64_t out_stride);

// Sums `count` >= 1 rows, `stride` floats apart, hierarchically in chunks of kChunk. Chunk sums overwrite rows of
// `sums` that have already been read; `out` may be the first row.
void sum_chunks(float* sums, int64_t count, int64_t columns, int64_t stride, float* out);

}  // namespace rec_kernels
