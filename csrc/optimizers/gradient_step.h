// What happens to a row's summed gradient before an optimizer sees it, and to its weights beside that: clipping and
// weight decay (docs/numerics.md, "Clipping and weight decay").
#pragma once

#include "core/host_device.h"

namespace rec_kernels {

struct GradientStep {
  float weight_decay = 0.0f;
  bool decoupled = false;  // the decay acts on the weights, not through the gradient
  float clip_value = __builtin_inff(), clip_norm = __builtin_inff();

  RK_HOST_DEVICE bool is_active() const {
    return weight_decay != 0.0f || clip_value < __builtin_inff() || clip_norm < __builtin_inff();
  }
  RK_HOST_DEVICE bool clips_norm() const { return clip_norm < __builtin_inff(); }
  RK_HOST_DEVICE bool adds_decay() const { return weight_decay != 0.0f && !decoupled; }
  RK_HOST_DEVICE bool decays_weights() const { return weight_decay != 0.0f && decoupled; }

  // A NaN stays.
  RK_HOST_DEVICE float clipped(float g) const {
    return g > clip_value ? clip_value : (g < -clip_value ? -clip_value : g);
  }
};

inline namespace RK_ISA {

// What a row's gradient is multiplied by, from its square sum after clipping by value.
RK_HOST_DEVICE float clip_factor(const GradientStep& step, float square_sum) {
  const float norm = square_root(square_sum);
  return norm > step.clip_norm ? step.clip_norm / norm : 1.0f;
}

}  // namespace RK_ISA
}  // namespace rec_kernels
