// Plain-pointer forward kernels of embedding_bag, one table of them per instruction set (core/cpu_isa.h), and the
// structs that the driver (embedding_bag.cpp) fills for them.
#pragma once

#include "core/cpu_isa.h"
#include "ops/bags.h"

namespace rec_kernels {

// What one worker found out of range. `position` as in BadPosition (ops/embedding_bag.h), the smallest.
struct Bounds {
  int64_t position = kNoBadPosition;
  int64_t skipped = 0;
};

// Rows that are read from a cache: that of id i starts at rows[parts[part].cache_row_offset + slots[i] * D], unless
// slots[i] is -1.
struct CachedPool {
  const float* rows;
  const TablePart* parts;
  const int64_t* slots;  // null: there is no cache
};

struct PoolArgs {
  const Part* parts;
  Bags bags;
  const uint8_t* weights;
  void* output;
  int64_t output_dim;
  RowFormat output_format;  // kFp32, kFp16 or kBf16: of its elements
  CachedPool cache;
};

struct EmbeddingBagKernels {
  // Pools bags [begin, end) of all F * B.
  void (*pool)(const PoolArgs&, int64_t begin, int64_t end, Bounds*);
  // out[i] = gradient of per_sample_weights[i] for the ids of bags [begin, end).
  void (*weight_gradient)(const PoolArgs&, const float* grad, float* out, int64_t begin, int64_t end, Bounds*);

  template <CpuIsa>
  static const EmbeddingBagKernels table;
};

}  // namespace rec_kernels
