// Clipping and weight decay: changes of a row's summed gradient before an optimizer sees it, and of its weights beside
// that (docs/numerics.md, "Clipping and weight decay").
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

// The order of a step for a row: its gradient is clipped by value, then by the norm of what that leaves; then comes the
// decay that acts through the gradient. A norm to be clipped takes two passes: the first one's squares go to
// clip_norm(), and clipping by value again changes nothing.
struct RowStep {
  const GradientStep& step;
  float factor = 1.0f;  // of the gradient, from its norm
  bool norm_known;

  RK_HOST_DEVICE explicit RowStep(const GradientStep& step) : step(step), norm_known(!step.clips_norm()) {}
  RK_HOST_DEVICE void clip_norm(float square_sum) {
    const float norm = square_root(square_sum);
    factor = norm > step.clip_norm ? step.clip_norm / norm : 1.0f;
    norm_known = true;
  }
  // Clips a gradient; once the norm is known, decayed() adds the decay through it.
  RK_HOST_DEVICE float clipped(float g) const {
    const float clipped = step.clipped(g);
    return factor != 1.0f ? clipped * factor : clipped;
  }
  RK_HOST_DEVICE bool adds_decay() const { return norm_known && step.adds_decay(); }
  RK_HOST_DEVICE float decayed(float clipped, float w) const {
    return fused_multiply_add(step.weight_decay, w, clipped);
  }
};

}  // namespace RK_ISA
}  // namespace rec_kernels
