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

// Asks for the cache lines of `bytes` bytes at p. Never faults, whatever p is. Neither where p lies in its line nor a
// loop over few lines decides anything here: the processor would guess wrong, and what it did since would be lost.
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
