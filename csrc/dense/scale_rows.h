// scale_rows: y[n, :] = scale[n] * x[n, :]. The template for new ops: small, but with every component of an op.
//
// Contract. x [N, D] float32, scale [N] float32, of any strides; the result is a new contiguous [N, D] tensor. Empty N
// or D gives an empty result. Each element is one IEEE multiplication; NaN and Inf propagate.
// Differentiable in both: grad_x[n, :] = scale[n] * grad[n, :] (the same op), and grad_scale[n] = dot(grad[n], x[n])
// in the order of rows/cpu/statistics.h, so that every backend gives the same bits.
#pragma once

#include "core/stable.h"

namespace rec_kernels {

// Throw std::invalid_argument naming the argument. row_dot: a and b [N, D] float32, the result a new [N] tensor.
RK_EXPORT void check_scale_rows(const Tensor& x, const Tensor& scale);
RK_EXPORT void check_row_dot(const Tensor& a, const Tensor& b);

}  // namespace rec_kernels
