// One kernel per kind of bug that the emulator detects; test_emulator.py runs them.
#include <optional>

#include "core/cuda/vec.cuh"

namespace rec_kernels {
namespace {

constexpr int kThreads = 64;

enum Bug {
  kNone,
  kLaneMissing,
  kOtherCollective,
  kLaneNotInMask,
  kBarrierMissed,
  kMisaligned,
  kUnwrittenShared,
  kRace,
  kShuffleForBarrier,
  kWriteOfTwoBlocks,
  kWriteBesideAtomic,
  kRaceWithoutExcuse,
  kOutside,
  kOutsideShared,
  kOtherStream,
  kNoGuard,
};

// Accesses that other threads make as well, without a bug: all threads write the same flag and read a count while
// others raise it; a lane reads what its neighbour wrote before __syncwarp().
__device__ float accesses_of_others(int bug, float* shared, int* counts, const int64_t* status) {
  const int t = threadIdx.x;
  if (bug == kRaceWithoutExcuse) excuse_races(status);
  counts[0] = 1;
  atomicAdd(counts + 1, counts[1] < 0 ? 2 : 1);
  if ((bug == kWriteOfTwoBlocks || bug == kRaceWithoutExcuse) && t == 9) counts[2] = 1 + blockIdx.x;
  if (bug == kWriteBesideAtomic && t == 9) counts[1] = 5;
  shared[t] = 0.0f;
  if (bug == kShuffleForBarrier) __shfl_sync(0xffffffffu, t, 0);
  else __syncwarp();
  return shared[t ^ 1];
}

// x [n] -> out [64]: each thread's own element of x, passed through a shuffle and shared memory.
__global__ void planted_kernel(int bug, const float* x, int64_t n, float* out, int* counts, const int64_t* status) {
  float* shared = shared_memory<float>();
  const int t = threadIdx.x, lane = t % 32;
  if (bug == kBarrierMissed && t == 40) return;
  float value = accesses_of_others(bug, shared, counts, status) + (bug == kOutside && t == 63 ? x[n] : x[t]);
  shared += kThreads;
  if (!(bug == kLaneMissing && t == 7)) {
    if (bug == kOtherCollective && t == 3) __any_sync(0xffffffffu, 1);
    else value = __shfl_sync(bug == kLaneNotInMask ? 0xffff0000u : 0xffffffffu, value, lane ^ 1);
  }
  if (bug == kMisaligned) value += load_columns(x + 1, 0, 4, true).v[0];
  if (!(bug == kUnwrittenShared && t == 5)) shared[t] = value;
  if (bug == kOutsideShared && t == 63) shared[t + 1] = value;
  if (bug != kRace) __syncthreads();
  if (blockIdx.x == 0) out[t] = shared[t ^ 33];
}

Tensor planted(int64_t bug, const Tensor& x) {
  std::optional<OnDeviceOf> device(std::in_place, x);
  const cudaStream_t stream = bug == kOtherStream ? nullptr : device->stream();
  if (bug == kNoGuard) device.reset();
  Tensor out = new_tensor(x, {kThreads}, ScalarType::Float);
  Tensor counts = new_zeros(x, {3}, ScalarType::Int), status = new_zeros(x, {1}, ScalarType::Long);
  launch(planted_kernel, dim3(2), dim3(kThreads), 2 * kThreads * sizeof(float), stream, static_cast<int>(bug),
         x.const_data_ptr<float>(), x.numel(), out.mutable_data_ptr<float>(), counts.mutable_data_ptr<int>(),
         status.const_data_ptr<int64_t>());
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(RK_LIBRARY, m) { m.def("planted(int bug, Tensor x) -> Tensor"); }

STABLE_TORCH_LIBRARY_IMPL(RK_LIBRARY, RK_CUDA_KEY, m) { m.impl("planted", TORCH_BOX(&planted)); }

}  // namespace rec_kernels
