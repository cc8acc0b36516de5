// jagged_permute: the rows to choose are counted out for the features that are named; copy_rows.cu does the rest.
#include "core/boxing.h"
#include "jagged/cuda/jagged.cuh"
#include "jagged/jagged_permute.h"

namespace rec_kernels {
namespace {

// bags.starts: where the bags of the features of the output start; from[i]: where those of the i-th do in the input.
__global__ void __launch_bounds__(kThreads) index_kernel(Bags bags, const int64_t* from, int64_t* index) {
  for (int64_t m = Group<1>::first(); m < bags.num_bags; m += Group<1>::stride()) {
    const int64_t i = bags.feature_of(m);
    index[m] = from[i] + (m - bags.starts[i]);
  }
}

// [M]: the bag of the input that each of the output is.
Tensor index_of(const std::vector<int64_t>& permute, const std::vector<int64_t>& strides,
                const std::vector<int64_t>& starts, const Tensor& like, cudaStream_t stream) {
  // One tensor of both, for fewer launches: where features start in the input, then where in the output.
  std::vector<int64_t> places, ends{0};
  for (const int64_t f : permute) {
    places.push_back(starts[f]);
    ends.push_back(ends.back() + strides[f]);
  }
  const int64_t features = static_cast<int64_t>(permute.size()), bags = ends.back();
  places.insert(places.end(), ends.begin(), ends.end());
  Tensor index = new_tensor(like, {bags}, ScalarType::Long);
  if (bags == 0) return index;
  const Tensor numbers = to_gpu(places, like, stream);
  Bags output{};
  output.num_bags = bags;
  output.num_features = features;
  output.starts = numbers.const_data_ptr<int64_t>() + features;
  launch(index_kernel, blocks_for(bags, 1), dim3(kThreads), 0, stream, output, numbers.const_data_ptr<int64_t>(),
         index.mutable_data_ptr<int64_t>());
  return index;
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
  const Tensor index = index_of(permute, strides, starts, values, stream);
  const Selection rows =
      select_rows(jagged_rows(values, offsets), index, offsets, total, status.mutable_data_ptr<int64_t>(), stream);
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
