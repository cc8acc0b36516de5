// Registers for row formats (core/lanes.h): GCC and Clang vectors of the width of Vec, so that the same source compiles
// for every instruction set; intrinsics only where compilers generate poor code.
#pragma once

#include <string.h>

#include "core/cpu/simd.h"
#include "core/lanes.h"

namespace rec_kernels {
inline namespace RK_ISA {

constexpr int kLanes = W;

typedef float FloatLanes __attribute__((vector_size(4 * kLanes)));
typedef uint32_t WordLanes __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntLanes __attribute__((vector_size(4 * kLanes)));
typedef uint64_t DoubleWords __attribute__((vector_size(4 * kLanes)));
typedef uint8_t ByteLanes __attribute__((vector_size(kLanes)));
typedef uint8_t HalfByteLanes __attribute__((vector_size(kLanes / 2)));
typedef uint16_t ShortLanes __attribute__((vector_size(2 * kLanes)));

// Permutation: lane i is lane from[i] of x, or of the concatenation of x and y. Clang vectorizes loops of constant
// length, and has no builtin for permutations chosen at run time.
template <class V, class U>
RK_HOST_DEVICE V shuffle(V x, U from) {
#if defined(__clang__)
  V out;
  for (int i = 0; i < static_cast<int>(sizeof(V) / sizeof x[0]); ++i) out[i] = x[from[i]];
  return out;
#else
  return __builtin_shuffle(x, from);
#endif
}
template <class V, class U>
RK_HOST_DEVICE V shuffle(V x, V y, U from) {
#if defined(__clang__)
  constexpr int kCount = static_cast<int>(sizeof(V) / sizeof x[0]);
  V out;
  for (int i = 0; i < kCount; ++i) out[i] = from[i] < kCount ? x[from[i] % kCount] : y[from[i] % kCount];
  return out;
#else
  return __builtin_shuffle(x, y, from);
#endif
}

template <>
struct LanesOf<FloatLanes> {
  using Word = WordLanes;
  RK_HOST_DEVICE static WordLanes bits(FloatLanes x) { return (WordLanes)x; }
  RK_HOST_DEVICE static WordLanes to_word(FloatLanes whole) {
    return (WordLanes) __builtin_convertvector(whole, IntLanes);
  }
  RK_HOST_DEVICE static WordLanes to_nearest_word(FloatLanes x) {
#if defined(__AVX512F__)
    return (WordLanes)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
    return (WordLanes)_mm256_cvtps_epi32((__m256)x);
#else
    return (WordLanes)(x + 12582912.0f) - 0x4B400000u;
#endif
  }
  RK_HOST_DEVICE static FloatLanes fused(FloatLanes a, FloatLanes b, FloatLanes c) {
    return (FloatLanes)fused_multiply_add(Vec{a}, Vec{b}, Vec{c}).v;
  }
#if defined(__AVX512F__)
  RK_HOST_DEVICE static WordLanes to_half(FloatLanes x) {
    return (WordLanes)_mm512_cvtepu16_epi32(_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
  }
#elif RK_CONVERTS_HALVES
  RK_HOST_DEVICE static WordLanes to_half(FloatLanes x) {
    return (WordLanes)_mm256_cvtepu16_epi32(_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
  }
#endif
  RK_HOST_DEVICE static FloatLanes larger(FloatLanes a, FloatLanes b) {
    return (FloatLanes)RK_ISA::larger(Vec{a}, Vec{b}).v;
  }
  RK_HOST_DEVICE static FloatLanes smaller(FloatLanes a, FloatLanes b) {
    return (FloatLanes)RK_ISA::smaller(Vec{a}, Vec{b}).v;
  }
};

template <>
struct LanesOf<WordLanes> {
  using Float = FloatLanes;
  RK_HOST_DEVICE static FloatLanes number(WordLanes bits) { return (FloatLanes)bits; }
  RK_HOST_DEVICE static FloatLanes to_float(WordLanes word) {
    return __builtin_convertvector((IntLanes)word, FloatLanes);
  }
#if defined(__AVX512F__)
  RK_HOST_DEVICE static FloatLanes from_half(WordLanes bits) {
    return (FloatLanes)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)bits));
  }
#elif RK_CONVERTS_HALVES
  RK_HOST_DEVICE static FloatLanes from_half(WordLanes bits) {
    const auto words = (__m256i)bits;
    return (FloatLanes)_mm256_cvtph_ps(
        _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
  }
#endif
};

template <class V>
RK_HOST_DEVICE V load_as(const void* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}
template <class V>
RK_HOST_DEVICE void store_as(void* p, V v) {
  memcpy(p, &v, sizeof v);
}

// Intrinsics, since GCC converts widths through memory. Stored codes are below 2^8 or 2^16.
#if defined(__AVX512F__)
RK_HOST_DEVICE WordLanes load_bytes(const uint8_t* p) { return (WordLanes)_mm512_cvtepu8_epi32(load_as<__m128i>(p)); }
RK_HOST_DEVICE WordLanes load_shorts(const uint8_t* p) { return (WordLanes)_mm512_cvtepu16_epi32(load_as<__m256i>(p)); }
RK_HOST_DEVICE void store_bytes(uint8_t* p, WordLanes v) { store_as(p, _mm512_cvtepi32_epi8((__m512i)v)); }
RK_HOST_DEVICE void store_shorts(uint8_t* p, WordLanes v) { store_as(p, _mm512_cvtepi32_epi16((__m512i)v)); }
#elif defined(__AVX2__)
RK_HOST_DEVICE WordLanes load_bytes(const uint8_t* p) {
  return (WordLanes)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(load_as<int64_t>(p)));
}
RK_HOST_DEVICE WordLanes load_shorts(const uint8_t* p) { return (WordLanes)_mm256_cvtepu16_epi32(load_as<__m128i>(p)); }
RK_HOST_DEVICE __m128i shorts_of(WordLanes v) {
  const auto words = (__m256i)v;
  return _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}
RK_HOST_DEVICE void store_bytes(uint8_t* p, WordLanes v) {
  const __m128i shorts = shorts_of(v);
  store_as(p, _mm_cvtsi128_si64(_mm_packus_epi16(shorts, shorts)));
}
RK_HOST_DEVICE void store_shorts(uint8_t* p, WordLanes v) { store_as(p, shorts_of(v)); }
#else
RK_HOST_DEVICE WordLanes load_bytes(const uint8_t* p) {
  return __builtin_convertvector(load_as<ByteLanes>(p), WordLanes);
}
RK_HOST_DEVICE WordLanes load_shorts(const uint8_t* p) {
  return __builtin_convertvector(load_as<ShortLanes>(p), WordLanes);
}
RK_HOST_DEVICE void store_bytes(uint8_t* p, WordLanes v) { store_as(p, __builtin_convertvector(v, ByteLanes)); }
RK_HOST_DEVICE void store_shorts(uint8_t* p, WordLanes v) { store_as(p, __builtin_convertvector(v, ShortLanes)); }
#endif

// first, first + step, first + 2 * step, ... in 64-bit lanes.
RK_HOST_DEVICE DoubleWords double_word_ramp(uint64_t step) {
  DoubleWords ramp;
  for (int i = 0; i < kLanes / 2; ++i) ramp[i] = step * static_cast<uint64_t>(i);
  return ramp;
}
// Loads the first `count` values at p, 1 <= count <= lanes, and repeats the last one in the remaining lanes. Uses
// one load and a shuffle: a vector load of values just stored one by one would stall on store forwarding.
RK_HOST_DEVICE DoubleWords load_first(const int64_t* p, int count) {
#if defined(__AVX512F__)
  const auto x = (DoubleWords)_mm512_maskz_loadu_epi64(static_cast<__mmask8>((1u << count) - 1u), p);
#else
  DoubleWords x = {};
  for (int i = 0; i < kLanes / 2; ++i) x[i] = static_cast<uint64_t>(p[i < count ? i : 0]);
#endif
  const DoubleWords last = DoubleWords{} + static_cast<uint64_t>(count - 1), ramp = double_word_ramp(1);
  return shuffle(x, ramp < last ? ramp : last);
}
RK_HOST_DEVICE WordLanes word_ramp() {
  WordLanes ramp;
  for (int i = 0; i < kLanes; ++i) ramp[i] = static_cast<uint32_t>(i);
  return ramp;
}

// Unpacks kBits of `packed` per lane, low bits first; kBits <= 4, so that a register takes at most 64 bits.
template <int kBits>
RK_HOST_DEVICE WordLanes unpack(uint64_t packed) {
  constexpr uint64_t kMask = (uint64_t{1} << kBits) - 1;
  if constexpr (kBits * kLanes <= 32)
    return ((WordLanes{} + static_cast<uint32_t>(packed)) >> (word_ramp() * uint32_t{kBits})) & uint32_t{kMask};
#if defined(__AVX512F__)
  const auto two = (DoubleWords)_mm512_cvtepu8_epi64(_mm_cvtsi64_si128(static_cast<int64_t>(packed)));
#else
  const DoubleWords two = (DoubleWords{} + packed) >> double_word_ramp(2 * kBits);
#endif
  return (WordLanes)((two | two << (32 - kBits)) & (DoubleWords{} + (kMask << 32 | kMask)));
}

#if defined(__AVX512F__)
RK_HOST_DEVICE uint64_t low_bytes(DoubleWords v) {
  return static_cast<uint64_t>(_mm_cvtsi128_si64(_mm512_cvtepi64_epi8((__m512i)v)));
}
#elif defined(__AVX2__)
RK_HOST_DEVICE uint64_t low_bytes(DoubleWords v) {
  const __m128i low = _mm256_castsi256_si128((__m256i)v), high = _mm256_extracti128_si256((__m256i)v, 1);
  const __m128i words =
      _mm_castps_si128(_mm_shuffle_ps(_mm_castsi128_ps(low), _mm_castsi128_ps(high), _MM_SHUFFLE(2, 0, 2, 0)));
  const __m128i each = _mm_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  return static_cast<uint64_t>(_mm_cvtsi128_si64(_mm_shuffle_epi8(words, each)));
}
#else
RK_HOST_DEVICE uint64_t low_bytes(DoubleWords v) {
  const auto bytes = __builtin_convertvector(v, HalfByteLanes);
  uint64_t packed = 0;
  memcpy(&packed, &bytes, sizeof bytes);
  return packed;
}
#endif

// The inverse of unpacking: every lane must be below 2^kBits.
template <int kBits>
RK_HOST_DEVICE uint64_t pack(WordLanes codes) {
#if defined(__AVX512F__)
  if constexpr (kBits == 1) return _mm512_test_epi32_mask((__m512i)codes, (__m512i)codes);
#elif defined(__AVX2__)
  if constexpr (kBits == 1)
    return static_cast<uint64_t>(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_slli_epi32((__m256i)codes, 31))));
