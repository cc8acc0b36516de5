// The occurrences of an embedding_bag call, table by table and sorted by row: what every backward starts from.
#pragma once

#include <memory>
#include <vector>

#include "cpu/embedding_bag_backward.h"
#include "cpu/embedding_bag_input.h"

namespace rec_kernels {

struct Occurrences {
  std::vector<TableRuns> tables;        // in the order of their rows
  std::vector<int64_t> feature_tables;  // of each feature: its table
  int payload_bits = 0;
  std::unique_ptr<uint64_t[]> entries;    // sorted: row << payload_bits | payload
  std::unique_ptr<int64_t[]> starts;      // of the runs of every table
  std::unique_ptr<uint32_t[]> bag_of;     // payload -> bag; null: the payload is the bag
  std::unique_ptr<float[]> coefficients;  // payload -> coefficient; null: 1
  int64_t count = 0, num_runs = 0;
  int64_t num_floats = 0;  // of row gradients
};

// Throws for features that share a part of a table, for bad offsets and, when the caller asked for it, for bad ids.
Occurrences sort_occurrences(const BagInput& in);

}  // namespace rec_kernels
