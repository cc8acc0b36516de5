// Four adjacent floats of a row, which a lane of a CUDA kernel reads and writes at once.
#pragma once

#include "core/cuda/launch.h"

namespace rec_kernels {
inline namespace RK_ISA {

struct Vec4 {
  float v[4];
};

// True if rows of `columns` floats starting at `first` can be accessed 16 bytes at a time.
__device__ __forceinline__ bool rows_aligned(const float* first, int64_t columns) {
  return columns % 4 == 0 && reinterpret_cast<uintptr_t>(first) % 16 == 0;
}

// row[c .. c+3]; columns at or beyond `columns` are 0. `aligned`: rows_aligned() of the row's table.
__device__ __forceinline__ Vec4 load_columns(const float* row, int64_t c, int64_t columns, bool aligned) {
  Vec4 out = {{0.0f, 0.0f, 0.0f, 0.0f}};
  if (c >= columns) return out;
  if (aligned) {
    check_alignment(row + c, 16);
    const float4 f = *reinterpret_cast<const float4*>(row + c);
    return {{f.x, f.y, f.z, f.w}};
  }
  check_alignment(row, sizeof(float));
  for (int j = 0; j < 4; ++j)
    if (c + j < columns) out.v[j] = row[c + j];
  return out;
}

__device__ __forceinline__ void store_columns(float* row, int64_t c, int64_t columns, bool aligned, const Vec4& x) {
  if (c >= columns) return;
  if (aligned) {
    check_alignment(row + c, 16);
    // An intrinsic, because nvcc would merge the stores of an assignment with those below.
    __stwb(reinterpret_cast<float4*>(row + c), make_float4(x.v[0], x.v[1], x.v[2], x.v[3]));
    return;
  }
  check_alignment(row, sizeof(float));
  for (int j = 0; j < 4; ++j)
    if (c + j < columns) row[c + j] = x.v[j];
}

// Prefetches the line at p; never faults.
__device__ __forceinline__ void prefetch(const void* p) {
#if defined(__CUDA_ARCH__)
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
#else
  (void)p;
#endif
}

}  // namespace RK_ISA
}  // namespace rec_kernels
