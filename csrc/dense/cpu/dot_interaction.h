// Plain-pointer kernels of dot_interaction, one function table per instruction set (core/cpu/isa.h).
#pragma once

#include <cstdint>

#include "core/cpu/isa.h"

namespace rec_kernels {

struct InteractionShape {
  int64_t F, D;
  bool self_interaction;
};

// Samples at these strides. The elements of each sample are contiguous: dense [D], sparse [F, D] and the result, or its
// gradient, [D + pairs].
template <class Float>
struct InteractionRows {
  Float* dense;
  int64_t dense_stride;
  Float* sparse;
  int64_t sparse_stride;
  bool far = false;  // the samples exceed the cache: prefetch the following ones
};

struct DotInteractionKernels {
  // Scratch floats of the forward, and of the backward.
  int64_t (*forward_scratch)(const InteractionShape& shape);
  void (*forward)(const InteractionShape& shape, const InteractionRows<const float>& in, float* out, int64_t out_stride,
                  int64_t samples, float* scratch);
  int64_t (*backward_scratch)(const InteractionShape& shape);
  void (*backward)(const InteractionShape& shape, const InteractionRows<const float>& in, const float* grad,
                   int64_t grad_stride, const InteractionRows<float>& out, int64_t samples, float* scratch);

  template <CpuIsa>
  static const DotInteractionKernels table;
};

}  // namespace rec_kernels
