// Rows that several samples share: pooled bags of deduplicated features, or their gradients (Bags::groups of
// embedding_bag/bags.h).
#pragma once

#include "embedding_bag/cuda/input.cuh"

namespace rec_kernels {

// Buffer of shared rows with the columns of the output [B, output_dim] or its gradient. Groups have disjoint columns,
// so they share the rows of one buffer. Empty if the input has no groups.
class SharedRows {
 public:
  // `type`: dtype of the elements. Reports indices in `inverse` that are out of range. Keeps a reference to the input.
  SharedRows(const BagInput& in, ScalarType type, int64_t* status, cudaStream_t stream);

  // The value of Bags::shared_rows; null without groups.
  void* rows() const { return memory_ ? memory_->mutable_data_ptr() : nullptr; }
  // Copies each pooled bag to the rows of `output` whose samples use it; zeros for an index out of range.
  void expand(void* output) const;
  // Sums the gradients `grad` of the samples that use each bag; ignores samples whose index is out of range.
  void sum(const float* grad) const;

 private:
  const BagInput& in_;
  int64_t element_bytes_;
  const int64_t* status_;
  cudaStream_t stream_;
  OptionalTensor memory_, sizes_, column_groups_;  // empty without groups
};

}  // namespace rec_kernels
