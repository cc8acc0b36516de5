// Common definitions of the ops on jagged rows: jagged_dedup, jagged_index_select, jagged_windows, jagged_overlaps,
// jagged_permute, jagged_bucketize.
//
// Row r of a jagged tensor is values[offsets[r] : offsets[r+1]]; values [N] or [N, D], offsets int32 or int64,
// non-decreasing and in [0, N]. A key-major batch (TorchRec's KeyedJaggedTensor) is a jagged tensor whose rows are
// bags: those of feature 0, then those of feature 1, and so on; `strides` is the number of bags of each feature.
//
// Every op returns a `status`, int64 [2], like embedding_bag: the smallest bad position (INT64_MAX: none; INT64_MIN + 1
// + i for offsets[i]) and the number of values out of range. The CPU raises instead. A GPU cannot raise without
// synchronization and skips bad input: a row with bad offsets, and the row of an index out of range, are empty.
#pragma once

#include <vector>

#include "core/stable.h"
#include "embedding_bag/bags.h"

namespace rec_kernels {

// Integers of either width.
struct Integers {
  const void* data;
  bool wide;

  explicit Integers(const int64_t* numbers) : data(numbers), wide(true) {}
  explicit Integers(const Tensor& t) : data(t.const_data_ptr()), wide(t.scalar_type() == ScalarType::Long) {}
  RK_HOST_DEVICE int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

// The rows as `Bags`; its ids are valid only if values are integers. The tensors must be contiguous and outlive it.
inline Bags jagged_rows(const Tensor& values, const Tensor& offsets) {
  Bags b{};
  b.ids = values.const_data_ptr();
  b.ids64 = values.scalar_type() == ScalarType::Long;
  b.offsets = offsets.const_data_ptr();
  b.num_ids = values.size(0);
  b.num_offsets = offsets.size(0);
  b.num_bags = b.num_offsets - 1;
  b.num_features = 1;
  b.batch = b.num_bags;
  b.padding_idx = -1;
  b.offsets64 = offsets.scalar_type() == ScalarType::Long;
  return b;
}

// Each throws std::invalid_argument naming the argument.
void check_jagged(const Tensor& values, const Tensor& offsets);
// Checks optional weights [N] float32.
void check_jagged_weights(const Tensor& values, const OptionalTensor& weights);
// Checks integer ids [N] and optional weights.
void check_jagged_ids(const Tensor& values, const Tensor& offsets, const OptionalTensor& weights);
// Returns [F + 1], the first bag of each feature with these batch sizes, which must add up to the rows of `offsets`.
std::vector<int64_t> starts_of(const std::vector<int64_t>& strides, const Tensor& offsets);
// Checks that a number of values fits into offsets of this dtype, the dtype of argument `name`.
RK_EXPORT void check_fits(int64_t values, const Tensor& offsets, const char* name = "offsets");
// Checks `total`, the number of output values, if given.
void check_total(std::optional<int64_t> total, const Tensor& offsets, const char* name = "offsets");
// A new tensor of `total` rows like those of `values`.
inline Tensor new_rows(const Tensor& values, int64_t total) {
  if (values.dim() == 1) return new_tensor(values, {total}, values.scalar_type());
  return new_tensor(values, {total, values.size(1)}, values.scalar_type());
}
// Throws if offsets [R + 1] in host memory decrease or are out of [0, N].
void check_offsets(const Bags& rows);

}  // namespace rec_kernels
