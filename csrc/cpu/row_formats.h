// Plain-pointer kernels of row formats, one table per instruction set (core/cpu_isa.h), by number of RowFormat.
#pragma once

#include <cstdint>

#include "core/cpu_isa.h"
#include "core/philox.h"
#include "formats/format_list.h"

namespace rec_kernels {

struct RowFormatKernels {
  // Writes the row of x [D]. Returns false if the format has no code for a NaN or Inf in it: the row then reads as NaN.
  using Encode = bool (*)(const float* x, int64_t D, const RowRounding&, int64_t row_number, uint8_t* row);
  // Writes the rows of x [N, D], one after the other. Returns the first that Encode returns false for, or N.
  using EncodeRows = int64_t (*)(const float* x, int64_t N, int64_t D, const RowRounding&, int64_t first_row_number,
                                 uint8_t* rows);
  using Decode = void (*)(const uint8_t* row, int64_t D, float* out);

  Encode nearest[kNumRowFormats];
  Encode stochastic[kNumRowFormats];
  EncodeRows rows_nearest[kNumRowFormats];
  EncodeRows rows_stochastic[kNumRowFormats];
  Decode decode[kNumRowFormats];

  template <CpuIsa>
  static const RowFormatKernels table;
};

}  // namespace rec_kernels
