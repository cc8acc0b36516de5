// Plain-pointer kernels of grouped_projection, one function table per instruction set (core/cpu/isa.h).
//
// Forward and input gradient are the same kind of product: columns of the result are sums of terms, rows times a
// matrix. The columns are split into panels, and matrices are packed per panel. The weight gradient uses the same
// panels.
#pragma once

#include <cstdint>

#include "core/cpu/isa.h"
#include "embedding_bag/bags.h"

namespace rec_kernels {

// Columns per panel: four of the widest registers. Rows are padded with zeros to whole registers.
constexpr int64_t kPanelColumns = 64, kPanelPadding = 16;
// Samples per chunk, and chunks per second-level chunk (docs/numerics.md, "Row gradients").
constexpr int64_t kSampleChunk = kChunk;

struct ProjectionTerm {
  int64_t column;  // first column of x
  int64_t depth;   // number of columns of x; 0: the identity, which reads the panel's columns
  float* matrix;   // [depth, padded]
};

struct ProjectionPanel {
  int64_t column, columns, padded;  // of the result
  int64_t first_term, last_term;
};

// Some columns of a group's block and all columns of the group: a part of W_g. Sums after `columns` are undefined.
struct GradientPanel {
  int64_t x_column, depth;
  int64_t grad_column, columns, padded;
  int64_t sums;     // where its [depth, padded] sums begin
  int64_t weights;  // where its rows of W_g, [columns, depth], begin
};

struct GroupedProjectionKernels {
  // out = sum of the panel's terms of x, for the columns of `count` panels and `rows` rows, `step` rows at a time.
  void (*project)(const ProjectionPanel* panels, int64_t count, const ProjectionTerm* terms, const float* x,
                  int64_t x_stride, float* out, int64_t out_stride, int64_t rows, int64_t step);
  // sums[k, c] = chunk sums of x[:, k] * grad[:, c] over `samples` rows, at most kSampleChunk^2, added in their order.
  void (*weight_sums)(const GradientPanel* panels, int64_t count, const float* x, int64_t x_stride, const float* grad,
                      int64_t grad_stride, int64_t samples, float* sums);

  template <CpuIsa>
  static const GroupedProjectionKernels table;
};

}  // namespace rec_kernels
