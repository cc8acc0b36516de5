// Occurrences of rows, sorted: the first half of every deterministic backward. Integer work only.
#pragma once

#include <cstdint>
#include <memory>

namespace rec_kernels {

// Entries are `row << payload_bits | payload`. Sorting is stable in the order the entries were written.
struct RowSort {
  std::unique_ptr<uint64_t[]> entries;
  std::unique_ptr<int64_t[]> starts;  // run r is entries [starts[r], starts[r + 1])
  int payload_bits = 0;
  int64_t num_runs = 0;
};

// Sorts entries[0, count) by row, rows below 2^row_bits. The first `valid` of the sorted entries become runs; entries
// that are to be left out carry a row above every valid one.
RowSort sort_rows(std::unique_ptr<uint64_t[]> entries, int64_t count, int64_t valid, int row_bits, int payload_bits);

// Bits needed to write every number in [0, n].
int bit_width(uint64_t n);

}  // namespace rec_kernels
