// embedding_bag over many tables in one call: the contract that every backend keeps, and the checks they share.
//
// Tables. `weights` is one tensor that holds every table. Without `formats` it is float32: [E, D] for a single table,
// or flat with feature f's table at weights[weight_offsets[f] : + num_embeddings[f] * embedding_dims[f]], row-major.
// With `formats`, uint8: [E, row_bytes] with embedding_dim columns a row, or flat with weight_offsets in bytes; the
// table of feature f has rows of formats[format_of[f]] (ops/row_formats.h), of formats[0] without format_of. Updates
// decode a row, work in FP32, and encode it: `rounding`, `seed`, `step` and table_ids[f] say how it is rounded. Rows of
// all tables are numbered through: row i of feature f's table is linear row row_offsets[f] + i, its place in optimizer
// state. Two features share a table by naming the same ranges; ranges that overlap in part are refused.
//
// Bags. Key-major: bag (f, b) is values[offsets[f*B+b] : offsets[f*B+b+1]]; ids int32 or int64. The ids of `frozen`
// features are no occurrences: they give no gradient. Ids equal to padding_idx are left out, of the sum, of n and of
// every gradient.
//
// Partitions. With partition_starts [F + 1], feature f has parts partition_starts[f] up to partition_starts[f + 1], at
// most kMaxParts. Above and below, what is said of a feature's table is then said of a part's: weight_offsets,
// row_offsets, num_embeddings, embedding_dims, output_offsets, format_of, table_ids and moment_offsets have an element
// for each part; mean, frozen, bag_starts, id_limits and combine are of features. An id in [0, id_limits[f]) has, in
// part p, row (id / divisors[p]) % moduli[p]. combine[f] says what the rows of an id become:
// - 0 (concat): every part has columns of its own, as if it were a feature with the same bags;
// - 1 (add), 2 (mult): their sum or product, in their order; they have one width, format and output_offset.
// The parts of a feature read different tables. Gradients of products need the rows as they are before the update:
// `weights` of the dense and sparse backward, and there only. max_parts and multiplies tell the host what
// partition_starts and combine say.
//
// Output. [B, output_dim], feature f in columns output_offsets[f] : + embedding_dims[f], which follow those of the
// feature or part before. Every element is written; an empty bag gives zeros. With bag_starts [F + 1], features have
// batch sizes of their own: bags bag_starts[f] up to bag_starts[f + 1] are f's, the output has a row for each bag,
// [bag_starts[F], output_dim], output_dim being the most columns of a feature or more; the columns of every feature
// start at 0, and those behind them are zeros. With inverse [G, B] and groups [F], too, bags are shared by samples: the
// output is [B, output_dim] with columns as without bag_starts, and in the columns of a feature of group g >= 0, row b
// is what its bag inverse[g, b] gives; the features of a group have one number of bags, at most B. A feature in no
// group, groups[f] == -1, has B bags. An inverse out of range is an IndexError on the CPU; on a GPU zeros, noted in the
// status as kBadLayout + 1 + the number of offsets + its place in `inverse`. Sums are FP32, in ascending position: acc
// + v, or fmaf(weight, v, acc); `mean` divides once by n, the number of ids that count. They may be rounded to half
// precision at the end.
//
// Bounds. "error": IndexError names the first bad id by feature and bag, and nothing is changed. "ignore": bad ids are
// left out and counted. "none": no check. `status` is int64 [2]: the smallest bad position in `values` (INT64_MAX when
// there is none), and how many ids were left out for being out of range. Offsets are always checked.
//
// Gradients: of weights and per_sample_weights, from FP32 gradients of the output. Occurrences of a row are summed in
// chunks of 64 in the order (feature, bag, position); docs/numerics.md has the rule. The gradient of a shared bag is
// the sum of its samples', in ascending order and such chunks. Not differentiable in values and offsets.
#pragma once

#include <vector>

#include "core/boxing.h"
#include "core/stable.h"
#include "ops/bags.h"
#include "ops/row_formats.h"
#include "optimizers/elementwise.h"
#include "optimizers/gradient_step.h"

