// Interface between the driver of embedding_bag's forward (forward.cpp) and its plain-pointer kernels, one function
// table per instruction set (core/cpu/isa.h).
#pragma once

#include "core/cpu/isa.h"
#include "embedding_bag/bags.h"

namespace rec_kernels {

// Result of one worker's bounds checks. `position` is the smallest bad one, as in BadPosition
// (embedding_bag/embedding_bag.h).
struct Bounds {
  int64_t position = kNoBadPosition;
  int64_t skipped = 0;
};

// Size in floats of the stack buffer for FP32 sums that are rounded to a half-precision output.
constexpr int64_t kSumBuffer = 2048;

struct PoolArgs : Lookup {
  const Part* parts;
  const TablePart* records;   // layout records of the parts; null: one table without a layout
  float* wide_sum = nullptr;  // per-worker buffer for the sum of a bag of more than kSumBuffer columns
};

struct EmbeddingBagKernels {
  // Pools bags [begin, end), counted over all features.
  void (*pool)(const PoolArgs&, int64_t begin, int64_t end, Bounds*);
  // out[i] = gradient of per_sample_weights[i] for the ids of bags [begin, end).
  void (*weight_gradient)(const PoolArgs&, const float* grad, float* out, int64_t begin, int64_t end, Bounds*);

  template <CpuIsa>
  static const EmbeddingBagKernels table;
};

}  // namespace rec_kernels
