// Rows that several samples share: pooled bags of deduplicated features, or their gradients (Bags::groups of
// embedding_bag/bags.h).
#pragma once

#include <vector>

#include "core/cpu/scratch.h"
#include "embedding_bag/cpu/input.h"

namespace rec_kernels {

// Buffer of shared rows with the columns of the output [B, output_dim] or its gradient. Groups have disjoint columns,
// so they share the rows of one buffer. Empty if the input has no groups.
class SharedRows {
 public:
  // element_bytes: size of an output element. Keeps a reference to the input.
  SharedRows(const BagInput& in, int64_t element_bytes);

  // The value of Bags::shared_rows; null if no group has a bag.
  void* rows() const { return memory_.get(); }
  // Copies each pooled bag to the rows of `output` whose samples use it.
  void expand(void* output) const;
  // Sums the gradients `grad` of the samples that use each bag.
  void sum(const float* grad) const;

 private:
  // Adjacent columns of features of one group.
  struct Columns {
    int64_t group, begin, count;
  };
  std::vector<Columns> columns_of_groups() const;

  const BagInput& in_;
  int64_t bytes_;
  Scratch<uint8_t> memory_;
};

}  // namespace rec_kernels