namespace rec_kernels {

// Where embedding_bag_tables expects its tables in `weights`: each at the next multiple of so many elements
// (TABLE_ALIGNMENT in rec_kernels/ops/embedding_bag.py).
constexpr int64_t kTableAlignment = 16;

// The layout arguments, as they arrive. All absent: one table, weights [E, D].
struct TableLayout {
  const OptionalTensor& weight_offsets;
  const OptionalTensor& row_offsets;
  const OptionalTensor& num_embeddings;
  const OptionalTensor& embedding_dims;
  const OptionalTensor& output_offsets;
  const OptionalTensor& mean;
  int64_t output_dim;
  int64_t num_rows;           // no linear row number is as large; 0: not given
  int64_t max_embedding_dim;  // no embedding_dim is larger; 0: not given
  const std::optional<std::vector<std::string>>& formats;
  const OptionalTensor& format_of;
  int64_t embedding_dim;  // of the rows of one table without a layout, whose weights are bytes; else 0
  const OptionalTensor& bag_starts;
  const OptionalTensor& inverse;
  const std::optional<std::vector<int64_t>>& groups;
  const OptionalTensor& frozen;
  const OptionalTensor& partition_starts;
  const OptionalTensor& divisors;
  const OptionalTensor& moduli;
  const OptionalTensor& id_limits;
  const OptionalTensor& combine;
  int64_t max_parts;               // no feature has more; 0: not given
  std::optional<bool> multiplies;  // whether a feature multiplies rows of its parts; none: not given
};

template <>
struct ArgumentsOf<const TableLayout&> {
  using types = Types<const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                      const OptionalTensor&, const OptionalTensor&, int64_t, int64_t, int64_t,
                      const std::optional<std::vector<std::string>>&, const OptionalTensor&, int64_t,
                      const OptionalTensor&, const OptionalTensor&, const std::optional<std::vector<int64_t>>&,
                      const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                      const OptionalTensor&, const OptionalTensor&, int64_t, std::optional<bool>>;
};

// Of the elements of `weights`.
inline int64_t element_bytes(const TableLayout& layout) { return layout.formats ? 1 : 4; }

// How bags are read, as it arrives.
struct BagReading {
  const std::string& pooling;
  int64_t padding_idx;
  const std::string& bounds_check;
};
template <>
struct ArgumentsOf<const BagReading&> {
  using types = Types<const std::string&, int64_t, const std::string&>;
};

// The same, read.
struct BagOptions {
  bool mean;  // of every feature, unless TableLayout::mean says otherwise per feature
  int64_t padding_idx;
  bool check_ids;
  bool raise;
};

enum class Optimizer { kSgd, kRowwiseAdagrad, kAdagrad, kAdam, kRowwiseAdam, kLamb };

// Whether it keeps state for every element of a row, and then which of optimizers/elementwise.h it is.
inline bool is_elementwise(Optimizer o) { return o != Optimizer::kSgd && o != Optimizer::kRowwiseAdagrad; }
inline ElementwiseKind elementwise_kind(Optimizer o) {
  static_assert(static_cast<int>(Optimizer::kLamb) - static_cast<int>(Optimizer::kAdagrad) ==
                    static_cast<int>(ElementwiseKind::kLamb),
                "both lists have the same order");
  if (!is_elementwise(o)) return ElementwiseKind::kAdagrad;  // which nobody asks for
  return static_cast<ElementwiseKind>(static_cast<int>(o) - static_cast<int>(Optimizer::kAdagrad));
}

// What a fused update is to do, as it arrives.
struct UpdateArguments {
  const std::string& optimizer;
  double eps, beta1, beta2, weight_decay;
  const std::string& weight_decay_mode;
  std::optional<double> clip_grad_value, clip_grad_norm;
  const OptionalTensor &exp_avg, &exp_avg_sq, &beta_powers, &moment_offsets;
  const std::string& rounding;
  const OptionalTensor &seed, &table_ids;
};
template <>
struct ArgumentsOf<const UpdateArguments&> {
  using types = Types<const std::string&, double, double, double, double, const std::string&, std::optional<double>,
                      std::optional<double>, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                      const OptionalTensor&, const std::string&, const OptionalTensor&, const OptionalTensor&>;
};

// State of a fused optimizer, as it arrives. `sum`: per row for row-wise Adagrad, per element for Adagrad; exp_avg per
// element; exp_avg_sq per element, for row-wise Adam per row; beta_powers [2]: beta1^t and beta2^t after t updates.
// Element-wise state of feature f's table starts at moment_offsets[f]; without a layout, at 0. It may be bfloat16.
struct UpdateState {
  const OptionalTensor &sum, &exp_avg, &exp_avg_sq, &beta_powers, &moment_offsets;

