// Rows that samples share: of the bags of features in groups, or of their gradients (Bags::groups of
// embedding_bag/bags.h).
#pragma once

#include <vector>

#include "core/cpu/scratch.h"
#include "embedding_bag/cpu/input.h"

namespace rec_kernels {

// Memory for shared rows beside the rows [B, output_dim] of an output or its gradient, with the same columns; the
// columns of a group are its own, so that all groups have the same rows. None, where the input has no groups.
class SharedRows {
 public:
  // Takes the bytes of an element. Points to the input, which must outlive it.
  SharedRows(const BagInput& in, int64_t element_bytes);

  // Bags::shared_rows. Null where no group has a bag.
  void* rows() const { return memory_.get(); }
  // Writes pooled bags to `output`, in the rows of the samples that have them.
  void expand(void* output) const;
  // The sums of the samples' gradients `grad`.
  void sum(const float* grad) const;

 private:
  // Columns that lie side by side, of features of one group.
  struct Columns {
    int64_t group, begin, count;
  };
  std::vector<Columns> columns_of_groups() const;

  const BagInput& in_;
  int64_t bytes_;
  Scratch<uint8_t> memory_;
};

}  // namespace rec_kernels
