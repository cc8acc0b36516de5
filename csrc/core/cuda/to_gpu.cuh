// Temporary device memory, and transfer of host values to the GPU.
#pragma once

#include <vector>

#include "core/cuda/launch.h"

namespace rec_kernels {

// Allocates memory from torch and owns it.
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

// Returns [n] int64 on the GPU. Values are passed as kernel arguments: no synchronization, and CUDA graphs capture
// them.
Tensor to_gpu(const std::vector<int64_t>& numbers, const Tensor& like, cudaStream_t stream);

}  // namespace rec_kernels
