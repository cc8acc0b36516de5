// jagged_index_select: rows of a jagged tensor, chosen by their numbers.
//
// Contract. values [N] or [N, D] of any dtype, offsets [R + 1], index [M] int32 or int64 in [0, R), any order, repeats
// allowed. Returns new tensors: output [total] or [total, D], whose row m is row index[m] of the input; its offsets
// [M + 1] of offsets' dtype; a status (jagged/jagged.h: positions in `index`). `total`, if it is given, must be the
// number of values that are chosen: a GPU need not be waited for then. A wrong one is an error on the CPU; on a GPU
// what does not fit is left out, values behind the last row are zeros, and the status has the position M.
// Differentiable in values: positions are summed by expand_backward's rule, in ascending order of the output.
#pragma once

#include "jagged/jagged.h"

namespace rec_kernels {

// Throws std::invalid_argument naming the argument.
RK_EXPORT void check_jagged_index_select(const Tensor& values, const Tensor& offsets, const Tensor& index,
                                         std::optional<int64_t> total);

}  // namespace rec_kernels
