// What pooling rows of floats and encoded rows have in common.
#pragma once

#include "cpu/embedding_bag.h"

namespace rec_kernels {
inline namespace RK_ISA {

// Ids between a row's prefetch and its use: about 8 KiB of rows in flight covers DRAM latency at D = 128; more evicts
// them again from the first-level cache before they are used.
RK_HOST_DEVICE int64_t prefetch_distance(int64_t row_bytes) {
  const int64_t rows = 8192 / row_bytes;
  return rows < 8 ? 8 : (rows > 64 ? 64 : rows);
}

// Columns come in blocks: a bad id is counted with the first.
RK_HOST_DEVICE void note_bad(Bounds* bounds, int64_t column, int64_t position) {
  if (column != 0) return;
  if (position < bounds->position) bounds->position = position;
  ++bounds->skipped;
}

}  // namespace RK_ISA
}  // namespace rec_kernels
