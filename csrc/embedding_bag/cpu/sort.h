// The occurrences of an embedding_bag call, table by table and sorted by row: what every backward starts from.
#pragma once

#include <vector>

#include "core/cpu/scratch.h"
#include "embedding_bag/cpu/backward.h"
#include "embedding_bag/cpu/input.h"

namespace rec_kernels {

struct Occurrences {
  std::vector<TableRuns> tables;     // in the order of their rows
  std::vector<int64_t> part_tables;  // of each part: its table
  int payload_bits = 0;
  Scratch<uint64_t> entries;    // sorted: row << payload_bits | payload
  Scratch<uint64_t> other;      // what sorting needs; then, as int64, where the runs of every table start
  Scratch<uint32_t> bag_of;     // payload -> bag; null: the payload is the bag
  Scratch<float> coefficients;  // payload -> coefficient; null: 1
  int64_t count = 0, num_runs = 0;
  int64_t num_floats = 0;  // of row gradients
};

// Throws for bad offsets and, when the caller asked for it, for bad ids.
// Where gradients lie in `grad` is noted; nothing is read there.
Occurrences sort_occurrences(const BagInput& in, const Tensor& grad);

}  // namespace rec_kernels
