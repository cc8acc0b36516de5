// jagged_index_select: selects rows of a jagged tensor by index.
//
// Contract. values [N] or [N, D] of any dtype, offsets [R + 1], index [M] int32 or int64 in [0, R), any order, repeats
// allowed. Returns new tensors: output [total] or [total, D], whose row m is row index[m] of the input; its offsets
// [M + 1] of offsets' dtype; a status (jagged/jagged.h: positions in `index`). `total`, if given, must be
// the number of selected values and avoids synchronization with a GPU. A wrong total is an error on the CPU; on a GPU,
// values that do not fit are dropped, values after the last row are zeros, and the status has position M.
// Differentiable in values: gradients are summed like expand_backward, in ascending order of the output.
#pragma once

#include "jagged/jagged.h"

namespace rec_kernels {

// Throws std::invalid_argument naming the argument.
RK_EXPORT void check_jagged_index_select(const Tensor& values, const Tensor& offsets, const Tensor& index,
                                         std::optional<int64_t> total);

}  // namespace rec_kernels
