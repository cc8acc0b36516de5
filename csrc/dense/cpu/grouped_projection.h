// Plain-pointer kernels of grouped_projection, one table per instruction set (core/cpu/isa.h).
//
// Forward and input gradient are one product: columns of the result are sums of terms, rows times a matrix. It comes in
// panels, matrices packed for them. The gradient of the weights goes by the same panels of the result's columns.
#pragma once

#include <cstdint>

#include "core/cpu/isa.h"
#include "embedding_bag/bags.h"

namespace rec_kernels {

// Columns of a panel: four of the widest registers. Behind the last column its rows are padded with zeros to whole
// ones.
constexpr int64_t kPanelColumns = 64, kPanelPadding = 16;
// Samples of a chunk, and chunks of a chunk of chunks: docs/numerics.md, "Row gradients".
constexpr int64_t kSampleChunk = kChunk;

struct ProjectionTerm {
  int64_t column;  // the first one it reads
  int64_t depth;   // how many; 0: the identity, which reads the panel's columns
  float* matrix;   // [depth, panel's padded]
};

struct ProjectionPanel {
  int64_t column, columns, padded;  // of the result
  int64_t first_term, last_term;
};

// Some columns of a group's block, and all of the group's: a part of W_g. Sums behind `columns` may be anything.
struct GradientPanel {
  int64_t x_column, depth;
  int64_t grad_column, columns, padded;
  int64_t sums;     // where its [depth, padded] sums begin
  int64_t weights;  // where its rows of W_g, [columns, depth], begin
};

struct GroupedProjectionKernels {
  // Columns of `count` panels of `rows` rows: out = sum of the panel's terms of x. `step` rows of all panels at a time.
  void (*project)(const ProjectionPanel* panels, int64_t count, const ProjectionTerm* terms, const float* x,
                  int64_t x_stride, float* out, int64_t out_stride, int64_t rows, int64_t step);
  // sums[k, c] = chunk sums of x[:, k] * grad[:, c] over `samples` rows, at most kSampleChunk^2, added in their order.
  void (*weight_sums)(const GradientPanel* panels, int64_t count, const float* x, int64_t x_stride, const float* grad,
                      int64_t grad_stride, int64_t samples, float* sums);

  template <CpuIsa>
  static const GroupedProjectionKernels table;
};

}  // namespace rec_kernels
