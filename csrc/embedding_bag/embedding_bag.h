// Contract of embedding_bag, lookups of bags in one or many tables, and the checks that all backends share.
//
// Tables. The ops with a layout look up many tables in one call. `weights` is one flat tensor that holds all tables:
// float32, or uint8 with encoded rows (rows/row_formats.h). `layout` and `layout_sizes` give the location of each
// feature's rows and its options (embedding_bag/table_layout.h). embedding_bag.table and its backward ops look up one
// table, [E, D] float32, float16 or bfloat16, or [E, row_bytes] uint8 of `format`, without a layout. Updates decode a
// row, compute in FP32 and encode it; `rounding`, `seed` and `step` determine the rounding. Linear rows number the rows
// of all tables, starting at each table's row_offset, and index row-wise optimizer state. Two features share a table if
// their records name the same one.
//
// Bags. Key-major: bag (f, b) is values[offsets[f*B+b] : offsets[f*B+b+1]]; ids are int32 or int64. Ids of frozen
// features give no gradient. Ids equal to padding_idx are excluded from the sum, from n and from every gradient.
//
// Parts. An id of a feature with several parts has row (id / divisor) % modulus in each of them. The rows are combined:
// - combine 0 (concat): every part has its own columns, like a separate feature with the same bags;
// - 1 (add), 2 (mult): the sum or product in the order of parts, which have the same width, format and column.
// The parts of a feature read different tables. Gradients of products need the rows before the update: dense and sparse
// backward read `weights` only for products.
//
// Output. [B, output_dim], each part in its columns. Every element is written; an empty bag gives zeros. With
// bag_starts [F + 1], every feature has its own batch size: feature f has bags [bag_starts[f], bag_starts[f + 1]), and
// the output is [bag_starts[F], widest_feature] with one row per bag, whose columns start at 0 and end with zeros. With
// inverse [G, B] and groups [F] in addition, samples share bags: the output is [B, output_dim] as without bag_starts,
// and row b of a feature of group g >= 0 is the pooled bag inverse[g, b]. All features of a group have the same number
// of bags, at most B; a feature with groups[f] == -1 has B bags. An inverse index out of range raises IndexError on the
// CPU; on a GPU the row is zeros, and status is kBadLayout + 1 + the number of offsets + the position in `inverse`.
// Sums are FP32, in ascending position: acc + v, or fmaf(weight, v, acc); `mean` divides once by n, the number of ids
// that contribute. The result may be rounded to half precision at the end.
//
// Hashing. With id_limit kEveryId or kEveryOtherId every integer is an id, and its row is the floor remainder: drivers
// replace these ids by rows in a copy of all ids, which the kernels read.
//
// Bounds. "error": IndexError names the first bad id by feature and bag, and nothing is changed. "ignore": bad ids are
// skipped and counted. "none": no check. `status` is int64 [2]: the smallest bad position in `values` (INT64_MAX if no
// id is bad), and the number of ids skipped as out of range. Offsets are always checked.
//
// Gradients of weights and per_sample_weights are computed from the FP32 gradient of the output. Occurrences of a row
// are summed in chunks of 64 in the order (feature, bag, position); see docs/numerics.md. The gradient of a shared bag
// is the sum over its samples, in ascending order and the same chunks. values and offsets are not differentiable.
#pragma once

#include <vector>

#include "core/boxing.h"
#include "core/stable.h"
#include "embedding_bag/bags.h"
#include "rows/row_formats.h"

