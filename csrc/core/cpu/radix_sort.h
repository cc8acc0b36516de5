// Occurrences of rows, sorted: the first half of every deterministic backward. Integer work only.
#pragma once

#include <cstdint>

#include "core/bits.h"

namespace rec_kernels {

// Stable radix sort of entries `row << payload_bits | payload`, rows below 2^row_bits, by up to `workers` threads.
// Two buffers of `count` entries: they start out in `first_buffer` and end up in `sorted`.
class RowSort {
 public:
  RowSort(int64_t count, int row_bits, int payload_bits);

  // The one of the two buffers that the entries must be written to.
  uint64_t* first_buffer(uint64_t* sorted, uint64_t* other) const { return passes_ % 2 ? other : sorted; }
  void sort(uint64_t* sorted, uint64_t* other, int64_t workers) const;

 private:
  int64_t count_;
  int row_bits_, payload_bits_, passes_;
};

// Writes where the runs of one row begin in entries[0, count), counted from `base`, and base + count behind the last:
// at most count + 1 numbers. Returns the number of runs.
int64_t find_runs(const uint64_t* entries, int64_t count, int payload_bits, int64_t base, int64_t* starts,
                  int64_t workers);

}  // namespace rec_kernels
