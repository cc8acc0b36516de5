// Memory that is asked for before it is needed.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace rec_kernels {

RK_HOST_DEVICE void prefetch_line(const void* p) {
  __builtin_prefetch(p, 0, 3);
  // A function that only prefetches has no effect in GCC's eyes, and calls of it are dropped: this one has.
  asm volatile("");
}

// Asks for the cache lines of `bytes` bytes at p. Never faults, whatever p is. Where p lies in its line decides nothing
// here: rows that begin anywhere would make the processor guess wrong.
RK_HOST_DEVICE void prefetch_bytes(const void* p, int64_t bytes) {
  const auto first = reinterpret_cast<uintptr_t>(p);
  for (int64_t i = 0; i < bytes; i += 64)
    prefetch_line(reinterpret_cast<const void*>(first + static_cast<uintptr_t>(i)));
  prefetch_line(reinterpret_cast<const void*>(first + static_cast<uintptr_t>(bytes - 1)));
}

}  // namespace rec_kernels