  // Element-wise state, of which there is at least one for such an optimizer.
  const Tensor& moments() const { return exp_avg ? *exp_avg : *sum; }
  RK_EXPORT OptimizerState pointers() const;
};

// Of the output's elements. Not exported: torch's name of the type would be in that of the function.
inline ScalarType read_output_dtype(std::optional<ScalarType> dtype) {
  const ScalarType type = dtype.value_or(ScalarType::Float);
  check_value(type == ScalarType::Float || type == ScalarType::Half || type == ScalarType::BFloat16,
              "output_dtype must be torch.float32, torch.float16 or torch.bfloat16");
  return type;
}

// The arguments of TableLayout and BagReading in a schema. The defaults describe one table, weights [E, D].
std::string layout_schema();
// That `size` numbers, one for each feature or part, are there; `asks` says why they have to be.
void check_layout_tensor(const OptionalTensor& t, int64_t size, const Tensor& values, const char* name,
                         ScalarType dtype,
                         const char* asks = "embedding_dims is given, so the layout of every feature");

RK_EXPORT BagOptions parse_bag_options(const BagReading& reading);

// Shapes, dtypes and devices of everything but `weights`; returns the number of features F.
RK_EXPORT int64_t check_bags(const Tensor& values, const Tensor& offsets, const OptionalTensor& per_sample_weights,
                             const TableLayout& layout, bool include_last_offset);
// The bags of a call whose tensors are contiguous and checked. Without include_last_offset, offsets name where bags
// start and the last one ends with the ids.
RK_EXPORT Bags read_bags(const Tensor& values, const Tensor& offsets, const OptionalTensor& per_sample_weights,
                         const BagOptions& options, const TableLayout& layout, int64_t features,
                         bool include_last_offset);
// How many parts the features have together: the elements of the tensors about tables.
inline int64_t count_parts(const TableLayout& layout, int64_t features) {
  return layout.embedding_dims ? layout.embedding_dims->numel() : features;
}
// What a call without a layout says of its table, whose weights are [rows, columns].
struct OneTable {
  RowFormat format;
  int64_t embedding_dim, row_bytes;
};
RK_EXPORT OneTable read_one_table(const TableLayout& layout, int64_t rows, int64_t columns);
inline Feature one_table(const OneTable& table, int64_t rows, bool mean) {
  Feature f{};
  f.num_embeddings = f.id_limit = rows;
  f.embedding_dim = table.embedding_dim;
  f.row_bytes = table.row_bytes;
  f.format = table.format;
  f.mean = mean;
  return f;
}
// The formats by number; none: `weights` are floats.
RK_EXPORT std::vector<RowFormat> parse_formats(const TableLayout& layout);
// Beside values on a GPU, weights may be in host memory.
RK_EXPORT void check_weights(const Tensor& weights, const Tensor& values, const TableLayout& layout);
// The weights that a gradient is of, which it needs where rows are multiplied: the other factors.
RK_EXPORT void check_own_weights(const OptionalTensor& weights, const std::vector<int64_t>& shape, const Tensor& values,
                                 const TableLayout& layout, bool multiplies);
RK_EXPORT void check_gradient(const Tensor& grad, const Tensor& values, int64_t rows, int64_t output_dim);
// That row-wise state has an element for each of `rows` rows.
RK_EXPORT void check_row_state(const UpdateState& state, Optimizer optimizer, int64_t rows);

// How updated rows are encoded. The seed stays where it is; table_ids are [F], or null: 0.
struct UpdateRounding {
  bool stochastic;
  const int64_t* seed;
  const int64_t* table_ids;
};
RK_EXPORT UpdateRounding read_rounding(const Tensor& values, const TableLayout& layout, const std::string& rounding,
                                       const OptionalTensor& seed, const OptionalTensor& table_ids);

// What a fused update is asked for, whoever makes it and when.
struct Update {
  Optimizer optimizer;
  UpdateState state;
  UpdateRounding rounding;
  GradientStep gradient_step;  // the gradient's way to the optimizer, clipping and weight decay, as it arrives
  const float* grad_scale;     // or null: 1
};
// Checks it, too, but for what needs the bags or the tables: check_row_state(), moment_offsets.
RK_EXPORT Update read_update(const Tensor& values, const TableLayout& layout, const OptionalTensor& sum,
                             const Tensor& step, const Tensor& lr, const UpdateArguments& fused,
                             const OptionalTensor& grad_scale);

// Rows and columns of the single table of a call without a layout, from the shape its gradient is to have; with a
// layout the number of floats in `weights`, and 1.
struct WeightsShape {
  int64_t rows, columns;
};
RK_EXPORT WeightsShape read_weights_shape(const std::vector<int64_t>& shape, const TableLayout& layout);

// The memory of an optional one-element float32 tensor, and of an optional status; null without one.
RK_EXPORT const float* optional_scalar(const OptionalTensor& t, const Tensor& values, const char* name);
RK_EXPORT const int64_t* optional_status(const OptionalTensor& status, const Tensor& values);

// Throws what a bad position means: std::out_of_range for an id (with feature, bag and the allowed range),
// std::invalid_argument for an offset. `position` is an index into values, or -1 - i for offsets[i].
struct BadPosition {
  int64_t position;
  int64_t feature;
  int64_t bag;
  int64_t value;
  int64_t limit;     // ids: num_embeddings; offsets: number of ids
  int64_t previous;  // offsets: the offset before
};
[[noreturn]] void throw_bad_position(const BadPosition& bad);

}  // namespace rec_kernels
