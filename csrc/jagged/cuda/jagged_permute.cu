// jagged_permute: a thread finds one output bag; copy_rows.cu copies the bags.
#include <algorithm>

#include "core/boxing.h"
#include "jagged/cuda/jagged.cuh"
#include "jagged/jagged_permute.h"

namespace rec_kernels {
namespace {

// Bags of the input and output.
struct PermuteArgs {
  Bags bags, output;
  const int64_t* first_bags;  // per output feature: first bag in the input
  int64_t *from, *lengths;    // lengths: [count + 1], the last one is 0
  int64_t* status;
};

__global__ void __launch_bounds__(kThreads) lengths_kernel(PermuteArgs a) {
  note_offsets(a.bags, a.status);
  const int64_t count = a.output.num_bags;
  for (int64_t m = Group<1>::first(); m <= count; m += Group<1>::stride()) {
    Range r{0, 0};
    if (m < count) {
      const int64_t i = a.output.feature_of(m);
      r = good_range(a.bags, a.first_bags[i] + (m - a.output.starts[i]));
      a.from[m] = r.start;
    }
    a.lengths[m] = r.stop - r.start;
  }
}

// Selects the bags of the features in `permute`. `starts`: first bag of each input feature.
Selection select_features(const Bags& bags, const std::vector<int64_t>& permute, const std::vector<int64_t>& strides,
                          const std::vector<int64_t>& starts, int64_t* status, const Tensor& like,
                          cudaStream_t stream) {
  // One tensor for both, to save a launch: first bag of each output feature in the input, then in the output.
  std::vector<int64_t> places, ends{0};
  for (const int64_t f : permute) {
    places.push_back(starts[f]);
    ends.push_back(ends.back() + strides[f]);
  }
  const int64_t features = static_cast<int64_t>(permute.size()), count = ends.back();
  places.insert(places.end(), ends.begin(), ends.end());
  const Tensor numbers = to_gpu(places, like, stream);
  const auto* first_bags = numbers.const_data_ptr<int64_t>();
  Selection out = new_selection(count, new_tensor(like, {count}, ScalarType::Long), status, "permute");
  Bags output{};
  output.num_bags = count;
  output.num_features = features;
  output.starts = first_bags + features;
  const PermuteArgs args{
      bags, output, first_bags, out.from.mutable_data_ptr<int64_t>(), out.starts.mutable_data_ptr<int64_t>(), status};
  launch_for(std::max(count, bags.num_bags) + 1, 1, stream, lengths_kernel, args);
  return out;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> jagged_permute_cuda(const Tensor& values_in, const Tensor& offsets_in,
                                                               const std::vector<int64_t>& permute,
                                                               const std::vector<int64_t>& strides,
                                                               const OptionalTensor& weights,
                                                               std::optional<int64_t> total) {
  const std::vector<int64_t> starts = check_jagged_permute(values_in, offsets_in, permute, strides, weights, total);
  const OnDeviceOf device(values_in);
  const cudaStream_t stream = device.stream();
  const Tensor values = as_contiguous(values_in), offsets = as_contiguous(offsets_in);
  if (!total && names_each_once(permute, strides.size())) total = values.size(0);
  Tensor status = new_jagged_status(values, stream);
  Selection rows = select_features(jagged_rows(values, offsets), permute, strides, starts,
                                   status.mutable_data_ptr<int64_t>(), values, stream);
  place_rows(rows, total, offsets, "offsets", stream);
  Tensor output = new_tensor(values, {rows.total}, values.scalar_type());
  Tensor output_offsets = new_tensor(offsets, {rows.count + 1}, offsets.scalar_type());
  Tensor output_weights = new_tensor(values, {weights ? rows.total : 0}, ScalarType::Float);
  copy_rows(rows, values, 1, output, output_offsets, stream);
  if (weights) copy_rows(rows, as_contiguous(*weights), 1, output_weights, std::nullopt, stream);
  return {output, output_offsets, output_weights, status};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(RK_LIBRARY, RK_CUDA_KEY, m) { implement<&jagged_permute_cuda>(m, "jagged_permute"); }

}  // namespace rec_kernels
