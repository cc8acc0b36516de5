// Stable radix sort of occurrences by row, the integer part of every deterministic backward.
#pragma once

#include <cstdint>

#include "core/bits.h"

namespace rec_kernels {

// Sorts entries `row << payload_bits | payload`, rows below 2^row_bits, with up to `workers` threads. Uses two buffers
// of `count` entries: the input is in `first_buffer`, the result in `sorted`.
class RowSort {
 public:
  RowSort(int64_t count, int row_bits, int payload_bits);

  // The buffer that the entries must be written to.
  uint64_t* first_buffer(uint64_t* sorted, uint64_t* other) const { return passes_ % 2 ? other : sorted; }
  void sort(uint64_t* sorted, uint64_t* other, int64_t workers) const;

 private:
  int64_t count_;
  int row_bits_, payload_bits_, passes_;
};

// Writes the start of each run of equal rows in entries [0, count), plus `base`, followed by base + count: at most
// count + 1 values. Returns the number of runs.
int64_t find_runs(const uint64_t* entries, int64_t count, int payload_bits, int64_t base, int64_t* starts,
                  int64_t workers);

}  // namespace rec_kernels
