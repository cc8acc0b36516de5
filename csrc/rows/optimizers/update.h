// A fused update as the kernels of every backend read it: what becomes of rows, of their summed gradients, and of
// state. For a row, in this order: its gradient is divided by grad_scale and takes the gradient's step
// (rows/optimizers/clipping_and_decay.h); the optimizer's state advances; weights shrink by themselves, where they do;
// the optimizer moves them.
#pragma once

#include "rows/optimizers/adagrad_adam_lamb.h"
#include "rows/optimizers/clipping_and_decay.h"

namespace rec_kernels {

struct TablePart;

// beta1^t and beta2^t.
struct BetaPowers {
  float first, second;
};

// Reciprocal of the gradients' scale, by which they are multiplied; null: 1.
RK_HOST_DEVICE float inverse_of(const float* grad_scale) { return grad_scale ? 1.0f / *grad_scale : 1.0f; }

struct Update {
  Optimizer optimizer;
  OptimizerState state;
  int64_t state_rows, state_elements;  // how much state there is per row and per element; -1: there is none
  int64_t num_rates;                   // tables that have a learning rate, all of smaller numbers
  const TablePart* records;            // of the layout: a table's state per element starts at its state_offset
  GradientStep gradient_step;
  // True if weights shrink by themselves, w = fmaf(shrinkage(), w, w): by decoupled decay, unless the optimizer turns
  // gradients into directions, which then include it.
  bool shrinks_weights;
  float eps, beta1, beta2;
  // Numbers that stay where they are, in memory of the device.
  const float* lr;             // of each table by its number in the noise, or one for all
  uint32_t lr_mask;            // of that number: all bits, or none
  const float* beta_powers;    // [2], of t updates so far; null: the optimizer has none
  const float* grad_scale;     // null: 1
  bool stochastic;             // encoded rows and bfloat16 state are rounded by chance; else to nearest
  const int64_t *seed, *step;  // of the noise; no seed is 0

  // Powers of beta in this update.
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
