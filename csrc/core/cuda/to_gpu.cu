#include <algorithm>

#include "core/cuda/group.cuh"
#include "core/cuda/to_gpu.cuh"

namespace rec_kernels {
namespace {

// All that the 4 KB of a kernel's arguments hold, beside the other two.
constexpr int kNumbersALaunch = 510;
struct Numbers {
  int64_t of[kNumbersALaunch];
};

__global__ void __launch_bounds__(kThreads) write_numbers_kernel(Numbers numbers, int64_t count, int64_t* out) {
  static_assert(sizeof numbers + sizeof count + sizeof out <= 4096);
  for (int i = threadIdx.x; i < count; i += kThreads) out[i] = numbers.of[i];
}

}  // namespace

Tensor to_gpu(const std::vector<int64_t>& numbers, const Tensor& like, cudaStream_t stream) {
  const auto count = static_cast<int64_t>(numbers.size());
  Tensor out = new_tensor(like, {count}, ScalarType::Long);
  for (int64_t first = 0; first < count; first += kNumbersALaunch) {
    Numbers some{};
    const int64_t here = std::min<int64_t>(count - first, kNumbersALaunch);
    std::copy_n(numbers.begin() + first, here, some.of);
    launch(write_numbers_kernel, dim3(1), dim3(kThreads), 0, stream, some, here,
           out.mutable_data_ptr<int64_t>() + first);
  }
  return out;
}

}  // namespace rec_kernels
