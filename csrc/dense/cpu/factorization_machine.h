// Plain-pointer kernels of factorization_machine, one function table per instruction set (core/cpu/isa.h).
#pragma once

#include <cstdint>

#include "core/cpu/isa.h"

namespace rec_kernels {

struct FactorizationShape {
  int64_t F, D, K;
};

// Samples, `stride` floats apart, each contiguous. With stride 0 all samples share the memory.
template <class Float>
struct SampleRows {
  Float* first;
  int64_t stride;
  Float* operator[](int64_t sample) const { return first + sample * stride; }
};

struct FactorizationMachineKernels {
  // Scratch floats of the forward, and of the backward.
  int64_t (*forward_scratch)(const FactorizationShape& shape);
  void (*forward)(const FactorizationShape& shape, SampleRows<const float> x, SampleRows<const float> y,
                  SampleRows<float> out, int64_t samples, float* scratch);
  int64_t (*backward_scratch)(const FactorizationShape& shape);
  // Accumulates into the gradients of y.
  void (*backward)(const FactorizationShape& shape, SampleRows<const float> grad, SampleRows<const float> x,
                   SampleRows<const float> y, SampleRows<float> grad_x, SampleRows<float> grad_y, int64_t samples,
                   float* scratch);

  template <CpuIsa>
  static const FactorizationMachineKernels table;
};

}  // namespace rec_kernels
