// Plain-pointer kernels of scale_rows, one function table per instruction set (core/cpu/isa.h).
#pragma once

#include <cstdint>

#include "core/cpu/isa.h"

namespace rec_kernels {

struct ScaleRowsKernels {
  // out[n, :] = scale[n] * x[n, :] for n in [begin, end); rows of `columns` floats.
  void (*scale_rows)(const float* x, const float* scale, float* out, int64_t columns, int64_t begin, int64_t end);
  // out[n] = dot(a[n, :], b[n, :]) for n in [begin, end).
  void (*row_dot)(const float* a, const float* b, float* out, int64_t columns, int64_t begin, int64_t end);

  template <CpuIsa>
  static const ScaleRowsKernels table;
};

}  // namespace rec_kernels
