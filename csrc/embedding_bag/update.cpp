#include "embedding_bag/update.h"

#include <algorithm>
#include <cmath>

namespace rec_kernels {
namespace {

const char* const kOptimizerNames[] = {"sgd", "rowwise_adagrad", "adagrad", "adam", "rowwise_adam", "lamb"};

// Checks that a state tensor is given exactly if required; `per_element` state may be bfloat16.
void check_state(const OptionalTensor& t, bool required, bool per_element, Optimizer optimizer, const Tensor& values,
                 const char* name) {
  check_value(t.has_value() == required, name, required ? " must" : " must not", " be given for optimizer \"",
              kOptimizerNames[static_cast<int>(optimizer)], "\"");
  if (!t) return;
  check(*t, name).rank(1);
  if (!per_element || t->scalar_type() != ScalarType::BFloat16) check(*t, name).dtype(ScalarType::Float);
  check(*t, name).contiguous().on_device_of(values, "values");
}

Optimizer parse_optimizer(const std::string& name) {
  int index = 0;
  std::string known;
  for (const char* each : kOptimizerNames) {
    if (name == each) return static_cast<Optimizer>(index);
    known += join(index++ ? ", " : "", each);
  }
  throw_value_error(join("optimizer must be one of ", known, ", got \"", name, "\""));
}

GradientStep parse_gradient_step(const UpdateArguments& fused) {
  const double weight_decay = fused.weight_decay;
  GradientStep step;
  step.decoupled = parse_choice(fused.weight_decay_mode, "weight_decay_mode", "l2", "decoupled");
  check_value(weight_decay >= 0 && std::isfinite(static_cast<float>(weight_decay)), "weight_decay = ", weight_decay,
              " must be at least 0, and finite as float32");
  step.weight_decay = static_cast<float>(weight_decay);
  const auto limit = [](std::optional<double> clip, const char* name) {
    check_value(!clip || *clip > 0, name, " = ", clip.value_or(0), " must be above 0");
    return clip ? static_cast<float>(*clip) : INFINITY;
  };
  step.clip_value = limit(fused.clip_grad_value, "clip_grad_value");
  step.clip_norm = limit(fused.clip_grad_norm, "clip_grad_norm");
  return step;
}

void check_moments(const OptionalTensor& sum, const UpdateArguments& fused, Optimizer optimizer, const Tensor& values) {
  const bool adagrad = optimizer == Optimizer::kAdagrad, moments = is_elementwise(optimizer) && !adagrad;
  const bool rowwise = optimizer == Optimizer::kRowwiseAdam;
  check_state(sum, adagrad || optimizer == Optimizer::kRowwiseAdagrad, adagrad, optimizer, values, "sum");
  check_state(fused.exp_avg, moments, true, optimizer, values, "exp_avg");
  check_state(fused.exp_avg_sq, moments, !rowwise, optimizer, values, "exp_avg_sq");
  check_state(fused.beta_powers, moments, false, optimizer, values, "beta_powers");
  if (!moments) return;
  check_value(fused.beta_powers->numel() == 2, "beta_powers must have 2 elements, got ", fused.beta_powers->numel());
  if (rowwise) return;
  check_value(fused.exp_avg_sq->numel() == fused.exp_avg->numel(), "exp_avg_sq must have as many elements as exp_avg");
  check_value(fused.exp_avg_sq->scalar_type() == fused.exp_avg->scalar_type(), "exp_avg_sq must have exp_avg's dtype");
}

void check_step_and_lr(const Tensor& values, const Tensor& step, const Tensor& lr) {
  check(step, "step").rank(0).dtype(ScalarType::Long).on_device_of(values, "values");
  if (lr.dim() > 1) check_value(false, "lr must have at most 1 dimension, got shape ", shape_of(lr));
  check(lr, "lr").dtype(ScalarType::Float).contiguous().on_device_of(values, "values");
}

void check_constants(const UpdateArguments& fused) {
  check_value(fused.eps >= 0 && std::isfinite(static_cast<float>(fused.eps)), "eps = ", fused.eps,
              " must be at least 0, and finite as float32");
  for (const double beta : {fused.beta1, fused.beta2})  // 0.99999999 is 1 as float32
    check_value(beta >= 0 && static_cast<float>(beta) < 1.0f, "beta1 and beta2 must be in [0, 1) as float32, got ",
                fused.beta1, " and ", fused.beta2);
}

// Sets the pointers and sizes of checked state.
void read_state(const OptionalTensor& sum, const UpdateArguments& fused, Update* u) {
  const auto pointer = [](const OptionalTensor& t) { return t ? static_cast<float*>(t->mutable_data_ptr()) : nullptr; };
  u->state = {pointer(sum), pointer(fused.exp_avg), pointer(fused.exp_avg_sq), false};
  u->state_rows = u->state_elements = -1;
  if (u->optimizer == Optimizer::kRowwiseAdagrad) u->state_rows = sum->numel();
  if (u->optimizer == Optimizer::kRowwiseAdam) u->state_rows = fused.exp_avg_sq->numel();
  if (!is_elementwise(u->optimizer)) return;
  const Tensor& elements = fused.exp_avg ? *fused.exp_avg : *sum;
  u->state_elements = elements.numel();
  u->state.bf16 = elements.scalar_type() == ScalarType::BFloat16;
}

}  // namespace

UpdateRounding read_rounding(const Tensor& values, const std::string& rounding, const OptionalTensor& seed) {
  const bool stochastic = parse_choice(rounding, "rounding", "nearest", "stochastic");
  if (!seed) return {stochastic, nullptr};
  check(*seed, "seed").rank(0).dtype(ScalarType::Long).on_device_of(values, "values");
  return {stochastic, seed->const_data_ptr<int64_t>()};
}

Update read_update(const Tensor& values, const OptionalTensor& sum, const Tensor& step, const Tensor& lr,
                   const UpdateArguments& fused, const OptionalTensor& grad_scale) {
  Update u{};
  u.optimizer = parse_optimizer(fused.optimizer);
  check_step_and_lr(values, step, lr);
  check_moments(sum, fused, u.optimizer, values);
  check_constants(fused);
  const UpdateRounding rounding = read_rounding(values, fused.rounding, fused.seed);
  u.gradient_step = parse_gradient_step(fused);
  u.shrinks_weights = u.gradient_step.decays_weights() && !is_elementwise(u.optimizer);
  u.grad_scale = optional_scalar(grad_scale, values, "grad_scale");
  read_state(sum, fused, &u);
  u.eps = static_cast<float>(fused.eps);
  u.beta1 = static_cast<float>(fused.beta1);
  u.beta2 = static_cast<float>(fused.beta2);
  u.lr = lr.const_data_ptr<float>();
  u.lr_mask = lr.dim() == 0 ? 0 : UINT32_MAX;
  u.num_rates = lr.dim() == 0 ? kMaxTableId : std::min(lr.numel(), kMaxTableId);
  u.beta_powers = fused.beta_powers ? fused.beta_powers->const_data_ptr<float>() : nullptr;
  u.stochastic = rounding.stochastic;
  u.seed = rounding.seed;
  u.step = step.const_data_ptr<int64_t>();
  return u;
}

void check_row_state(const Update& update, int64_t rows) {
  const char* name = update.optimizer == Optimizer::kRowwiseAdam ? "exp_avg_sq" : "sum";
  check_value(update.state_rows < 0 || update.state_rows >= rows, name, " must have one element per row (", rows,
              "), got ", update.state_rows);
}

}  // namespace rec_kernels
