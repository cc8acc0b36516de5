// SGD and row-wise Adagrad: w = fmaf(factor, g, w) with one factor per row. SGD has factor -lr and no state. Row-wise
// Adagrad has one float of state per row, v += mean(g^2) over the row, and factor -(lr / (sqrt(v) + eps)).
#pragma once

#include "core/host_device.h"

namespace rec_kernels {
inline namespace RK_ISA {

RK_HOST_DEVICE float sgd_factor(float lr) { return -lr; }
RK_HOST_DEVICE float rowwise_adagrad_factor(float lr, float eps, float v) { return -(lr / (square_root(v) + eps)); }

template <class V>
RK_HOST_DEVICE V moved(V weight, V gradient, V factor) {
  return fused_multiply_add(factor, gradient, weight);
}

}  // namespace RK_ISA
}  // namespace rec_kernels
