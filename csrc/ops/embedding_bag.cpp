#include "ops/embedding_bag.h"

#include <cmath>

#include "core/schema.h"

namespace rec_kernels {
namespace {

// Returns the number of features, of which there are `parts` parts.
int64_t check_partitions(const TableLayout& layout, int64_t parts, const Tensor& values) {
  const OptionalTensor* const all[] = {&layout.divisors, &layout.moduli, &layout.id_limits, &layout.combine};
  if (!layout.partition_starts) {
    for (const OptionalTensor* t : all)
      check_value(!*t, "partition_starts is missing: divisors, moduli, id_limits and combine mean nothing without it");
    check_value(layout.max_parts == 0 && !layout.multiplies,
                "partition_starts is missing: max_parts and multiplies mean nothing without it");
    return parts;
  }
  check_rank(*layout.partition_starts, 1, "partition_starts");
  const int64_t features = layout.partition_starts->numel() - 1;
  check_value(features >= 0, "partition_starts must have num_features + 1 elements, got none");
  check_layout_tensor(layout.partition_starts, features + 1, values, "partition_starts", ScalarType::Long);
  const auto check = [&](const OptionalTensor& t, int64_t size, const char* name) {
    check_layout_tensor(t, size, values, name, ScalarType::Long,
                        "partition_starts is given, so divisors, moduli, id_limits and combine");
  };
  check(layout.divisors, parts, "divisors");
  check(layout.moduli, parts, "moduli");
  check(layout.id_limits, features, "id_limits");
  check(layout.combine, features, "combine");
  check_value(layout.max_parts >= 0 && layout.max_parts <= kMaxParts, "max_parts = ", layout.max_parts,
              " must be in [0, ", kMaxParts, "]");
  return features;
}

void check_groups(const TableLayout& layout, int64_t features, const Tensor& values) {
  check_value(layout.inverse.has_value() == layout.groups.has_value(), "inverse and groups must be given together");
  if (!layout.inverse) return;
  check_value(layout.bag_starts.has_value(), "bag_starts is missing: inverse and groups mean nothing without it");
  const Tensor& inverse = *layout.inverse;
  check_rank(inverse, 2, "inverse");
  check_dtype(inverse, ScalarType::Long, "inverse");
  check_same_device(inverse, values, "inverse", "values");
  const std::vector<int64_t>& groups = *layout.groups;
  check_value(static_cast<int64_t>(groups.size()) == features, "groups must have an element for each of the ", features,
              " features, got ", groups.size());
  for (size_t f = 0; f < groups.size(); ++f)
    check_value(groups[f] >= -1 && groups[f] < inverse.size(0), "groups[", f, "] = ", groups[f], " must be in [0, ",
                inverse.size(0), "), the rows of inverse, or -1");
}

const char* const kOptimizerNames[] = {"sgd", "rowwise_adagrad", "adagrad", "adam", "rowwise_adam", "lamb"};

// `per_element`: state that may be bfloat16.
void check_state(const OptionalTensor& t, bool wanted, bool per_element, Optimizer optimizer, const Tensor& values,
                 const char* name) {
  check_value(t.has_value() == wanted, name, wanted ? " must" : " must not", " be given for optimizer \"",
              kOptimizerNames[static_cast<int>(optimizer)], "\"");
  if (!t) return;
  check_rank(*t, 1, name);
  if (!per_element || t->scalar_type() != ScalarType::BFloat16) check_dtype(*t, ScalarType::Float, name);
  check_contiguous(*t, name);
  check_same_device(*t, values, name, "values");
}

}  // namespace

void check_layout_tensor(const OptionalTensor& t, int64_t size, const Tensor& values, const char* name,
                         ScalarType dtype, const char* asks) {
  check_value(t.has_value(), name, " is missing: ", asks, " must be");
  check_shape(*t, {size}, name);
  check_dtype(*t, dtype, name);
  check_contiguous(*t, name);
  check_same_device(*t, values, name, "values");
}

std::string layout_schema() {
  return "Tensor? weight_offsets=None, Tensor? row_offsets=None, Tensor? num_embeddings=None, "
         "Tensor? embedding_dims=None, Tensor? output_offsets=None, Tensor? mean=None, SymInt output_dim=0, "
         "SymInt num_rows=0, SymInt max_embedding_dim=0, str[]? formats=None, Tensor? format_of=None, "
         "SymInt embedding_dim=0, Tensor? bag_starts=None, Tensor? inverse=None, int[]? groups=None, "
         "Tensor? frozen=None, Tensor? partition_starts=None, Tensor? divisors=None, Tensor? moduli=None, "
         "Tensor? id_limits=None, Tensor? combine=None, int max_parts=0, bool? multiplies=None, "
         "str pooling=\"sum\", int padding_idx=-1, str bounds_check=\"error\"";
}

BagOptions parse_bag_options(const BagReading& reading) {
  const std::string &pooling = reading.pooling, &bounds_check = reading.bounds_check;
  check_value(pooling == "sum" || pooling == "mean", "pooling must be \"sum\" or \"mean\", got \"", pooling, "\"");
  const bool raise = bounds_check == "error", ignore = bounds_check == "ignore";
  check_value(raise || ignore || bounds_check == "none",
              "bounds_check must be \"error\", \"ignore\" or \"none\", got \"", bounds_check, "\"");
  return {pooling == "mean", reading.padding_idx, raise || ignore, raise};
}

int64_t check_bags(const Tensor& values, const Tensor& offsets, const OptionalTensor& per_sample_weights,
                   const TableLayout& layout, bool include_last_offset) {
  check_rank(values, 1, "values");
  check_integer(values, "values");
  check_rank(offsets, 1, "offsets");
  check_integer(offsets, "offsets");
  check_same_device(offsets, values, "offsets", "values");
  check_value(offsets.numel() >= 1 || !include_last_offset,
              "offsets must have num_features * batch + 1 elements, got none");
  if (per_sample_weights) {
    check_shape(*per_sample_weights, {values.numel()}, "per_sample_weights");
    check_dtype(*per_sample_weights, ScalarType::Float, "per_sample_weights");
    check_same_device(*per_sample_weights, values, "per_sample_weights", "values");
  }
  if (!layout.embedding_dims) {
    check_value(!layout.weight_offsets && !layout.format_of && !layout.row_offsets && !layout.num_embeddings &&
                    !layout.output_offsets && !layout.mean && !layout.bag_starts && !layout.inverse && !layout.groups &&
                    !layout.frozen && !layout.partition_starts && !layout.divisors && !layout.moduli &&
                    !layout.id_limits && !layout.combine && layout.max_parts == 0 && !layout.multiplies &&
                    layout.output_dim == 0 && layout.num_rows == 0 && layout.max_embedding_dim == 0,
                "embedding_dims is missing: other layout arguments mean nothing without it");
    return 1;
  }
  check_rank(*layout.embedding_dims, 1, "embedding_dims");
  const int64_t parts = layout.embedding_dims->numel(), features = check_partitions(layout, parts, values);
  check_layout_tensor(layout.weight_offsets, parts, values, "weight_offsets", ScalarType::Long);
  check_layout_tensor(layout.row_offsets, parts, values, "row_offsets", ScalarType::Long);
  check_layout_tensor(layout.num_embeddings, parts, values, "num_embeddings", ScalarType::Long);
  check_layout_tensor(layout.embedding_dims, parts, values, "embedding_dims", ScalarType::Long);
  check_layout_tensor(layout.output_offsets, parts, values, "output_offsets", ScalarType::Long);
  if (layout.mean) check_layout_tensor(layout.mean, features, values, "mean", ScalarType::Bool);
  if (layout.format_of) check_layout_tensor(layout.format_of, parts, values, "format_of", ScalarType::Long);
  if (layout.frozen) check_layout_tensor(layout.frozen, features, values, "frozen", ScalarType::Bool);
  check_groups(layout, features, values);
  if (layout.bag_starts) {
    check_layout_tensor(layout.bag_starts, features + 1, values, "bag_starts", ScalarType::Long);
    return features;
  }
  const int64_t bags = offsets.numel() - (include_last_offset ? 1 : 0);
  check_value(features == 0 ? bags == 0 : bags % features == 0,
              "offsets must have num_features * batch + 1 elements, got ", offsets.numel(), " for ", features,
              " features");
  return features;
}

Bags read_bags(const Tensor& values, const Tensor& offsets, const OptionalTensor& per_sample_weights,
               const BagOptions& options, const TableLayout& layout, int64_t features, bool include_last_offset) {
  Bags b;
  b.ids = values.const_data_ptr();
  b.offsets = offsets.const_data_ptr();
  b.per_sample_weights = per_sample_weights ? per_sample_weights->const_data_ptr<float>() : nullptr;
  b.num_ids = values.numel();
  b.num_offsets = offsets.numel();
  b.num_bags = offsets.numel() - (include_last_offset ? 1 : 0);
  b.num_features = features;
  b.batch = layout.inverse ? layout.inverse->size(1) : features ? b.num_bags / features : 0;
  const auto pointer = [](const OptionalTensor& t) { return t ? t->const_data_ptr<int64_t>() : nullptr; };
  b.starts = pointer(layout.bag_starts);
  b.groups = nullptr;
  b.row_shifts = nullptr;
  b.part_starts = pointer(layout.partition_starts);
  b.padding_idx = options.padding_idx;
  b.ids64 = values.scalar_type() == ScalarType::Long;
  b.offsets64 = offsets.scalar_type() == ScalarType::Long;
  b.check_ids = options.check_ids;
  check_value(b.num_bags < INT64_C(0xffffffff), "offsets describe ", b.num_bags,
              " bags; at most 2^32 - 2 fit in a call");
  return b;
}

std::vector<RowFormat> parse_formats(const TableLayout& layout) {
  std::vector<RowFormat> formats;
  if (!layout.formats) {
    check_value(!layout.format_of && layout.embedding_dim == 0,
                "formats is missing: format_of and embedding_dim mean nothing without it");
    return formats;
  }
  for (const std::string& name : *layout.formats) {
    formats.push_back(parse_row_format(name, join("formats[", formats.size(), "]: format")));
    check_value(is_bag_format(formats.back()), "formats: tables cannot have format \"", name,
                "\"; it must be one of fp32, fp16, bf16, int8, int4, mx9, mx6, mx4");
    for (size_t i = 0; i + 1 < formats.size(); ++i)
      check_value(formats[i] != formats.back(), "formats must differ, got \"", name, "\" twice");
  }
  check_value(!formats.empty(), "formats must have at least one element");
  check_value(layout.format_of.has_value() || formats.size() == 1, "format_of is missing: formats has ", formats.size(),
              " elements, so every feature's must be named");
  check_value((layout.embedding_dim != 0) == !layout.embedding_dims,
              "embedding_dim must be given for one table of bytes and nothing else, got ", layout.embedding_dim);
  return formats;
}

OneTable read_one_table(const TableLayout& layout, int64_t rows, int64_t columns) {
  const std::vector<RowFormat> formats = parse_formats(layout);
  check_value(columns >= 1, "weights must have at least one column, got shape [", rows, ", ", columns, "]");
  if (formats.empty()) return {RowFormat::kFp32, columns, 4 * columns};
  const int64_t D = layout.embedding_dim;
  check_value(D >= 1 && D <= INT32_MAX, "embedding_dim = ", D, " must be in [1, 2^31)");
  const int64_t bytes = row_bytes(formats[0], D);
  check_value(columns == bytes, "weights must have rows of ", bytes, " bytes for format \"",
              row_format_name(formats[0]), "\" and embedding_dim = ", D, ", got ", columns);
  return {formats[0], D, bytes};
}

void check_weights(const Tensor& weights, const Tensor& values, const TableLayout& layout) {
  check_dtype(weights, layout.formats ? ScalarType::Byte : ScalarType::Float, "weights");
  check_contiguous(weights, "weights");
  // Host memory beside a GPU's tensors: whether the GPU reaches it is for on_gpu() of cuda/embedding_bag.cuh to say.
  if (!weights.is_cpu() || !values.is_cuda()) check_same_device(weights, values, "weights", "values");
  check_rank(weights, layout.embedding_dims ? 1 : 2, "weights");
}

void check_own_weights(const OptionalTensor& weights, const std::vector<int64_t>& shape, const Tensor& values,
                       const TableLayout& layout, bool multiplies) {
  check_value(weights || !multiplies,
              "weights must be given: combine multiplies rows of parts, and the gradient of each needs the others");
  if (!weights) return;
  check_weights(*weights, values, layout);
  bool same = true;  // the ranks are
  for (size_t i = 0; i < shape.size(); ++i) same = same && weights->size(static_cast<int64_t>(i)) == shape[i];
  check_value(same, "weights must have the shape that weights_shape names, got ", shape_of(*weights));
}

void check_gradient(const Tensor& grad, const Tensor& values, int64_t rows, int64_t output_dim) {
  check_shape(grad, {rows, output_dim}, "grad");
  check_dtype(grad, ScalarType::Float, "grad");
  check_same_device(grad, values, "grad", "values");
}

OptimizerState UpdateState::pointers() const {
  const auto pointer = [](const OptionalTensor& t) { return t ? static_cast<float*>(t->mutable_data_ptr()) : nullptr; };
  const bool bf16 = (sum && sum->scalar_type() == ScalarType::BFloat16) ||
                    (exp_avg && exp_avg->scalar_type() == ScalarType::BFloat16);
  return {pointer(sum), pointer(exp_avg), pointer(exp_avg_sq), bf16};
}

namespace {

Optimizer parse_optimizer(const std::string& name) {
  int number = 0;
  std::string known;
  for (const char* each : kOptimizerNames) {
    if (name == each) return static_cast<Optimizer>(number);
    known += join(number++ ? ", " : "", each);
  }
  throw_value_error(join("optimizer must be one of ", known, ", got \"", name, "\""));
}

GradientStep parse_gradient_step(const UpdateArguments& fused) {
  const std::string& mode = fused.weight_decay_mode;
  const double weight_decay = fused.weight_decay;
  GradientStep step;
  const bool l2 = mode == "l2";
  check_value(l2 || mode == "decoupled", "weight_decay_mode must be \"l2\" or \"decoupled\", got \"", mode, "\"");
  check_value(weight_decay >= 0 && std::isfinite(static_cast<float>(weight_decay)), "weight_decay = ", weight_decay,
              " must be at least 0, and finite as float32");
  step.weight_decay = static_cast<float>(weight_decay);
  step.decoupled = !l2;
  const auto limit = [](std::optional<double> clip, const char* name) {
    check_value(!clip || *clip > 0, name, " = ", clip.value_or(0), " must be above 0");
    return clip ? static_cast<float>(*clip) : INFINITY;
  };
  step.clip_value = limit(fused.clip_grad_value, "clip_grad_value");
  step.clip_norm = limit(fused.clip_grad_norm, "clip_grad_norm");
  return step;
}

// Of everything but the rows' rounding.
void check_update(const Tensor& values, const TableLayout& layout, const UpdateState& state, const Tensor& step,
                  const Tensor& lr, Optimizer optimizer, double eps, double beta1, double beta2) {
  check_rank(step, 0, "step");
  check_dtype(step, ScalarType::Long, "step");
  check_same_device(step, values, "step", "values");
  check_rank(lr, 0, "lr");
  check_dtype(lr, ScalarType::Float, "lr");
  check_same_device(lr, values, "lr", "values");
  const bool elementwise = is_elementwise(optimizer), adagrad = optimizer == Optimizer::kAdagrad;
  const bool moments = elementwise && !adagrad;
  const bool rowwise = optimizer == Optimizer::kRowwiseAdam;
  check_state(state.sum, adagrad || optimizer == Optimizer::kRowwiseAdagrad, adagrad, optimizer, values, "sum");
  check_state(state.exp_avg, moments, true, optimizer, values, "exp_avg");
  check_state(state.exp_avg_sq, moments, !rowwise, optimizer, values, "exp_avg_sq");
  check_state(state.beta_powers, moments, false, optimizer, values, "beta_powers");
  check_value(!moments || state.beta_powers->numel() == 2, "beta_powers must have 2 elements, got ",
              moments ? state.beta_powers->numel() : 0);
  check_value(!moments || rowwise || state.exp_avg_sq->numel() == state.exp_avg->numel(),
              "exp_avg_sq must have as many elements as exp_avg");
  check_value(!moments || rowwise || state.exp_avg_sq->scalar_type() == state.exp_avg->scalar_type(),
              "exp_avg_sq must have exp_avg's dtype");
  check_value(eps >= 0 && std::isfinite(static_cast<float>(eps)), "eps = ", eps,
              " must be at least 0, and finite as float32");
  for (const double beta : {beta1, beta2})  // as float32, which 0.99999999 is too close to 1 for
    check_value(beta >= 0 && static_cast<float>(beta) < 1.0f, "beta1 and beta2 must be in [0, 1) as float32, got ",
                beta1, " and ", beta2);
  const bool offsets = elementwise && layout.embedding_dims;
  check_value(state.moment_offsets.has_value() == offsets, "moment_offsets must ", offsets ? "" : "not ",
              "be given: they are for a layout and an optimizer with state for every element");
  if (offsets)
    check_layout_tensor(state.moment_offsets, layout.embedding_dims->numel(), values, "moment_offsets",
                        ScalarType::Long);
}

}  // namespace

void check_row_state(const UpdateState& state, Optimizer optimizer, int64_t rows) {
  const auto check = [&](const OptionalTensor& t, const char* name) {
    check_value(t->numel() >= rows, name, " must have one element per row (", rows, "), got ", t->numel());
  };
  if (optimizer == Optimizer::kRowwiseAdagrad) check(state.sum, "sum");
  if (optimizer == Optimizer::kRowwiseAdam) check(state.exp_avg_sq, "exp_avg_sq");
}

UpdateRounding read_rounding(const Tensor& values, const TableLayout& layout, const std::string& rounding,
                             const OptionalTensor& seed, const OptionalTensor& table_ids) {
  const bool stochastic = rounding == "stochastic";
  check_value(stochastic || rounding == "nearest", "rounding must be \"nearest\" or \"stochastic\", got \"", rounding,
              "\"");
  UpdateRounding out{stochastic, nullptr, nullptr};
  if (seed) {
    check_rank(*seed, 0, "seed");
    check_dtype(*seed, ScalarType::Long, "seed");
    check_same_device(*seed, values, "seed", "values");
    out.seed = seed->const_data_ptr<int64_t>();
  }
  if (table_ids) {
    check_value(layout.embedding_dims.has_value(), "embedding_dims is missing: table_ids mean nothing without it");
    check_layout_tensor(table_ids, layout.embedding_dims->numel(), values, "table_ids", ScalarType::Long);
    out.table_ids = table_ids->const_data_ptr<int64_t>();
  }
  return out;
}

Update read_update(const Tensor& values, const TableLayout& layout, const OptionalTensor& sum, const Tensor& step,
                   const Tensor& lr, const UpdateArguments& fused, const OptionalTensor& grad_scale) {
  const Optimizer optimizer = parse_optimizer(fused.optimizer);
  const UpdateState state{sum, fused.exp_avg, fused.exp_avg_sq, fused.beta_powers, fused.moment_offsets};
  check_update(values, layout, state, step, lr, optimizer, fused.eps, fused.beta1, fused.beta2);
  const UpdateRounding rounding = read_rounding(values, layout, fused.rounding, fused.seed, fused.table_ids);
  const GradientStep gradient_step = parse_gradient_step(fused);
  return {optimizer, state, rounding, gradient_step, optional_scalar(grad_scale, values, "grad_scale")};
}

WeightsShape read_weights_shape(const std::vector<int64_t>& shape, const TableLayout& layout) {
  check_value(!layout.formats,
              "formats must be None: rows of other formats than float32 have no gradient that torch "
              "could take; they are trained by a fused update");
  const size_t rank = layout.embedding_dims ? 1 : 2;
  check_value(shape.size() == rank, "weights_shape must have ", rank, " element(s), got ", shape.size());
  return {shape[0], rank == 2 ? shape[1] : 1};
}

const float* optional_scalar(const OptionalTensor& t, const Tensor& values, const char* name) {
  if (!t) return nullptr;
  check_value(t->numel() == 1, name, " must have one element, got shape ", shape_of(*t));
  check_dtype(*t, ScalarType::Float, name);
  check_same_device(*t, values, name, "values");
  return t->const_data_ptr<float>();
}

const int64_t* optional_status(const OptionalTensor& status, const Tensor& values) {
  if (!status) return nullptr;
  check_shape(*status, {2}, "status");
  check_dtype(*status, ScalarType::Long, "status");
  check_same_device(*status, values, "status", "values");
  return status->const_data_ptr<int64_t>();
}

void throw_bad_position(const BadPosition& bad) {
  if (bad.position >= 0)
    throw std::out_of_range(join("values[", bad.position, "] = ", bad.value, " (feature ", bad.feature, ", bag ",
                                 bad.bag, ") is out of range: ids of this feature must be in [0, ", bad.limit, ")"));
  const int64_t i = -1 - bad.position;
  const std::string where = join("offsets[", i, "] = ", bad.value, " (feature ", bad.feature, ", bag ", bad.bag, ")");
  if (i > 0 && bad.value < bad.previous)
    throw_value_error(join(where, " is below the offset before it, ", bad.previous));
  throw_value_error(join(where, " must be in [0, ", bad.limit, "], the number of values"));
}

STABLE_TORCH_LIBRARY_FRAGMENT(RK_LIBRARY, m) {
  const std::string layout = layout_schema(), bags = "Tensor values, Tensor offsets, Tensor? per_sample_weights=None, ";
  const std::string shape = "SymInt[] weights_shape, Tensor values, Tensor offsets, Tensor? per_sample_weights=None, ";
  const std::string cached = "Tensor? cache_rows=None, Tensor? cache_offsets=None, Tensor? cache_slots=None";
  const std::string places = "Tensor? cache_sets=None, Tensor? cache_set_starts=None, int cache_ways=0";
  // Of the update, which changes the state; of the forward, which only hands it on.
  const auto optimizer = [](const char* d, const char* e, const char* f) {
    return join(
        ", str optimizer=\"rowwise_adagrad\", float eps=1e-08, float beta1=0.9, float beta2=0.999, float "
        "weight_decay=0.0, str "
        "weight_decay_mode=\"l2\", float? clip_grad_value=None, float? clip_grad_norm=None, Tensor",
        d, "? exp_avg=None, Tensor", e, "? exp_avg_sq=None, Tensor", f,
        "? beta_powers=None, Tensor? moment_offsets=None, str rounding=\"stochastic\", Tensor? seed=None, Tensor? "
        "table_ids=None");
  };
  define(m, "embedding_bag(Tensor weights, " + bags + layout + ", bool sparse=False, bool include_last_offset=True, " +
                cached + ", Tensor? cache_tags=None, Tensor? cache_marks=None, " + places +
                ", ScalarType? output_dtype=None) -> (Tensor output, Tensor status)");
  define(m, "embedding_bag_tables(Tensor weights, Tensor[] tables, " + bags + layout +
                ", bool sparse=False, ScalarType? output_dtype=None) -> (Tensor output, Tensor status)");
  define(m, "embedding_bag_fused(Tensor weights, Tensor? sum, Tensor step, Tensor lr, Tensor token, " + bags + layout +
                optimizer("", "", "") + ", " + cached +
                ", Tensor? cache_tags=None, Tensor? cache_marks=None, Tensor? cache_dirty=None, " + places +
                ", Tensor? grad_scale=None, ScalarType? output_dtype=None) -> (Tensor output, Tensor status)");
  define(
      m,
      "embedding_bag_backward_fused_(Tensor(a!) weights, Tensor(b!)? sum, Tensor(c!) step, Tensor lr, Tensor grad, " +
          bags + layout + optimizer("(d!)", "(e!)", "(f!)") +
          ", Tensor? status=None, Tensor? grad_scale=None, Tensor? found_inf=None, Tensor(g!)? cache_rows=None, "
          "Tensor? "
          "cache_offsets=None, Tensor? cache_slots=None, Tensor? cache_tags=None, Tensor? cache_marks=None, "
          "Tensor(h!)? "
          "cache_dirty=None, " +
          places + ") -> ()");
  define(m, "embedding_bag_backward_dense(Tensor grad, " + shape + layout + ", Tensor? weights=None) -> Tensor");
  define(m, "embedding_bag_backward_sparse(Tensor grad, " + shape + layout +
                ", Tensor? weights=None) -> (Tensor rows, Tensor row_grads, Tensor row_counts)");
  define(m, "embedding_bag_backward_per_sample_weights(Tensor grad, Tensor weights, Tensor values, Tensor offsets, " +
                layout + ", " + cached + ") -> Tensor");
}

}  // namespace rec_kernels
