// expand: out[b, :] = x[inverse[b], :], which expands deduplicated rows to a batch, and the segment sum of its
// gradients.
//
// Contract. x [U, D] float32, float16, bfloat16, int32 or int64; inverse [M] int32 or int64 in [0, U). The result is a
// new [M, D] tensor of x's dtype, and a status (jagged/jagged.h). Out of range: IndexError on the CPU; on a GPU a row
// of zeros, recorded in the status. Differentiable in x:
//
// expand_backward(grad [M, D] float32, inverse, rows U): row u of the new [U, D] tensor is the sum of grad[b] over the
// b with inverse[b] == u, in ascending order and in chunks of 64 (docs/numerics.md, "Row gradients"); a row without any
// is zeros. Indices out of range are ignored on a GPU and raise IndexError on the CPU.
#pragma once

#include "jagged/jagged.h"

namespace rec_kernels {

// Each throws std::invalid_argument naming the argument.
RK_EXPORT void check_expand(const Tensor& x, const Tensor& inverse);
RK_EXPORT void check_expand_backward(const Tensor& grad, const Tensor& inverse, int64_t rows);

}  // namespace rec_kernels
