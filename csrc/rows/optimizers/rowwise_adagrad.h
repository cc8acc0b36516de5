// Row-wise Adagrad: one float of state per row. v += mean(g^2) over the row; w = fmaf(-(lr / (sqrt(v) + eps)), g, w).
#pragma once

#include "core/host_device.h"

namespace rec_kernels {
inline namespace RK_ISA {

struct RowwiseAdagrad {
  static constexpr bool kNeedsMeanSquare = true;
  float lr;
  float eps;
  float* sum;  // by linear row

  // The row's factor of g, once per row; advances the row's state.
  RK_HOST_DEVICE float prepare(int64_t row, float mean_square) const {
    const float v = sum[row] + mean_square;
    sum[row] = v;
    return factor(v);
  }
  // The factor that goes with the row's new state.
  RK_HOST_DEVICE float factor(float v) const { return -(lr / (square_root(v) + eps)); }

  template <class V>
  RK_HOST_DEVICE static V update(V weight, V gradient, V factor) {
    return fused_multiply_add(factor, gradient, weight);
  }
};

}  // namespace RK_ISA
}  // namespace rec_kernels
