// Optimizers with state for every element of a row: Adagrad, Adam, row-wise Adam and LAMB (docs/numerics.md,
// "Optimizers"). A row's gradient g becomes a direction r, and state advances on the way; then w = fmaf(factor, r, w)
// with one factor for the row.
#pragma once

#include "core/host_device.h"

namespace rec_kernels {

enum class ElementwiseKind : int { kAdagrad, kAdam, kRowwiseAdam, kLamb };

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

// Streams of the noise with which moments are rounded; the weights' is 0.
constexpr uint32_t kFirstMomentStream = 1, kSecondMomentStream = 2;

inline namespace RK_ISA {

// One step's numbers. beta1_power and beta2_power are beta1^t and beta2^t of this step, t counted from 1.
struct Elementwise {
  ElementwiseKind kind;
  float lr, eps, beta1, beta2, correction1, correction2;

  RK_HOST_DEVICE static Elementwise make(ElementwiseKind kind, float lr, float eps, float beta1, float beta2,
                                         float beta1_power, float beta2_power) {
    return {kind, lr, eps, beta1, beta2, 1.0f - beta1_power, 1.0f - beta2_power};
  }
  RK_HOST_DEVICE bool needs_mean_square() const { return kind == ElementwiseKind::kRowwiseAdam; }
  RK_HOST_DEVICE bool needs_norms() const { return kind == ElementwiseKind::kLamb; }
  RK_HOST_DEVICE bool has_first() const { return kind != ElementwiseKind::kAdagrad; }
  RK_HOST_DEVICE bool has_second() const { return kind != ElementwiseKind::kRowwiseAdam; }

  // Row-wise Adam: the row's second moment after the mean of its g^2, and the divisor that comes from it.
  RK_HOST_DEVICE float row_moment(float second, float mean_square) const {
    return fused_multiply_add(beta2, second, (1.0f - beta2) * mean_square);
  }
  RK_HOST_DEVICE float row_divisor(float second) const { return square_root(second / correction2) + eps; }

  // LAMB: the factor of a row whose weights and direction have these square sums.
  RK_HOST_DEVICE float trusted(float weight_squares, float direction_squares) const {
    const float weight = square_root(weight_squares), direction = square_root(direction_squares);
    return -(lr * (weight == 0.0f || direction == 0.0f ? 1.0f : weight / direction));
  }
};

// What makes a register of a number: itself.
struct OneLane {
  RK_HOST_DEVICE float operator()(float x) const { return x; }
};

// The numbers in registers of V, a float or several.
template <class V>
struct ElementwiseRegisters {
  V beta1, rest1, beta2, rest2, correction1, correction2, eps, row_divisor;

  template <class Spread>
  RK_HOST_DEVICE ElementwiseRegisters(const Elementwise& o, float divisor, const Spread& spread)
      : beta1(spread(o.beta1)),
        rest1(spread(1.0f - o.beta1)),
        beta2(spread(o.beta2)),
        rest2(spread(1.0f - o.beta2)),
        correction1(spread(o.correction1)),
        correction2(spread(o.correction2)),
        eps(spread(o.eps)),
        row_divisor(spread(divisor)) {}

  // The direction of gradients g; `first` (exp_avg) and `second` (sum, exp_avg_sq) are state before and after.
  RK_HOST_DEVICE V adagrad(V g, V* second) const {
    *second = fused_multiply_add(g, g, *second);
    return g / (square_root(*second) + eps);
  }
  RK_HOST_DEVICE V adam(V g, V* first, V* second) const {
    *first = fused_multiply_add(beta1, *first, rest1 * g);
    *second = fused_multiply_add(beta2, *second, (rest2 * g) * g);
    return (*first / correction1) / (square_root(*second / correction2) + eps);
  }
  RK_HOST_DEVICE V rowwise_adam(V g, V* first) const {
    *first = fused_multiply_add(beta1, *first, rest1 * g);
    return (*first / correction1) / row_divisor;
  }
  RK_HOST_DEVICE V direction(ElementwiseKind kind, V g, V* first, V* second) const {
    if (kind == ElementwiseKind::kAdagrad) return adagrad(g, second);
    if (kind == ElementwiseKind::kRowwiseAdam) return rowwise_adam(g, first);
    return adam(g, first, second);
  }
};

}  // namespace RK_ISA
}  // namespace rec_kernels
