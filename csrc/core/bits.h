// Bit width and bit mixing of integers.
#pragma once

#include "core/host_device.h"

namespace rec_kernels {

// Bits needed to represent every integer in [0, n].
inline int bit_width(uint64_t n) { return n == 0 ? 0 : 64 - __builtin_clzll(n); }

// MurmurHash3's finalizer (Austin Appleby, public domain): every bit of the result depends on every bit of h.
RK_HOST_DEVICE uint64_t fmix64(uint64_t h) {
  h = (h ^ (h >> 33)) * UINT64_C(0xFF51AFD7ED558CCD);
  h = (h ^ (h >> 33)) * UINT64_C(0xC4CEB9FE1A85EC53);
  return h ^ (h >> 33);
}

}  // namespace rec_kernels
