// Blocks of registers that hold columns of float rows.
#pragma once

#include "core/cpu/simd.h"

namespace rec_kernels {
inline namespace RK_ISA {

constexpr int kBlockVecs = 8;
constexpr int kBlock = kBlockVecs * W;

template <bool kPartial>
RK_HOST_DEVICE Vec load_columns(const float* p, int tail) {
  return kPartial ? Vec::load_partial(p, tail) : Vec::load(p);
}

// Calls each.block<NV, kTail>(column, tail) for every block of columns of a row.
template <class Each>
RK_HOST_DEVICE void for_blocks(int64_t D, const Each& each) {
  for (int64_t column = 0; column < D; column += kBlock) {
    const int64_t here = D - column < kBlock ? D - column : kBlock;
    const int tail = static_cast<int>(here % W);
    switch (2 * ((here + W - 1) / W) + (tail != 0)) {
      case 2:
        each.template block<1, false>(column, tail);
        break;
      case 3:
        each.template block<1, true>(column, tail);
        break;
      case 4:
        each.template block<2, false>(column, tail);
        break;
      case 5:
        each.template block<2, true>(column, tail);
        break;
      case 6:
        each.template block<3, false>(column, tail);
        break;
      case 7:
        each.template block<3, true>(column, tail);
        break;
      case 8:
        each.template block<4, false>(column, tail);
        break;
      case 9:
        each.template block<4, true>(column, tail);
        break;
      case 10:
        each.template block<5, false>(column, tail);
        break;
      case 11:
        each.template block<5, true>(column, tail);
        break;
      case 12:
        each.template block<6, false>(column, tail);
        break;
      case 13:
        each.template block<6, true>(column, tail);
        break;
      case 14:
        each.template block<7, false>(column, tail);
        break;
      case 15:
        each.template block<7, true>(column, tail);
        break;
      case 16:
        each.template block<8, false>(column, tail);
        break;
      default:
        each.template block<8, true>(column, tail);
        break;
    }
  }
}

template <int NV, bool kTail>
RK_HOST_DEVICE void store_columns(const Vec* v, float* out, int tail) {
  for (int i = 0; i < NV - 1; ++i) v[i].store(out + i * W);
  if (kTail) v[NV - 1].store_partial(out + (NV - 1) * W, tail);
  else v[NV - 1].store(out + (NV - 1) * W);
}

template <int NV, bool kTail>
RK_HOST_DEVICE void load_row(const float* from, int tail, Vec* v) {
  for (int i = 0; i < NV - 1; ++i) v[i] = Vec::load(from + i * W);
  v[NV - 1] = load_columns<kTail>(from + (NV - 1) * W, tail);
}

// Calls body(column, n) for every register of a row; the last one may have fewer than W columns.
template <class Body>
RK_HOST_DEVICE void for_vectors(int64_t D, const Body& body) {
  for (int64_t c = 0; c < D; c += W) body(c, static_cast<int>(D - c < W ? D - c : W));
}
RK_HOST_DEVICE Vec load_vector(const float* p, int n) { return n == W ? Vec::load(p) : Vec::load_partial(p, n); }
RK_HOST_DEVICE void store_vector(Vec v, float* p, int n) {
  if (n == W) v.store(p);
  else v.store_partial(p, n);
}

// Body of for_blocks: x = fmaf(factor, y, x).
struct AddScaled {
  Vec factor;
  const float* y;
  float* x;

  template <int NV, bool kTail>
  RK_HOST_DEVICE void block(int64_t column, int tail) const {
    Vec sum[NV], other[NV];
    load_row<NV, kTail>(x + column, tail, sum);
    load_row<NV, kTail>(y + column, tail, other);
    for (int v = 0; v < NV; ++v) sum[v] = fused_multiply_add(factor, other[v], sum[v]);
    store_columns<NV, kTail>(sum, x + column, tail);
  }
};

// x = fmaf(factor, y, x); y may be x.
__attribute__((noinline)) inline void add_scaled(float factor, const float* y, int64_t D, float* x) {
  for_blocks(D, AddScaled{Vec::broadcast(factor), y, x});
}

}  // namespace RK_ISA
}  // namespace rec_kernels
