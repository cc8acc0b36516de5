// SGD and row-wise Adagrad: a row moves by its gradient times one factor, w = fmaf(factor, g, w). SGD's factor is -lr,
// and it has no state. Row-wise Adagrad keeps one float for a row, v += mean(g^2) over the row; its factor is
// -(lr / (sqrt(v) + eps)).
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
