// Products of matrices of one sample, which are small enough for the L1 cache.
//
// A tile of sums stays in registers while its terms are accumulated: each term loads a few registers of the right
// matrix and multiplies them by broadcast elements of the left one.
#pragma once

#include "core/cpu/simd.h"

namespace rec_kernels {
inline namespace RK_ISA {

// `count` rounded up to whole registers.
RK_HOST_DEVICE int64_t padded(int64_t count) { return ceil_div(count, W) * W; }

// out [rows, columns] = left [rows, terms] times right [terms, columns]. Every sum starts at +0 and adds terms in
// ascending order, sum = fmaf(left, right, sum).
struct SmallProduct {
  const float* left;  // element [r, t] is left[r * down + t * across]
  int64_t down, across;
  const float* right;  // rows of whole registers: columns after the last one are also read
  int64_t right_stride;
  int64_t terms;
  float *first, *others;  // rows 0, and 1, 2, ... of the result
  int64_t out_stride;
};

// Maximum tile width in registers, and tile rows per width: sums and operands use all registers, and enough independent
// sums hide latency.
#if defined(__AVX512F__)
constexpr int kProductAcross = 4;
constexpr int kProductDown[] = {0, 14, 10, 8, 6};
#else
constexpr int kProductAcross = 2;
constexpr int kProductDown[] = {0, 8, 6};
#endif

// Position of a tile in the result: first row and column, and lanes of its last register.
struct ProductPlace {
  int64_t row, column;
  int lanes;
};

// kPacked: rows of left are adjacent elements, down is 1.
template <int N, int kRows, bool kPacked>
void product_tile(const SmallProduct& p, ProductPlace at) {
  Vec sum[kRows][N], operand[N];
  for (int r = 0; r < kRows; ++r)
    for (int n = 0; n < N; ++n) sum[r][n] = Vec::broadcast(0.0f);
  const float *left = p.left + at.row * p.down, *right = p.right + at.column;
  for (int64_t t = 0; t < p.terms; ++t, left += p.across, right += p.right_stride) {
    for (int n = 0; n < N; ++n) operand[n] = Vec::load(right + n * W);
    for (int r = 0; r < kRows; ++r) {
      const Vec factor = Vec::broadcast(left[kPacked ? r : r * p.down]);
      for (int n = 0; n < N; ++n) sum[r][n] = fused_multiply_add(factor, operand[n], sum[r][n]);
    }
  }
  float* next = p.others + at.row * p.out_stride + at.column;  // of row at.row + 1
  float* to = at.row == 0 ? p.first + at.column : next - p.out_stride;
  for (int r = 0; r < kRows; ++r, to = next, next += p.out_stride) {
    for (int n = 0; n < N - 1; ++n) sum[r][n].store(to + n * W);
    if (at.lanes == W) sum[r][N - 1].store(to + (N - 1) * W);
    else sum[r][N - 1].store_partial(to + (N - 1) * W, at.lanes);
  }
}

template <int N, int kRows, bool kPacked>
RK_HOST_DEVICE void product_rows(const SmallProduct& p, ProductPlace at, int64_t rows) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return product_rows<N, kRows - 1, kPacked>(p, at, rows);
  }
  product_tile<N, kRows, kPacked>(p, at);
}

// Computes all rows of some columns, in tiles of about equal height.
template <int N, bool kPacked>
RK_HOST_DEVICE void product_columns(const SmallProduct& p, ProductPlace at, int registers, int64_t rows) {
  if constexpr (N > 1) {
    if (registers < N) return product_columns<N - 1, kPacked>(p, at, registers, rows);
  }
  constexpr int kMost = kProductDown[N];
  const int64_t each = ceil_div(rows, ceil_div(rows, kMost));
  for (; at.row < rows; at.row += each)
    product_rows<N, kMost, kPacked>(p, at, rows - at.row < each ? rows - at.row : each);
}

inline void multiply(const SmallProduct& p, int64_t rows, int64_t columns) {
  constexpr int64_t kColumns = kProductAcross * W;
  for (int64_t c = 0; c < columns; c += kColumns) {
    const int64_t here = columns - c < kColumns ? columns - c : kColumns;
    const int registers = static_cast<int>(ceil_div(here, W));
    const int lanes = static_cast<int>(here) - (registers - 1) * W;
    if (p.down == 1) product_columns<kProductAcross, true>(p, {0, c, lanes}, registers, rows);
    else product_columns<kProductAcross, false>(p, {0, c, lanes}, registers, rows);
  }
}

}  // namespace RK_ISA
}  // namespace rec_kernels
