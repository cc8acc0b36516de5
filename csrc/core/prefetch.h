// Software prefetching.
#pragma once

#include <cstdint>

#include "core/host_device.h"

namespace rec_kernels {

RK_HOST_DEVICE void prefetch_line(const void* p) {
  __builtin_prefetch(p, 0, 3);
  // GCC considers a function that only prefetches as having no effect and drops calls; this makes it have one.
  asm volatile("");
}

// Prefetches the cache lines of `bytes` bytes at p. Never faults, whatever p is. Avoids branches that depend on the
// alignment of p, and loops over few lines, which would be mispredicted.
RK_HOST_DEVICE void prefetch_bytes(const void* p, int64_t bytes) {
  constexpr int64_t kLine = 64, kFewLines = 4;
  const auto first = reinterpret_cast<uintptr_t>(p);
  const int64_t last = bytes - 1;
  const auto ask = [=](int64_t at) {
    prefetch_line(reinterpret_cast<const void*>(first + static_cast<uintptr_t>(at < last ? at : last)));
  };
  if (bytes <= kLine) {
    ask(0);
  } else if (bytes <= kFewLines * kLine) {
    for (int64_t k = 0; k < kFewLines; ++k) ask(k * kLine);
  } else {
    for (int64_t at = 0; at < bytes; at += kLine) ask(at);
  }
  ask(last);
}

}  // namespace rec_kernels