#endif
  const DoubleWords pairs = (DoubleWords)codes;
  uint64_t packed = low_bytes(pairs | (pairs >> (32 - kBits)));
  if constexpr (kBits < 4) {  // merge adjacent codes, then adjacent pairs, ...
    constexpr uint64_t kShort = (uint64_t{1} << 4 * kBits) - 1, kWord = (uint64_t{1} << 8 * kBits) - 1;
    packed = (packed | packed >> (8 - 2 * kBits)) & (0x0001000100010001u * kShort);
    packed = (packed | packed >> (16 - 4 * kBits)) & (0x0000000100000001u * kWord);
    packed = (packed | packed >> (32 - 8 * kBits)) & ((uint64_t{1} << 16 * kBits) - 1);
  }
  return packed;
}

// Selects one of two words for each pair of lanes by the pair's bit, low bits first.
RK_HOST_DEVICE WordLanes choose_by_bit(uint32_t bits, uint32_t if_clear, uint32_t if_set) {
  const WordLanes own = (WordLanes{} + bits) >> (word_ramp() >> 1);
#if defined(__AVX512F__)
  const __m512i table = _mm512_set1_epi64(static_cast<int64_t>(uint64_t{if_set} << 32 | if_clear));
  return (WordLanes)_mm512_permutexvar_epi32((__m512i)own, table);
#elif defined(__AVX2__)
  const __m256i table = _mm256_set1_epi64x(static_cast<int64_t>(uint64_t{if_set} << 32 | if_clear));
  return (WordLanes)_mm256_permutevar8x32_epi32(table, (__m256i)own);
#else
  return (own & 1u) != 0u ? WordLanes{} + if_set : WordLanes{} + if_clear;
#endif
}

