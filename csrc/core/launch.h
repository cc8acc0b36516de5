// The one way to start a CUDA kernel: launch(kernel, grid, block, shared_bytes, stream, arguments...).
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include "core/stable.h"

namespace rec_kernels {

// Makes the tensor's GPU current and gives torch's current stream on it, for the scope of a kernel's launches.
class OnDeviceOf {
 public:
  explicit OnDeviceOf(const Tensor& t) : guard_(t.get_device_index()) {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }
  cudaStream_t stream() const { return stream_; }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_;
};

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
            const Arguments&... arguments) {
  kernel<<<grid, block, shared_bytes, stream>>>(static_cast<Parameters>(arguments)...);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace rec_kernels
