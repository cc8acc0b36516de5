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

// Raises the error of a CUDA call. This library links its own CUDA runtime, whose last error torch does not clear, so
// it must be cleared here, or it would be reported by the next launch.
inline void check_cuda(cudaError_t error) {
  if (error != cudaSuccess) static_cast<void>(cudaGetLastError());
  STD_CUDA_CHECK(error);
}

// Maximum blocks of a grid; kernels use grid-stride loops.
constexpr int64_t kMostBlocks = int64_t{1} << 20;

// Cache of a positive attribute per GPU, queried on the first call.
class GpuAttributeCache {
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
  static GpuAttributeCache number;
  return number([](int device) {
    int found = 0;
    check_cuda(cudaDeviceGetAttribute(&found, kAttribute, device));
    return found;
  });
}

// Maximum resident threads of the current GPU.
inline int64_t resident_threads() {
  return int64_t{attribute_of_gpu<cudaDevAttrMultiProcessorCount>()} *
         attribute_of_gpu<cudaDevAttrMaxThreadsPerMultiProcessor>();
}

// Maximum resident blocks of a kernel on the current GPU. Arguments must be the same in every call.
template <auto kKernel>
int64_t resident_blocks(int threads, size_t shared_bytes) {
  static GpuAttributeCache number;
  const int each = number([&](int) {
    int found = 0;
    check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&found, kKernel, threads, shared_bytes));
    return found;
  });
  return int64_t{attribute_of_gpu<cudaDevAttrMultiProcessorCount>()} * each;
}

// Makes the tensor's GPU current for a scope, and gives torch's current stream on it.
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

// Synchronizes the stream: not for ops that run in every step.
inline void copy_to_host(void* to, const void* from, size_t bytes, cudaStream_t stream) {
  check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream));
  check_cuda(cudaStreamSynchronize(stream));
}

// Device address of host memory on the current GPU; null if it is not pinned.
inline void* mapped_address(void* p) {
  cudaPointerAttributes found{};
  check_cuda(cudaPointerGetAttributes(&found, p));
  return found.type == cudaMemoryTypeUnregistered ? nullptr : found.devicePointer;
}

#if defined(__CUDACC__)
// The block's dynamic shared memory, of the size passed to launch().
template <class T>
__device__ T* shared_memory() {
  extern __shared__ __align__(16) unsigned char bytes[];
  return reinterpret_cast<T*>(bytes);
}

// Only the emulator checks alignment; a GPU faults.
__device__ __forceinline__ void check_alignment(const void*, size_t) {}
// Only the emulator checks for races. It reports none if *status is negative after the launch, since the results are
// not used then.
__device__ __forceinline__ void excuse_races(const int64_t*) {}
#endif

}  // namespace rec_kernels

#endif
