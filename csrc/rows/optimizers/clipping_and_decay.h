// Clipping and weight decay: transforms a row's summed gradient before the optimizer, or its weights if decay is
// decoupled (docs/numerics.md, "Clipping and weight decay").
#pragma once

#include "core/host_device.h"

namespace rec_kernels {

struct GradientStep {
  float weight_decay = 0.0f;
  bool decoupled = false;  // decay acts on the weights, else on the gradient (L2)
  float clip_value = __builtin_inff(), clip_norm = __builtin_inff();

  RK_HOST_DEVICE bool is_active() const {
    return weight_decay != 0.0f || clip_value < __builtin_inff() || clip_norm < __builtin_inff();
  }
  RK_HOST_DEVICE bool clips_norm() const { return clip_norm < __builtin_inff(); }
  RK_HOST_DEVICE bool adds_decay() const { return weight_decay != 0.0f && !decoupled; }
  RK_HOST_DEVICE bool decays_weights() const { return weight_decay != 0.0f && decoupled; }

  // Propagates NaN.
  RK_HOST_DEVICE float clipped(float g) const {
    return g > clip_value ? clip_value : (g < -clip_value ? -clip_value : g);
  }
};

inline namespace RK_ISA {

// The gradient step of a row: clip by value, clip by the norm of the result, then add L2 decay. Clipping by norm takes
// two passes: pass the square sum of the first to clip_norm(); clipping by value is idempotent.
struct RowStep {
  const GradientStep& step;
  float factor = 1.0f;  // from clipping by norm
  bool norm_known;

  RK_HOST_DEVICE explicit RowStep(const GradientStep& step) : step(step), norm_known(!step.clips_norm()) {}
  RK_HOST_DEVICE void clip_norm(float square_sum) {
    const float norm = square_root(square_sum);
    factor = norm > step.clip_norm ? step.clip_norm / norm : 1.0f;
    norm_known = true;
  }
  // Clips an element of the gradient. Once the norm is known, decayed() adds the L2 decay.
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
