// Mixing of 64 bits: every bit of the result depends on every bit of the number.
#pragma once

#include "core/host_device.h"

namespace rec_kernels {

// MurmurHash3's finalizer (Austin Appleby, public domain).
RK_HOST_DEVICE uint64_t fmix64(uint64_t h) {
  h = (h ^ (h >> 33)) * UINT64_C(0xFF51AFD7ED558CCD);
  h = (h ^ (h >> 33)) * UINT64_C(0xC4CEB9FE1A85EC53);
  return h ^ (h >> 33);
}

}  // namespace rec_kernels
