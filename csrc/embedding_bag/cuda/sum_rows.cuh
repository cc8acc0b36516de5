// Segment sums of rows on the GPU: the gradients of the samples that share a row, in the order of docs/numerics.md.
#pragma once

#include "embedding_bag/cuda/sort.cuh"
#include "jagged/jagged.h"

namespace rec_kernels {

// Row indices [groups, count] to sum by. Indices of group g outside of [0, sizes[g]) are ignored; sizes[g] <= rows.
struct RowNumbers {
  Integers numbers;
  int64_t groups, count, rows;
  const int64_t* sizes;  // per group; null: all are `rows`
};

// out[u, c] = the sum of grad[i, c] over all i whose index is u in the group of column c; zero without any. Both have
// `columns` floats per row. Rows u >= sizes[group] are not written.
struct RowSums {
  const float* grad;
  int64_t columns;
  const int32_t* column_groups;  // [columns]: group per column, -1: none; null: all are in group 0
  float* out;
};

// Bytes moved: every gradient read, every sum written, and the passes of sorting the indices.
void sum_rows(const RowNumbers& numbers, const RowSums& sums, const Tensor& like, cudaStream_t stream);

}  // namespace rec_kernels