// Stores four registers of 8-bit or 4-bit codes at p.
template <int kBits>
RK_HOST_DEVICE void store_four(uint8_t* p, const WordLanes* v) {
#if defined(__AVX512F__)
  const __m512i first = _mm512_packus_epi32((__m512i)v[0], (__m512i)v[1]);
  const __m512i second = _mm512_packus_epi32((__m512i)v[2], (__m512i)v[3]);
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i bytes = _mm512_permutexvar_epi32(order, _mm512_packus_epi16(first, second));
  if constexpr (kBits == 8) return store_as(p, bytes);
  store_as(p, _mm512_cvtepi16_epi8(_mm512_maddubs_epi16(bytes, _mm512_set1_epi16(0x1001))));
#elif defined(__AVX2__)
  const __m256i first = _mm256_packus_epi32((__m256i)v[0], (__m256i)v[1]);
  const __m256i second = _mm256_packus_epi32((__m256i)v[2], (__m256i)v[3]);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(first, second), order);
  if constexpr (kBits == 8) return store_as(p, bytes);
  const __m256i pairs = _mm256_maddubs_epi16(bytes, _mm256_set1_epi16(0x1001));
  store_as(p, _mm_packus_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1)));
#else
  for (int i = 0; i < 4; ++i) {
    if constexpr (kBits == 8) store_bytes(p + i * kLanes, v[i]);
    else store_as(p + i * kLanes / 2, static_cast<uint16_t>(pack<4>(v[i])));
  }
