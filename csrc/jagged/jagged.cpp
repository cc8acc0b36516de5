#include "jagged/jagged.h"

#include <limits>

namespace rec_kernels {

void check_jagged(const Tensor& values, const Tensor& offsets) {
  check_value(values.dim() == 1 || values.dim() == 2, "values must be [N] or [N, D], got shape ", shape_of(values));
  check(offsets, "offsets").rank(1).integer();
  check_value(offsets.size(0) >= 1, "offsets must have one element more than there are rows, got none");
  check(offsets, "offsets").on_device_of(values, "values");
}

void check_jagged_ids(const Tensor& values, const Tensor& offsets, const OptionalTensor& weights) {
  check(values, "values").rank(1).integer();
  check_jagged(values, offsets);
  check_jagged_weights(values, weights);
}

void check_jagged_weights(const Tensor& values, const OptionalTensor& weights) {
  if (!weights) return;
  check(*weights, "weights").dtype(ScalarType::Float).shape({values.size(0)}).on_device_of(values, "values");
}

std::vector<int64_t> starts_of(const std::vector<int64_t>& strides, const Tensor& offsets) {
  const int64_t bags = offsets.size(0) - 1;
  std::vector<int64_t> starts{0};
  for (size_t f = 0; f < strides.size(); ++f) {
    const int64_t most = bags - starts.back();
    check_value(strides[f] >= 0 && strides[f] <= most, "strides[", f, "] = ", strides[f], " must be in [0, ", most,
                "]: offsets describe ", bags, " bags");
    starts.push_back(starts.back() + strides[f]);
  }
  check_value(starts.back() == bags, "strides are of ", starts.back(), " bags, and offsets of ", bags);
  return starts;
}

void check_fits(int64_t values, const Tensor& offsets, const char* name) {
  check_value(offsets.scalar_type() == ScalarType::Long || values <= std::numeric_limits<int32_t>::max(),
              "the result has ", values, " values, more than int32 offsets can name: give int64 ", name);
}

void check_total(std::optional<int64_t> total, const Tensor& offsets, const char* name) {
  check_value(total.value_or(0) >= 0, "total = ", total.value_or(0), " must be 0 or more");
  check_fits(total.value_or(0), offsets, name);
}

void check_offsets(const Bags& rows) {
  const int64_t bad = rows.bad_offset(0, rows.num_bags);
  if (bad == kNoBadPosition) return;
  const int64_t i = -1 - bad, least = i == 0 ? 0 : rows.offset(i - 1);
  check_value(false, "offsets[", i, "] = ", rows.offset(i), " must be in [", least, ", ", rows.num_ids,
              "]: offsets rise, and end with the values");
}

}  // namespace rec_kernels
