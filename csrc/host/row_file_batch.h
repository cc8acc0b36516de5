// A batch of blocks to load into the window of a row file, and the victims they evict.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <vector>

#include "host/row_file.h"

namespace rec_kernels::host {

// A block to be read or evicted.
struct Move {
  int64_t block;
  int64_t frame = -1;     // target of a read
  int64_t slot = -1;      // log slot to read from or write to; -1: read from the main file, or evict without writing
  uint32_t checksum = 0;  // expected checksum of a read, or checksum of what was written
  bool done = false;      // read or written successfully
};

struct RowFile::Batch {
  std::vector<Move> reads, victims;  // sorted by block; at most as many victims as reads
  size_t reads_per_chunk = 1;
  bool in_background = false;
  std::atomic<bool> cancelled{false};
  int64_t chunks_left = 0;   // guarded by mutex_
  std::exception_ptr error;  // the first error; guarded by mutex_

  int64_t num_chunks() const { return static_cast<int64_t>((reads.size() + reads_per_chunk - 1) / reads_per_chunk); }
  size_t first_read_of(int64_t chunk) const {
    return std::min(static_cast<size_t>(chunk) * reads_per_chunk, reads.size());
  }
  // Victims are distributed in proportion to reads, so that no chunk has more victims than reads.
  size_t first_victim_of(int64_t chunk) const { return victims.size() * first_read_of(chunk) / reads.size(); }
};

}  // namespace rec_kernels::host