#endif
}

// Each lane's neighbour in its pair: lanes 1, 0, 3, 2, ...
RK_HOST_DEVICE WordLanes swap_pairs(WordLanes x) {
  const DoubleWords two = (DoubleWords)x;
  return (WordLanes)((two << 32) | (two >> 32));
}

RK_HOST_DEVICE WordLanes larger_word(WordLanes a, WordLanes b) { return a > b ? a : b; }

// True if a comparison holds in some lane.
RK_HOST_DEVICE bool any_lane(IntLanes mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)mask) != 0;
#else
  bool any = false;
  for (int i = 0; i < kLanes; ++i) any |= mask[i] != 0;
  return any;
#endif
}

// Swaps lanes at a distance of kWidth, a power of two.
template <int kWidth, class V>
RK_HOST_DEVICE V swap_lanes(V x) {
  WordLanes from;
  for (int i = 0; i < kLanes; ++i) from[i] = static_cast<uint32_t>(i ^ kWidth);
  return shuffle(x, from);
}

// Reduces all lanes with the commutative choose(a, b); every lane of the result has the value.
template <int kWidth = kLanes / 2, class V, class Choose>
RK_HOST_DEVICE V reduce_lanes(V x, const Choose& choose) {
  x = choose(x, swap_lanes<kWidth>(x));
  if constexpr (kWidth > 1) return reduce_lanes<kWidth / 2>(x, choose);
  else return x;
}

RK_HOST_DEVICE uint32_t largest_lane(WordLanes x) {
  return reduce_lanes(x, [](WordLanes a, WordLanes b) { return larger_word(a, b); })[0];
}

// The products of the low halves of 64-bit lanes.
RK_HOST_DEVICE DoubleWords multiply_low_halves(DoubleWords a, DoubleWords b) {
#if defined(__AVX512F__)
  return (DoubleWords)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (DoubleWords)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return (DoubleWords)_mm_mul_epu32((__m128i)a, (__m128i)b);
#else
  return (a & 0xFFFFFFFFu) * (b & 0xFFFFFFFFu);
#endif
}

RK_HOST_DEVICE DoubleWords xor_three(DoubleWords a, DoubleWords b, DoubleWords c) {
#if defined(__AVX512F__)
  return (DoubleWords)_mm512_ternarylogic_epi64((__m512i)a, (__m512i)b, (__m512i)c, 0x96);
#else
  return a ^ b ^ c;
#endif
}

// Interleaves two registers, a0 b0 a1 b1 ..., into lower and upper halves.
RK_HOST_DEVICE void weave(DoubleWords a, DoubleWords b, DoubleWords* lower, DoubleWords* upper) {
  DoubleWords low, high;
  constexpr int kHalf = kLanes / 4, kAll = kLanes / 2;
  for (int i = 0; i < kAll; ++i) {
    low[i] = static_cast<uint64_t>(i / 2 + i % 2 * kAll);
    high[i] = static_cast<uint64_t>(kHalf + i / 2 + i % 2 * kAll);
  }
  *lower = shuffle(a, b, low);
  *upper = shuffle(a, b, high);
}

}  // namespace RK_ISA
}  // namespace rec_kernels
