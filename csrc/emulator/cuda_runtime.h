// The subset of CUDA's API that our kernels use, for g++. Test-only: see emulator/block.h.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "emulator/block.h"
#include "emulator/races.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline  // not forced, to save compile time
#define __restrict__ __restrict
#define __launch_bounds__(...)
// The emulator could not reset static shared memory to NaN for every block, so kernels use shared_memory<T>() of
// core/cuda/launch.h.
#define __shared__ static_assert(false, "use shared_memory<T>()");

struct Index3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
extern Index3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

struct alignas(16) float4 {
  float x, y, z, w;
};
inline void __stwb(float4* p, float4 x) { std::memcpy(static_cast<void*>(p), &x, sizeof x); }
template <class T>
T __ldg(const T* p) {
  return *p;
}
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

inline void* __cvta_global_to_generic(size_t address) { return reinterpret_cast<void*>(address); }

using cudaStream_t = void*;

namespace rec_kernels::emulator {

template <class T>
uint64_t to_bits(T value) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}

template <class T>
T from_bits(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Returns the value of lane `from`. As in CUDA, a lane outside the caller's segment of `width` lanes returns the
// caller's own value.
template <class T>
T exchange(const char* what, unsigned mask, T value, int from, int width) {
  const uint64_t* values = sync_lanes(what, mask, to_bits(value));
  const int first = lane() / width * width;
  if (from < first || from >= first + width) return value;
  if (!(mask >> from & 1)) fail("%s from lane %d, which mask 0x%08x excludes", what, from, mask);
  return from_bits<T>(values[from]);
}

}  // namespace rec_kernels::emulator

template <class T>
T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
  const int first = rec_kernels::emulator::lane() / width * width;
  return rec_kernels::emulator::exchange("__shfl_sync", mask, value, first + (from & (width - 1)), width);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  return rec_kernels::emulator::exchange("__shfl_xor_sync", mask, value, rec_kernels::emulator::lane() ^ bits, width);
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
  const uint64_t* votes = rec_kernels::emulator::sync_lanes("__ballot_sync", mask, predicate != 0);
  unsigned out = 0;
  for (int lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1) out |= static_cast<unsigned>(votes[lane]) << lane;
  return out;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
  const uint64_t* values = rec_kernels::emulator::sync_lanes("__reduce_max_sync", mask, value);
  uint64_t most = 0;
  for (int lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1 && values[lane] > most) most = values[lane];
  return static_cast<unsigned>(most);
}
inline void __syncwarp(unsigned mask = 0xffffffffu) { rec_kernels::emulator::sync_lanes("__syncwarp", mask, 0, true); }
inline void __syncthreads() { rec_kernels::emulator::sync_block(); }

// One thread runs at a time: a plain read and write is atomic. A race is at the caller, so none of these is inlined.
#define RK_ATOMIC __attribute__((no_sanitize("thread"), noinline))
namespace rec_kernels::emulator {
template <class T>
__attribute__((no_sanitize("thread"), always_inline)) inline void note_atomic(T* p) {
  check_access(p, sizeof(T), AccessKind::kAtomic, __builtin_return_address(0));
}
}  // namespace rec_kernels::emulator

template <class T, class U>
RK_ATOMIC T atomicAdd(T* p, U value) {
  rec_kernels::emulator::note_atomic(p);
  const T before = *p;
  *p = before + static_cast<T>(value);
  return before;
}
template <class T, class U>
RK_ATOMIC T atomicMin(T* p, U value) {
  rec_kernels::emulator::note_atomic(p);
  const T before = *p;
  if (static_cast<T>(value) < before) *p = static_cast<T>(value);
  return before;
}
template <class T, class U>
RK_ATOMIC T atomicExch(T* p, U value) {
  rec_kernels::emulator::note_atomic(p);
  const T before = *p;
  *p = static_cast<T>(value);
  return before;
}
template <class T>
RK_ATOMIC T atomicCAS(T* p, T expected, T value) {
  rec_kernels::emulator::note_atomic(p);
  const T before = *p;
  if (before == expected) *p = value;
  return before;
}
