// Macros for code that CPU and CUDA kernels share, and the namespace that it is compiled into.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define RK_HOST_DEVICE __host__ __device__ __forceinline__
#elif defined(RK_EMULATED)
#define RK_HOST_DEVICE inline  // compiling counts there, not speed
#else
#define RK_HOST_DEVICE inline __attribute__((always_inline))
#endif

// CPU kernels are compiled once per instruction set. Without a namespace for each, the linker would keep only one copy
// of each inline function, and might run AVX-512 code on a machine without it.
#ifndef RK_ISA
#define RK_ISA baseline
#endif

namespace rec_kernels {
inline namespace RK_ISA {

RK_HOST_DEVICE float fused_multiply_add(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return fmaf(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

RK_HOST_DEVICE float square_root(float x) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(x);
#else
  return __builtin_sqrtf(x);
#endif
}

// Index of the lowest set bit of a non-zero integer.
RK_HOST_DEVICE int lowest_bit(uint64_t x) {
#if defined(__CUDA_ARCH__)
  return __ffsll(static_cast<long long>(x)) - 1;
#else
  return __builtin_ctzll(x);
#endif
}

RK_HOST_DEVICE int count_bits(uint32_t x) {
#if defined(__CUDA_ARCH__)
  return __popc(x);
#else
  return __builtin_popcount(x);
#endif
}

RK_HOST_DEVICE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Binary search: the first integer in [low, high) for which the monotonic predicate is true, or `high`.
#if defined(__CUDACC__)
#pragma nv_exec_check_disable
#endif
template <class Behind>
RK_HOST_DEVICE int64_t first_behind(int64_t low, int64_t high, const Behind& behind) {
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (behind(middle)) high = middle;
    else low = middle + 1;
  }
  return low;
}

}  // namespace RK_ISA
}  // namespace rec_kernels
