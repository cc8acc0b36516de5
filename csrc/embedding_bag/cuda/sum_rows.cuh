// Sums of rows by number on the GPU: the gradients of the samples that share a row, in the order of docs/numerics.md.
#pragma once

#include "embedding_bag/cuda/sort.cuh"
#include "jagged/jagged.h"

namespace rec_kernels {

// Numbers of `count` rows each, one group of them after the other: [G, M], those of group g in [0, sizes[g]). The
// others are left out. No number is above `rows`.
struct RowNumbers {
  Integers numbers;
  int64_t groups, count, rows;
  const int64_t* sizes;  // null: rows
};

// out[u, c] = the sum of grad[i, c] over the i whose number is u, in the group of column c; zeros if there is none.
// Both have `columns` floats a row. Not written where u is not below the size of the group.
struct RowSums {
  const float* grad;
  int64_t columns;
  const int32_t* column_groups;  // [columns]: -1: of none; null: all are of group 0
  float* out;
};

// Bytes moved: every gradient read, every sum written; of numbers, what sorting them takes.
void sum_rows(const RowNumbers& numbers, const RowSums& sums, const Tensor& like, cudaStream_t stream);

}  // namespace rec_kernels
