// Plain-pointer forward kernels of embedding_bag, one table of them per instruction set (core/cpu/isa.h), and the
// structs that the driver (forward.cpp) fills for them.
#pragma once

#include "core/cpu/isa.h"
#include "embedding_bag/bags.h"

namespace rec_kernels {

// Out-of-range ids that one worker found. `position` as in BadPosition (embedding_bag/embedding_bag.h), the smallest.
struct Bounds {
  int64_t position = kNoBadPosition;
  int64_t skipped = 0;
};

// Sums of so many floats wait in a kernel's own memory to be rounded to the elements of the output.
constexpr int64_t kWaiting = 2048;

struct PoolArgs : Lookup {
  const Part* parts;
  const TablePart* records;   // of the parts; null: one table without a layout
  float* wide_sum = nullptr;  // a worker's memory for the sum of one bag that has more than kWaiting columns
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
