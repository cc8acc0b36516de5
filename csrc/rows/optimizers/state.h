// The fused optimizers and their state.
#pragma once

#include "core/host_device.h"

namespace rec_kernels {

// Optimizers from kAdagrad on have per-element state (rows/optimizers/adagrad_adam_lamb.h).
enum class Optimizer { kSgd, kRowwiseAdagrad, kAdagrad, kAdam, kRowwiseAdam, kLamb };

RK_HOST_DEVICE constexpr bool is_elementwise(Optimizer o) { return o >= Optimizer::kAdagrad; }

// Optimizer state of all tables; null if the optimizer does not use it. Per-element state has a range [E, D] for each
// table; per-row state is indexed by linear row.
struct OptimizerState {
  float* sum;         // Adagrad, per element; row-wise Adagrad, per row
  float* exp_avg;     // the Adam family, per element
  float* exp_avg_sq;  // per element; row-wise Adam: per row
  bool bf16;          // per-element state is bfloat16; per-row state is always float32

  // Address in per-element state.
  template <class State>
  RK_HOST_DEVICE State* moment(State* state, int64_t element) const {
    if (!bf16) return state + element;
    return reinterpret_cast<State*>(reinterpret_cast<uintptr_t>(state) + static_cast<uintptr_t>(element) * 2);
  }
  RK_HOST_DEVICE int64_t moment_bytes() const { return bf16 ? 2 : 4; }
};

}  // namespace rec_kernels
