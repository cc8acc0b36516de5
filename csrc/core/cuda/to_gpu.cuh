// Memory of kernels: numbers of the host, and what they need beside their arguments and results.
#pragma once

#include <vector>

#include "core/cuda/launch.h"

namespace rec_kernels {

// Allocates from torch, and keeps what it allocates.
class DeviceMemory {
 public:
  explicit DeviceMemory(const Tensor& like) : like_(like) {}
  template <class T>
  T* make(int64_t count) {
    kept_.push_back(new_tensor(like_, {count * static_cast<int64_t>(sizeof(T))}, ScalarType::Byte));
    return static_cast<T*>(kept_.back().mutable_data_ptr());
  }

 private:
  Tensor like_;
  std::vector<Tensor> kept_;
};

// [n] int64 on the GPU. They travel as arguments of kernels: nobody waits, and a CUDA graph keeps them.
Tensor to_gpu(const std::vector<int64_t>& numbers, const Tensor& like, cudaStream_t stream);

}  // namespace rec_kernels
