// Numbers as bits.
#pragma once

#include <cstdint>

namespace rec_kernels {

// Bits needed to write every number in [0, n].
inline int bit_width(uint64_t n) { return n == 0 ? 0 : 64 - __builtin_clzll(n); }

}  // namespace rec_kernels
