// Sums of rows by number: the gradients of the samples that share a row, in the order of docs/numerics.md.
#pragma once

#include "core/cpu/scratch.h"
#include "jagged/jagged.h"

namespace rec_kernels {

// Places 0, 1, ... of the gradient by the row that they are summed into: those of row u are order[starts[u]] up to
// order[starts[u + 1]]; without an order, they are in it as they are.
struct RowOrder {
  Scratch<int64_t> starts, order;

  const int64_t* of(int64_t place) const { return order ? order.get() + place : nullptr; }
};

// Sorts `count` numbers in [0, rows), with at most so many workers: 1 inside work that is shared out already.
RowOrder order_by_row(const Integers& numbers, int64_t count, int64_t rows, int64_t most_workers = INT64_MAX);

// out[u] = the sum of the rows of `grad` whose number is u, for u in [0, rows); zeros if there are none. The first
// `columns` floats of rows that are grad_stride and out_stride floats apart.
void sum_rows(const float* grad, int64_t grad_stride, const RowOrder& sorted, int64_t rows, int64_t columns, float* out,
              int64_t out_stride);

// Sums `count` >= 1 rows, `stride` floats apart, in chunks of kChunk, then the chunks' sums, and so on. It works in
// place, as the sum of a chunk lands on a row that has been read; `out` may be the first row.
void sum_chunks(float* sums, int64_t count, int64_t columns, int64_t stride, float* out);

}  // namespace rec_kernels
