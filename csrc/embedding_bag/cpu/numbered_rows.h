// Copies and sums of rows that a list of numbers names, for expand and for the bags that samples share: plain-pointer
// kernels, one table per instruction set (core/cpu/isa.h).
#pragma once

#include <cstdint>

#include "core/cpu/isa.h"

namespace rec_kernels {

struct NumberedRowsKernels {
  // out[i] = rows[numbers[i]] for i in [begin, end), `bytes` bytes of rows that are `stride` bytes apart in both;
  // numbers are int64 if `wide`, or int32.
  void (*copy_rows)(const char* rows, const void* numbers, bool wide, int64_t bytes, int64_t stride, char* out,
                    int64_t begin, int64_t end);
  // out = the sum of `count` >= 1 rows of `columns` floats, `stride` floats apart, in order, from the first one: rows
  // order[0], order[1], ... or, without an order, the first ones. `out` may be the first of them.
  void (*sum_rows)(const float* rows, const int64_t* order, int64_t count, int64_t columns, int64_t stride, float* out);

  template <CpuIsa>
  static const NumberedRowsKernels table;
};

}  // namespace rec_kernels
