// Shared parts of the ops on jagged rows: jagged_dedup, jagged_index_select, jagged_windows, jagged_overlaps,
// jagged_permute, jagged_bucketize.
//
// Row r of a jagged tensor is values[offsets[r] : offsets[r+1]]; values [N] or [N, D], offsets int32 or int64, rising,
// in [0, N]. A key-major batch (TorchRec's KeyedJaggedTensor) is one, whose rows are bags: feature 0's, then feature
// 1's, and so on; `strides` says how many bags each feature has.
//
// Every op returns a `status`, int64 [2], as embedding_bag does: the smallest bad position (INT64_MAX: none; of
// offsets[i], INT64_MIN + 1 + i) and how many numbers are out of range. The CPU raises instead. A GPU cannot raise in
// time, and leaves out what is bad: a row with bad offsets is empty, and an index that is out of range names an empty
// row.
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

// The rows as `Bags`, whose ids mean something if the values are integers. The tensors must be contiguous, and outlive
// it.
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
// Weights [N] float32, if there are any.
void check_jagged_weights(const Tensor& values, const OptionalTensor& weights);
// Integer ids [N], and such weights.
void check_jagged_ids(const Tensor& values, const Tensor& offsets, const OptionalTensor& weights);
// [F + 1]: where the bags of features with these batch sizes start; they must end with the rows of `offsets`.
std::vector<int64_t> starts_of(const std::vector<int64_t>& strides, const Tensor& offsets);
// Checks that so many values fit into offsets of this dtype, which is that of argument `name`.
RK_EXPORT void check_fits(int64_t values, const Tensor& offsets, const char* name = "offsets");
// Checks a number of values that the caller gives, if it does.
void check_total(std::optional<int64_t> total, const Tensor& offsets, const char* name = "offsets");
// A new tensor of `total` rows like those of `values`.
inline Tensor new_rows(const Tensor& values, int64_t total) {
  if (values.dim() == 1) return new_tensor(values, {total}, values.scalar_type());
  return new_tensor(values, {total, values.size(1)}, values.scalar_type());
}
// Throws if offsets [R + 1] in host memory do not rise or leave [0, N].
void check_offsets(const Bags& rows);

}  // namespace rec_kernels
