// Rows that samples share: of the bags of features in groups, or of their gradients (Bags::groups of ops/bags.h).
#pragma once

#include "cuda/embedding_bag.cuh"

namespace rec_kernels {

// Memory for shared rows beside the rows [B, output_dim] of an output or its gradient, with the same columns; the
// columns of a group are its own, so that all groups have the same rows. None, where the input has no groups.
class SharedRows {
 public:
  // `rows`: the output or its gradient. Notes numbers of `inverse` that are out of range. Keeps the input's address.
  SharedRows(const BagInput& in, const void* rows, ScalarType type, int64_t* status, cudaStream_t stream);

  // Bags::row_shifts: kernels find the memory as so many rows from `rows` on. Null without groups.
  const int64_t* row_shifts() const { return shifts_ ? shifts_->const_data_ptr<int64_t>() : nullptr; }
  // From pooled bags to the rows of the samples that have them; zeros for one out of range.
  void expand() const;
  // The sums of the samples' gradients, without those out of range.
  void sum() const;

 private:
  const BagInput& in_;
  void* rows_;
  int64_t element_bytes_, rows_away_ = 0;
  const int64_t* status_;
  cudaStream_t stream_;
  OptionalTensor memory_, shifts_, sizes_, column_groups_;  // none without groups
};

}  // namespace rec_kernels
