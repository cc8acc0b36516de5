#include "jagged/jagged_permute.h"

#include "core/schema.h"

namespace rec_kernels {

std::vector<int64_t> check_jagged_permute(const Tensor& values, const Tensor& offsets,
                                          const std::vector<int64_t>& permute, const std::vector<int64_t>& strides,
                                          const OptionalTensor& weights, std::optional<int64_t> total) {
  check(values, "values").rank(1);
  check_jagged(values, offsets);
  check_jagged_weights(values, weights);
  std::vector<int64_t> starts = starts_of(strides, offsets);
  const auto features = static_cast<int64_t>(strides.size());
  for (size_t i = 0; i < permute.size(); ++i)
    check_value(permute[i] >= 0 && permute[i] < features, "permute[", i, "] = ", permute[i], " must be in [0, ",
                features, "), the features");
  check_total(total, offsets);
  return starts;
}

bool names_each_once(const std::vector<int64_t>& permute, size_t features) {
  std::vector<bool> named(features);
  for (const int64_t f : permute) {
    if (named[static_cast<size_t>(f)]) return false;
    named[static_cast<size_t>(f)] = true;
  }
  return permute.size() == features;
}

STABLE_TORCH_LIBRARY_FRAGMENT(RK_LIBRARY, m) {
  define(m,
         "jagged_permute(Tensor values, Tensor offsets, int[] permute, SymInt[] strides, Tensor? weights=None, "
         "SymInt? total=None) -> (Tensor output, Tensor output_offsets, Tensor output_weights, Tensor status)");
}

}  // namespace rec_kernels
