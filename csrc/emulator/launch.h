// Emulator version of core/cuda/launch.h, for CPU tensors.
#pragma once

#include <stdexcept>

#include "core/cpu/parallel.h"
#include "cuda_runtime.h"

#define RK_CUDA_KEY CPU

namespace rec_kernels {

// Small, so that grid-stride loops have several iterations.
constexpr int64_t kMostBlocks = 3;

inline int64_t resident_threads() { return 1; }

template <auto kKernel>
int64_t resident_blocks(int, size_t) {
  return kMostBlocks;
}

// Represents torch's stream; other addresses, and null (the default stream), are errors.
inline char current_stream;

class OnDeviceOf {
 public:
  explicit OnDeviceOf(const Tensor& t) {
    if (!t.is_cpu())
      throw std::runtime_error("OnDeviceOf needs a tensor on the device, got one that is not on the CPU");
    ++guards;
  }
  OnDeviceOf(const OnDeviceOf&) = delete;
  OnDeviceOf& operator=(const OnDeviceOf&) = delete;
  ~OnDeviceOf() { --guards; }
  cudaStream_t stream() const { return &current_stream; }

  static inline thread_local int guards = 0;  // guards in scope
};

// Checks every launch, sort, sum and copy for errors that a GPU would not report: a stream other than torch's, and a
// missing device guard.
inline void check_stream(cudaStream_t stream) {
  if (OnDeviceOf::guards == 0) throw std::runtime_error("a kernel is launched without an OnDeviceOf in scope");
  if (stream != &current_stream) throw std::runtime_error("a kernel is launched on a stream that is not torch's");
}

// Nodes that a CUDA graph of the calls since the last _count_nodes() would have: kernels and memsets.
inline int64_t graph_nodes = 0;

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
            const Arguments&... arguments) {
  check_stream(stream);
  ++graph_nodes;
  const KeepDenormals guard;  // a GPU ignores the denormal mode of CPU threads
  emulator::run_grid({grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, shared_bytes,
                     [&] { kernel(static_cast<Parameters>(arguments)...); });
}

inline void copy_to_host(void* to, const void* from, size_t bytes, cudaStream_t stream) {
  check_stream(stream);
  std::memcpy(to, from, bytes);
}

// Every tensor is in host memory here; tests choose whether it counts as pinned.
inline bool memory_is_pinned = true;
inline void* mapped_address(void* p) { return memory_is_pinned ? p : nullptr; }

template <class T>
T* shared_memory() {
  return static_cast<T*>(emulator::shared_bytes());
}

inline void check_alignment(const void* p, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(p) % bytes) emulator::fail("access of %zu bytes at %p is not aligned", bytes, p);
}
using emulator::excuse_races;

}  // namespace rec_kernels
