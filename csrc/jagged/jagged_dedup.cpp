#include "jagged/jagged_dedup.h"

#include <algorithm>

#include "core/schema.h"

namespace rec_kernels {

DedupSizes check_jagged_dedup(const Tensor& values, const Tensor& offsets, const std::vector<int64_t>& groups,
                              const OptionalTensor& weights, int64_t hash_bits) {
  check_jagged_ids(values, offsets, weights);
  check_value(hash_bits >= 0 && hash_bits <= 64, "hash_bits = ", hash_bits, " must be in [0, 64]");
  const auto features = static_cast<int64_t>(groups.size());
  const int64_t bags = offsets.size(0) - 1;
  check_value(features > 0 ? bags % features == 0 : bags == 0, "offsets describe ", bags,
              " bags, which is not a multiple of the ", features, " features that groups names");
  int64_t most = -1;
  for (size_t f = 0; f < groups.size(); ++f) {
    check_value(groups[f] >= -1 && groups[f] < features, "groups[", f, "] = ", groups[f], " must be in [-1, ", features,
                "): a group's number, or -1");
    most = std::max(most, groups[f]);
  }
  for (int64_t g = 0; g < most; ++g)
    check_value(std::find(groups.begin(), groups.end(), g) != groups.end(), "groups has no feature of group ", g,
                ", and some of group ", most, ": groups are numbered from 0 on, none is left out");
  return {most + 1, features > 0 ? bags / features : 0};
}

STABLE_TORCH_LIBRARY_FRAGMENT(RK_LIBRARY, m) {
  define(m,
         "jagged_dedup(Tensor values, Tensor offsets, int[] groups, Tensor? weights=None, int hash_bits=64) -> "
         "(Tensor rows, Tensor inverse, Tensor counts, Tensor status)");
}

}  // namespace rec_kernels
