// The fused optimizers and their state.
#pragma once

#include "core/host_device.h"

namespace rec_kernels {

// Those from kAdagrad on keep state for every element of a row (rows/optimizers/adagrad_adam_lamb.h).
enum class Optimizer { kSgd, kRowwiseAdagrad, kAdagrad, kAdam, kRowwiseAdam, kLamb };

RK_HOST_DEVICE constexpr bool is_elementwise(Optimizer o) { return o >= Optimizer::kAdagrad; }

// State of all tables, as a call brings it: null where the optimizer has none. Of state per element, each table has its
// place, [E, D]; state per row is by linear row.
struct OptimizerState {
  float* sum;         // Adagrad, per element; row-wise Adagrad, per row
  float* exp_avg;     // the Adam family, per element
  float* exp_avg_sq;  // per element; row-wise Adam: per row
  bool bf16;          // state per element is bfloat16; state per row never is

  // A place in state per element.
  template <class State>
  RK_HOST_DEVICE State* moment(State* state, int64_t element) const {
    if (!bf16) return state + element;
    return reinterpret_cast<State*>(reinterpret_cast<uintptr_t>(state) + static_cast<uintptr_t>(element) * 2);
  }
  RK_HOST_DEVICE int64_t moment_bytes() const { return bf16 ? 2 : 4; }
};

}  // namespace rec_kernels
