// Blocks that go into the window of a row file, and those that make room for them.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <vector>

#include "host/row_file.h"

namespace rec_kernels::host {

// A block on its way.
struct Move {
  int64_t block;
  int64_t frame = -1;  // of a block that is read
  int64_t slot = -1;   // in the log, to read it from or write it to; -1: read from the main file, or not to be written
  uint32_t checksum = 0;  // expected of what is read; of what was written
  bool done = false;      // was read, was written
};

struct RowFile::Batch {
  std::vector<Move> reads, victims;  // in the order of the blocks; no more victims than reads
  size_t reads_per_chunk = 1;
  bool in_background = false;
  std::atomic<bool> cancelled{false};
  int64_t chunks_left = 0;   // guarded by mutex_
  std::exception_ptr error;  // the first; guarded by mutex_

  int64_t num_chunks() const { return static_cast<int64_t>((reads.size() + reads_per_chunk - 1) / reads_per_chunk); }
  size_t first_read(int64_t chunk) const {
    return std::min(static_cast<size_t>(chunk) * reads_per_chunk, reads.size());
  }
  // Victims are proportional to reads, so that no chunk has more victims than reads.
  size_t first_victim(int64_t chunk) const { return victims.size() * first_read(chunk) / reads.size(); }
};

}  // namespace rec_kernels::host
