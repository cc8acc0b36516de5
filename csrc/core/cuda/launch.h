// The one way to start a CUDA kernel: launch(kernel, grid, block, shared_bytes, stream, arguments...).
#pragma once

#if defined(RK_EMULATED)
#include "emulator/launch.h"
#else

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include <atomic>

#include "core/stable.h"

// The dispatch key that kernels in csrc/*/cuda register for.
#define RK_CUDA_KEY CUDA

namespace rec_kernels {

// Raises the error of a CUDA call, if it is one. This library has a CUDA runtime of its own, linked in, and torch
// clears the last error of torch's alone: one that stayed here would be blamed on the next launch.
inline void check_cuda(cudaError_t error) {
  if (error != cudaSuccess) static_cast<void>(cudaGetLastError());
  STD_CUDA_CHECK(error);
}

// Blocks of a grid, at most; kernels take more work than that in a grid stride.
constexpr int64_t kMostBlocks = int64_t{1} << 20;

// A number above 0 of the current GPU; each GPU is asked in the first call for it.
class NumberOfGpu {
 public:
  template <class Ask>
  int operator()(const Ask& ask) {
    int device = 0;
    check_cuda(cudaGetDevice(&device));
    const int known = device < kKnown ? known_[device].load() : 0;
    if (known > 0) return known;
    const int found = ask(device);
    if (device < kKnown) known_[device] = found;
    return found;
  }

 private:
  static constexpr int kKnown = 64;
  std::atomic<int> known_[kKnown] = {};
};

template <cudaDeviceAttr kAttribute>
int attribute_of_gpu() {
  static NumberOfGpu number;
  return number([](int device) {
    int found = 0;
    check_cuda(cudaDeviceGetAttribute(&found, kAttribute, device));
    return found;
  });
}

// Threads that the current GPU holds at once.
inline int64_t resident_threads() {
  return int64_t{attribute_of_gpu<cudaDevAttrMultiProcessorCount>()} *
         attribute_of_gpu<cudaDevAttrMaxThreadsPerMultiProcessor>();
}

// Blocks of a kernel, always of as many threads and bytes, that the current GPU holds at once.
template <auto kKernel>
int64_t resident_blocks(int threads, size_t shared_bytes) {
  static NumberOfGpu number;
  const int each = number([&](int) {
    int found = 0;
    check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&found, kKernel, threads, shared_bytes));
    return found;
  });
  return int64_t{attribute_of_gpu<cudaDevAttrMultiProcessorCount>()} * each;
}

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
  check_cuda(cudaGetLastError());
}

// Waits for the stream: not for what runs in every step.
inline void copy_to_host(void* to, const void* from, size_t bytes, cudaStream_t stream) {
  check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream));
  check_cuda(cudaStreamSynchronize(stream));
}

// Address at which the current GPU sees host memory; null if that is not pinned.
inline void* mapped_address(void* p) {
  cudaPointerAttributes found{};
  check_cuda(cudaPointerGetAttributes(&found, p));
  return found.type == cudaMemoryTypeUnregistered ? nullptr : found.devicePointer;
}

#if defined(__CUDACC__)
// The block's shared memory, of as many bytes as launch() was given.
template <class T>
__device__ T* shared_memory() {
  extern __shared__ __align__(16) unsigned char bytes[];
  return reinterpret_cast<T*>(bytes);
}

// The emulator checks here what a GPU would fault on.
__device__ __forceinline__ void check_alignment(const void*, size_t) {}
#endif

}  // namespace rec_kernels

#endif
