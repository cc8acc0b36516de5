#include "jagged/jagged_bucketize.h"

#include "core/schema.h"

namespace rec_kernels {

// Upper bound that rules out overflow of products with block sizes.
constexpr int64_t kMostBuckets = int64_t{1} << 20;

std::vector<int64_t> check_jagged_bucketize(const Tensor& values, const Tensor& offsets, const Tensor& block_sizes,
                                            int64_t num_buckets, const std::vector<int64_t>& strides,
                                            const OptionalTensor& weights) {
  check_jagged_ids(values, offsets, weights);
  std::vector<int64_t> starts = starts_of(strides, offsets);
  check(block_sizes, "block_sizes")
      .dtype(ScalarType::Long)
      .shape({static_cast<int64_t>(strides.size())})
      .on_device_of(values, "values");
  check_value(num_buckets >= 1 && num_buckets <= kMostBuckets, "num_buckets = ", num_buckets, " must be in [1, ",
              kMostBuckets, "]");
  return starts;
}

STABLE_TORCH_LIBRARY_FRAGMENT(RK_LIBRARY, m) {
  define(m,
         "jagged_bucketize(Tensor values, Tensor offsets, Tensor block_sizes, int num_buckets, SymInt[] strides, "
         "Tensor? weights=None) -> (Tensor output, Tensor output_offsets, Tensor output_weights, Tensor positions, "
         "Tensor status)");
}

}  // namespace rec_kernels
