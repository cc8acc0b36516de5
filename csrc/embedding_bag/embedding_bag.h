// embedding_bag: lookups of bags in one table or in many, the contract that every backend keeps, and the checks they
// share.
//
// Tables. The ops with a layout look up in many tables in one call. `weights` is one flat tensor that holds all of
// them: float32, or uint8 with rows of formats (rows/row_formats.h). `layout` and `layout_sizes` say where the rows of
// each feature lie and what becomes of them (embedding_bag/table_layout.h). embedding_bag.table and its backward ops
// look up in one table, [E, D] float32, float16 or bfloat16, or [E, row_bytes] uint8 of `format`, and need no layout.
// Updates decode a row, work in FP32, and encode it; `rounding`, `seed` and `step` say how it is rounded. Rows of all
// tables are numbered through, from each table's row_offset on: a row's place in optimizer state. Two features share a
// table by naming the same one.
//
// Bags. Key-major: bag (f, b) is values[offsets[f*B+b] : offsets[f*B+b+1]]; ids int32 or int64. The ids of frozen
// features are no occurrences: they give no gradient. Ids equal to padding_idx are left out, of the sum, of n and of
// every gradient.
//
// Parts. An id of a feature with several parts has, in each of them, row (id / divisor) % modulus. The rows become one:
// - combine 0 (concat): every part has columns of its own, as if it were a feature with the same bags;
// - 1 (add), 2 (mult): their sum or product, in their order; they have one width, format and column.
// The parts of a feature read different tables. Gradients of products need the rows as they are before the update:
// dense and sparse backward read `weights` there, and only there.
//
// Output. [B, output_dim], each part in its columns. Every element is written; an empty bag gives zeros. With
// bag_starts [F + 1], features have batch sizes of their own: bags bag_starts[f] up to bag_starts[f + 1] are f's, the
// output has a row for each bag, [bag_starts[F], widest_feature]; the columns of every feature start at 0, and those
// behind them are zeros. With inverse [G, B] and groups [F], too, bags are shared by samples: the output is [B,
// output_dim] as without bag_starts, and in the columns of a feature of group g >= 0, row b is what its bag
// inverse[g, b] gives; the features of a group have one number of bags, at most B. A feature in no group, groups[f] ==
// -1, has B bags. An inverse out of range is an IndexError on the CPU; on a GPU zeros, noted in the status as
// kBadLayout + 1 + the number of offsets + its place in `inverse`. Sums are FP32, in ascending position: acc + v, or
// fmaf(weight, v, acc); `mean` divides once by n, the number of ids that count. They may be rounded to half precision
// at the end.
//
// Hashes. Where id_limit is kEveryId or kEveryOtherId, every integer is an id, of the floor remainder's row: drivers
// write the rows of these ids to a copy of all ids, and kernels read that.
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
#include "embedding_bag/bags.h"
#include "rows/row_formats.h"