namespace rec_kernels {

// Alignment, in bytes, of each table in the `weights` of embedding_bag_tables (TABLE_ALIGNMENT in
// rec_kernels/ops/embedding_bag.py).
constexpr int64_t kTableAlignment = 64;

// Unchecked arguments: the bags of a call and their tables' layout. All but the first four have defaults.
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
// Unchecked bag arguments of embedding_bag.table and its backward ops, which have no layout.
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

// A layout whose sizes are checked, but not yet its records.
struct Layout {
  const TablePart* parts;  // on the device of the ids
  int64_t num_parts;
  LayoutSizes sizes;
};
RK_EXPORT Layout read_layout(const Tensor& layout, const std::vector<int64_t>& sizes, const Tensor& values);
// Throws the error for a fault of record i.
[[noreturn]] void throw_layout_fault(const Layout& layout, const LayoutLimits& limits, int64_t i, LayoutFault fault);

// True for "mean".
inline bool parse_pooling(const std::string& pooling) { return parse_choice(pooling, "pooling", "sum", "mean"); }

// Checks the output dtype. Not exported: the mangled symbol would contain a torch type.
inline ScalarType read_output_dtype(std::optional<ScalarType> dtype) {
  const ScalarType type = dtype.value_or(ScalarType::Float);
  check_value(type == ScalarType::Float || type == ScalarType::Half || type == ScalarType::BFloat16,
              "output_dtype must be torch.float32, torch.float16 or torch.bfloat16, got ", dtype_name(type));
  return type;
}

// The checked bags of a call; owns contiguous copies of non-contiguous tensors.
struct BagTensors {
  Tensor values, offsets;
  OptionalTensor per_sample_weights;
  OptionalTensor inverse{};             // [G, B]: index of each sample's bag in each group
  Bags bags{};                          // views of these tensors; each backend adds its own fields
  int64_t num_rows = 0;                 // upper bound of linear rows, exclusive
  int64_t output_dim = 0, max_dim = 0;  // output columns, and columns of the widest part
  bool any_mean = false;                // some feature uses mean pooling
  bool multiplies = false;              // some feature multiplies the rows of its parts
  bool raises = false;                  // an id out of range raises; on a GPU, it skips the update
};
RK_EXPORT BagTensors check_bags(const BagArguments& bags, const Layout& layout);
// Checks the bags of a call without a layout.
RK_EXPORT BagTensors check_bags(const OneTableBags& bags, const Part& table);

// Limits of a call without optimizer state and cache: the size of the weights.
inline LayoutLimits limits_of(int64_t num_parts, const Tensor& weights) {
  return {num_parts, weights.numel() * static_cast<int64_t>(weights.element_size()), -1, -1, -1};
}

// Checks the table of a call without a layout: [rows, columns] of a float dtype, or of bytes of `format`.
RK_EXPORT Part read_one_table(const Tensor& weights, const Tensor& values, const std::optional<std::string>& format,
                              int64_t embedding_dim, bool mean);
// Describes the table that a gradient of this shape belongs to.
using Shape = std::vector<int64_t>;
RK_EXPORT Part read_one_table(const Shape& weights_shape, bool mean);
inline Sizes sizes_of(const Tensor& weights) { return weights.sizes(); }
inline Sizes sizes_of(const Shape& shape) { return {shape.data(), shape.size()}; }
inline ScalarType type_of(const Tensor& weights) { return weights.scalar_type(); }
inline ScalarType type_of(const Shape&) { return ScalarType::Float; }
// Checks dtype, rank and device of the `weights` of a call with a layout. For values on a GPU, host memory is allowed.
RK_EXPORT void check_weights(const Tensor& weights, const Tensor& values, const Layout& layout);
// Checks rank, dtype and device of the tables of embedding_bag_tables, and that they fill `weights`.
RK_EXPORT void check_tables_of(const Tensor& weights, const std::vector<Tensor>& tables);
// Bytes of a table in the `weights` of embedding_bag_tables, up to the next table.
inline int64_t aligned_bytes(const Tensor& table) {
  return ceil_div(table.numel() * static_cast<int64_t>(table.element_size()), kTableAlignment) * kTableAlignment;
}
// Checks that tables have rows of floats: rows of other formats have no gradient for torch, only fused updates.
RK_EXPORT void check_trainable(const Layout& layout);
RK_EXPORT void check_gradient(const Tensor& grad, const Tensor& values, int64_t rows, int64_t output_dim);
// Data pointer of an optional one-element float32 tensor, or of an optional status; null if absent.
RK_EXPORT const float* optional_scalar(const OptionalTensor& t, const Tensor& values, const char* name);
RK_EXPORT const int64_t* optional_status(const OptionalTensor& status, const Tensor& values);

// Throws the error for a bad position: std::out_of_range for an id (with feature, bag and the allowed range),
// std::invalid_argument for an offset. `position` is an index into values, or -1 - i for offsets[i].
struct BadPosition {
  int64_t position;
  int64_t feature;
  int64_t bag;
  int64_t value;
  int64_t limit;     // ids: id_limit; offsets: number of ids
  int64_t previous;  // offsets: the preceding offset
};
[[noreturn]] void throw_bad_position(const BadPosition& bad);

}  // namespace rec_kernels
