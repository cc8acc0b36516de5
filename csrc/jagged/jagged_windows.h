// jagged_windows: gathers rows that are windows of one buffer. Histories of a user's samples overlap, so their common
// part is stored once, and every sample has a start and a length (partial deduplication: Zhao et al., "RecD:
// Deduplication for End-to-End Deep Learning Recommendation Model Training Infrastructure", MLSys 2023,
// arXiv:2211.05239).
//
// Contract. values [N] or [N, D] of any dtype; starts [M] and lengths [M], int32 or int64 each: row m of the output is
// values[starts[m] : starts[m] + lengths[m]]. Windows come in any order, may overlap and be empty; starts are in [0,
// N], lengths in [0, N - starts]. Returns new tensors: output [total] or [total, D]; its offsets [M + 1] of lengths'
// dtype; a status (jagged/jagged.h: positions of windows, each counted once; a bad one is empty on a GPU). `total` as
// of jagged_index_select, and a gradient by the same rule. jagged_overlaps finds such windows.
#pragma once

#include "jagged/jagged.h"

namespace rec_kernels {

// Windows of N values.
struct Windows {
  Integers starts, lengths;
  int64_t num_values;

  // Unsigned, so that a negative number is bad, too; the difference counts only where the start is good.
  RK_HOST_DEVICE bool starts_outside(int64_t m) const {
    return static_cast<uint64_t>(starts[m]) > static_cast<uint64_t>(num_values);
  }
  RK_HOST_DEVICE bool is_outside(int64_t start, int64_t length) const {
    const auto size = static_cast<uint64_t>(num_values), first = static_cast<uint64_t>(start);
    return (first > size) | (static_cast<uint64_t>(length) > size - first);
  }
  RK_HOST_DEVICE bool is_bad(int64_t m) const { return is_outside(starts[m], lengths[m]); }
};

// Throws std::invalid_argument naming the argument.
RK_EXPORT void check_jagged_windows(const Tensor& values, const Tensor& starts, const Tensor& lengths,
                                    std::optional<int64_t> total);

}  // namespace rec_kernels
