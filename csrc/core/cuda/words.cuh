// Copies of rows in words to which both addresses are aligned.
#pragma once

#include "core/cuda/launch.h"

namespace rec_kernels {
inline namespace RK_ISA {

template <class Word>
__device__ __forceinline__ Word load_word(const void* from, int64_t i) {
  const Word* p = static_cast<const Word*>(from) + i;
  check_alignment(p, sizeof(Word));
  return *p;
}
template <class Word>
__device__ __forceinline__ void store_word(void* to, int64_t i, Word x) {
  Word* p = static_cast<Word*>(to) + i;
  check_alignment(p, sizeof(Word));
  *p = x;
}

}  // namespace RK_ISA

// Size of the widest word that divides row_bytes and to which both addresses are aligned.
inline int64_t word_bytes(int64_t row_bytes, const void* from, const void* to) {
  const uint64_t all =
      static_cast<uint64_t>(row_bytes) | reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to) | 16;
  return static_cast<int64_t>(all & -all);
}

// Calls body(word) with a value of the word type of this size.
template <class Body>
void with_word(int64_t bytes, const Body& body) {
  if (bytes == 16) body(float4{});
  else if (bytes == 8) body(uint64_t{});
  else if (bytes == 4) body(uint32_t{});
  else if (bytes == 2) body(uint16_t{});
  else body(uint8_t{});
}

}  // namespace rec_kernels
