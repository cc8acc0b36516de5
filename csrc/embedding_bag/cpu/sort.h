// The occurrences of ids in an embedding_bag call, grouped by table and sorted by row: the input of every backward.
#pragma once

#include <vector>

#include "core/cpu/scratch.h"
#include "embedding_bag/cpu/backward.h"
#include "embedding_bag/cpu/input.h"

namespace rec_kernels {

struct Occurrences {
  std::vector<TableRuns> tables;     // ordered by linear rows
  std::vector<int64_t> part_tables;  // table index per part
  int payload_bits = 0;
  Scratch<uint64_t> entries;    // sorted: row << payload_bits | payload
  Scratch<uint64_t> other;      // second sort buffer, reused as the int64 run starts of every table
  Scratch<uint32_t> bag_of;     // payload -> bag; null: the payload is the bag
  Scratch<float> coefficients;  // payload -> coefficient; null: 1
  int64_t count = 0, num_runs = 0;
  int64_t num_floats = 0;  // total size of all row gradients
};

// Throws for bad offsets and, with bounds_check "error", for bad ids. Stores pointers into `grad` without reading it.
Occurrences sort_occurrences(const BagInput& in, const Tensor& grad);

}  // namespace rec_kernels
