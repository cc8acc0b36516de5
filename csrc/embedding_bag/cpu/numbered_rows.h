// Gathers and sums of rows by index, for expand and for deduplicated bags: plain-pointer kernels, one function table
// per instruction set (core/cpu/isa.h).
#pragma once

#include <cstdint>

#include "core/cpu/isa.h"

namespace rec_kernels {

struct NumberedRowsKernels {
  // Gather: out[i] = rows[indices[i]] for i in [begin, end). Copies `bytes` bytes of each row; rows are `stride` bytes
  // apart in both. Indices are int64 if `wide`, else int32.
  void (*copy_rows)(const char* rows, const void* indices, bool wide, int64_t bytes, int64_t stride, char* out,
                    int64_t begin, int64_t end);
  // out = the sum in ascending order of `count` >= 1 rows of `columns` floats, `stride` floats apart: rows[order[i]],
  // or rows[i] if `order` is null. `out` may be the first of them.
  void (*sum_rows)(const float* rows, const int64_t* order, int64_t count, int64_t columns, int64_t stride, float* out);

  template <CpuIsa>
  static const NumberedRowsKernels table;
};

}  // namespace rec_kernels