namespace rec_kernels {

// Elements that embedding_bag_tables aligns each table in `weights` to (TABLE_ALIGNMENT in
// rec_kernels/ops/embedding_bag.py).
constexpr int64_t kTableAlignment = 16;

// The bags of a call and the layout of their tables, as they arrive. All but the first four have defaults.
struct BagArguments {
  const Tensor &values, &offsets, &layout;
  const std::vector<int64_t>& layout_sizes;
  const OptionalTensor &per_sample_weights, &bag_starts, &inverse;
  const std::optional<std::vector<int64_t>>& groups;
  const std::string& bounds_check;
};
template <>
struct ArgumentsOf<const BagArguments&> {
  using types = Types<const Tensor&, const Tensor&, const Tensor&, const std::vector<int64_t>&, const OptionalTensor&,
                      const OptionalTensor&, const OptionalTensor&, const std::optional<std::vector<int64_t>>&,
                      const std::string&>;
};
// BagArguments of embedding_bag.table and its backward ops, whose one table needs no layout.
struct OneTableBags {
  const Tensor &values, &offsets;
  const OptionalTensor& per_sample_weights;
  const std::string& pooling;
  bool include_last_offset;
  int64_t padding_idx;
  const std::string& bounds_check;
};
template <>
struct ArgumentsOf<const OneTableBags&> {
  using types =
      Types<const Tensor&, const Tensor&, const OptionalTensor&, const std::string&, bool, int64_t, const std::string&>;
};

// The layout of a call, checked but for its records.
struct Layout {
  const TablePart* parts;  // on the device of the ids
  int64_t num_parts;
  LayoutSizes sizes;
};
RK_EXPORT Layout read_layout(const Tensor& layout, const std::vector<int64_t>& sizes, const Tensor& values);
// Throws what is wrong with record i.
[[noreturn]] void throw_layout_fault(const Layout& layout, const LayoutLimits& limits, int64_t i, LayoutFault fault);

// True of "mean".
inline bool parse_pooling(const std::string& pooling) { return parse_choice(pooling, "pooling", "sum", "mean"); }

// Dtype of the output. Not exported: the symbol would contain torch's name of the type.
inline ScalarType read_output_dtype(std::optional<ScalarType> dtype) {
  const ScalarType type = dtype.value_or(ScalarType::Float);
  check_value(type == ScalarType::Float || type == ScalarType::Half || type == ScalarType::BFloat16,
              "output_dtype must be torch.float32, torch.float16 or torch.bfloat16, got ", dtype_name(type));
  return type;
}

// The checked bags of a call; owns contiguous copies where the caller's tensors were not.
struct BagTensors {
  Tensor values, offsets;
  OptionalTensor per_sample_weights;
  OptionalTensor inverse{};             // [G, B], of shared bags: which bag of a group each sample has
  Bags bags{};                          // of these tensors, without what only kernels of one device know
  int64_t num_rows = 0;                 // above every linear row number
  int64_t output_dim = 0, max_dim = 0;  // columns of the output, and of the widest part
  bool any_mean = false;                // whether a feature's bags are averaged
  bool multiplies = false;              // whether a feature multiplies rows of its parts
  bool raises = false;                  // for an id out of range; on a GPU, its update is skipped
};
RK_EXPORT BagTensors take_bags(const BagArguments& bags, const Layout& layout);
// The bags of a call without a layout.
RK_EXPORT BagTensors take_bags(const OneTableBags& bags, const Part& table);

// The memory that a call's layout is checked against: that of the weights, and of no state and no cache.
inline LayoutLimits limits_of(int64_t num_parts, const Tensor& weights) {
  return {num_parts, weights.numel() * static_cast<int64_t>(weights.element_size()), -1, -1, -1};
}

// Reads the one table of a call without a layout: weights [rows, columns] of a float dtype, or uint8 of `format`.
RK_EXPORT Part read_one_table(const Tensor& weights, const Tensor& values, const std::optional<std::string>& format,
                              int64_t embedding_dim, bool mean);
// Reads the table that a gradient of this shape is for.
using Shape = std::vector<int64_t>;
RK_EXPORT Part read_one_table(const Shape& weights_shape, bool mean);
inline Sizes sizes_of(const Tensor& weights) { return weights.sizes(); }
inline Sizes sizes_of(const Shape& shape) { return {shape.data(), shape.size()}; }
// Dtype, rank and memory of `weights` in a call with a layout. Beside values on a GPU, weights may be in host memory.
RK_EXPORT void check_weights(const Tensor& weights, const Tensor& values, const Layout& layout);
// Rank, dtype and device of the tables of embedding_bag_tables, and that they fill `weights`.
RK_EXPORT void check_tables_of(const Tensor& weights, const std::vector<Tensor>& tables);
// Checks that tables are floats, which have gradients that torch can take.
RK_EXPORT void check_trainable(const Layout& layout);
RK_EXPORT void check_gradient(const Tensor& grad, const Tensor& values, int64_t rows, int64_t output_dim);
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
  int64_t limit;     // ids: id_limit; offsets: number of ids
  int64_t previous;  // offsets: the offset before
};
[[noreturn]] void throw_bad_position(const BadPosition& bad);

}  // namespace rec_kernels
