// Rows that samples share: of the bags of features in groups, or of their gradients (Bags::groups of
// embedding_bag/bags.h).
#pragma once

#include "embedding_bag/cuda/input.cuh"

namespace rec_kernels {

// Memory for shared rows beside the rows [B, output_dim] of an output or its gradient, with the same columns; the
// columns of a group are its own, so that all groups have the same rows. None, where the input has no groups.
class SharedRows {
 public:
  // Takes the elements' `type`. Notes numbers of `inverse` that are out of range. Keeps the input's address.
  SharedRows(const BagInput& in, ScalarType type, int64_t* status, cudaStream_t stream);

  // Bags::shared_rows. Null without groups.
  void* rows() const { return memory_ ? memory_->mutable_data_ptr() : nullptr; }
  // Writes pooled bags to `output`, in the rows of the samples that have them; zeros for one out of range.
  void expand(void* output) const;
  // The sums of the samples' gradients `grad`, without those out of range.
  void sum(const float* grad) const;

 private:
  const BagInput& in_;
  int64_t element_bytes_;
  const int64_t* status_;
  cudaStream_t stream_;
  OptionalTensor memory_, sizes_, column_groups_;  // none without groups
};

}  // namespace rec_kernels
