// Parameters of a fused update for the kernels of every backend. For each row: divide the gradient by grad_scale; apply
// the gradient step (rows/optimizers/clipping_and_decay.h); update the optimizer state; shrink the weights, if
// shrinks_weights; update the weights.
#pragma once

#include "rows/optimizers/adagrad_adam_lamb.h"
#include "rows/optimizers/clipping_and_decay.h"

namespace rec_kernels {

struct TablePart;

// beta1^t and beta2^t.
struct BetaPowers {
  float first, second;
};

// 1 / grad_scale, the factor of gradients; 1 if null.
RK_HOST_DEVICE float inverse_of(const float* grad_scale) { return grad_scale ? 1.0f / *grad_scale : 1.0f; }

struct Update {
  Optimizer optimizer;
  OptimizerState state;
  int64_t state_rows, state_elements;  // sizes of per-row and per-element state; -1: none
  int64_t num_rates;                   // exclusive upper bound of table_id: size of lr, kMaxTableId if 0-dim
  const TablePart* records;            // records of the layout, which have state_offset
  GradientStep gradient_step;
  // True if decoupled decay shrinks the weights directly, w = fmaf(shrinkage(), w, w). Optimizers with per-element
  // state include the decay in the direction instead.
  bool shrinks_weights;
  float eps, beta1, beta2;
  // Pointers into tensors on the device of the call.
  const float* lr;             // per table_id, or one for all tables
  uint32_t lr_mask;            // applied to table_id: all bits, or 0 for one rate
  const float* beta_powers;    // [2], after t updates; null: not used by the optimizer
  const float* grad_scale;     // null: 1
  bool stochastic;             // stochastic rounding of encoded rows and bfloat16 state; else to nearest
  const int64_t *seed, *step;  // of the noise; a null seed is 0

  // Powers of beta after this update.
  RK_HOST_DEVICE BetaPowers powers() const {
    if (!beta_powers) return {0.0f, 0.0f};
    return {beta_powers[0] * beta1, beta_powers[1] * beta2};
  }
  RK_HOST_DEVICE float lr_of(uint32_t table) const { return lr[table & lr_mask]; }
  RK_HOST_DEVICE float shrinkage(uint32_t table) const { return -(lr_of(table) * gradient_step.weight_decay); }
};

inline namespace RK_ISA {

RK_HOST_DEVICE Elementwise elementwise_of(const Update& u) {
  const BetaPowers powers = u.powers();
  return {u.optimizer, u.eps, u.beta1, u.beta2, 1.0f - powers.first, 1.0f - powers.second};
}

}  // namespace RK_ISA
}  // namespace rec_kernels
