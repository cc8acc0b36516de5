// Numbers of the host for kernels.
#pragma once

#include <vector>

#include "core/cuda/launch.h"

namespace rec_kernels {

// [n] int64 on the GPU. They travel as arguments of kernels: nobody waits, and a CUDA graph keeps them.
Tensor to_gpu(const std::vector<int64_t>& numbers, const Tensor& like, cudaStream_t stream);

}  // namespace rec_kernels
