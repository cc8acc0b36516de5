// Stochastic gradient descent: w = fmaf(-lr, g, w). No state.
#pragma once

#include "core/host_device.h"

namespace rec_kernels {
inline namespace RK_ISA {

struct Sgd {
  static constexpr bool kNeedsMeanSquare = false;
  float lr;

  // The row's factor of g, once per row.
  RK_HOST_DEVICE float prepare(int64_t, float) const { return -lr; }

  template <class V>
  RK_HOST_DEVICE static V update(V weight, V gradient, V factor) {
    return fused_multiply_add(factor, gradient, weight);
  }
};

}  // namespace RK_ISA
}  // namespace rec_kernels
