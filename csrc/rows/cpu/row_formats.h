// Plain-pointer kernels of row formats, indexed by RowFormat; one function table per instruction set (core/cpu/isa.h).
#pragma once

#include <cstdint>

#include "core/cpu/isa.h"
#include "core/philox.h"
#include "rows/formats/format_list.h"

namespace rec_kernels {

// Destination of encoded rows: consecutive rows at `rows`, where `first` is the row index of the first one; or rows
// numbers[i] of the table that starts at `rows`.
struct RowPlaces {
  uint8_t* rows;
  int64_t first;
  const int64_t* numbers;  // or null

  RK_HOST_DEVICE int64_t number(int64_t n) const { return numbers ? numbers[n] : first + n; }
  RK_HOST_DEVICE uint8_t* row(int64_t n, int64_t row_bytes) const {
    return rows + (numbers ? numbers[n] : n) * row_bytes;
  }
};

struct RowFormatKernels {
  // Encodes the rows of x [N, D]. Returns the first row that the format cannot encode because of a NaN or Inf, or N.
  // Such a row decodes to NaN.
  using EncodeRows = int64_t (*)(const float* x, int64_t N, int64_t D, const RowRounding&, const RowPlaces&);
  // Decodes N consecutive rows into out [N, D].
  using DecodeRows = void (*)(const uint8_t* rows, int64_t N, int64_t D, float* out);

  EncodeRows nearest[kNumRowFormats];
  EncodeRows stochastic[kNumRowFormats];
  DecodeRows decode[kNumRowFormats];

  template <CpuIsa>
  static const RowFormatKernels table;
};

}  // namespace rec_kernels
