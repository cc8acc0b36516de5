#include <algorithm>

#include "core/cuda/group.cuh"
#include "core/cuda/to_gpu.cuh"

namespace rec_kernels {
namespace {

// Values per launch: what fits in 4 KB of kernel arguments, beside the other two.
constexpr int kValuesPerLaunch = 510;
struct Numbers {
  int64_t of[kValuesPerLaunch];
};

__global__ void __launch_bounds__(kThreads) write_numbers_kernel(Numbers numbers, int64_t count, int64_t* out) {
  static_assert(sizeof numbers + sizeof count + sizeof out <= 4096);
  for (int i = threadIdx.x; i < count; i += kThreads) out[i] = numbers.of[i];
}

}  // namespace

Tensor to_gpu(const std::vector<int64_t>& numbers, const Tensor& like, cudaStream_t stream) {
  const auto count = static_cast<int64_t>(numbers.size());
  Tensor out = new_tensor(like, {count}, ScalarType::Long);
  for (int64_t first = 0; first < count; first += kValuesPerLaunch) {
    Numbers some{};
    const int64_t here = std::min<int64_t>(count - first, kValuesPerLaunch);
    std::copy_n(numbers.begin() + first, here, some.of);
    launch(write_numbers_kernel, dim3(1), dim3(kThreads), 0, stream, some, here,
           out.mutable_data_ptr<int64_t>() + first);
  }
  return out;
}

}  // namespace rec_kernels
