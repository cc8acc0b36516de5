// scale_rows: y[n, :] = scale[n] * x[n, :], the template op: small, real, and with everything an op has.
//
// Contract. x [N, D] float32 contiguous, scale [N] float32; the result is a new [N, D] tensor. Empty N or D gives an
// empty result. Each element is one IEEE multiplication; NaN and Inf propagate.
// Differentiable in both: grad_x[n, :] = scale[n] * grad[n, :] (the same op), and grad_scale[n] = dot(grad[n], x[n])
// in the order of core/row_statistics.h, so that every backend gives the same bits.
#pragma once

#include "core/stable.h"

namespace rec_kernels {

// Throws std::invalid_argument naming the argument. `other` is "scale" [N] for the forward, "grad" [N, D] backward.
RK_EXPORT void check_scale_rows(const Tensor& x, const Tensor& scale);
RK_EXPORT void check_row_dot(const Tensor& a, const Tensor& b);

}  // namespace rec_kernels
