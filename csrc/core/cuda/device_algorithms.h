// Device-wide sort and scan: CUB on a GPU, the standard library in the emulator. Temporary memory comes from torch.
#pragma once

#include "core/cuda/launch.h"

#if defined(RK_EMULATED)
#include <algorithm>
#include <numeric>
#include <vector>
#else
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>
#endif

namespace rec_kernels {

// Counts are below 2^32. Stable sort of (key, value) pairs by the lowest `bits` bits of the keys.
template <class Key>
void sort_pairs(const Key* keys, Key* sorted_keys, const uint32_t* values, uint32_t* sorted_values, int64_t count,
                int bits, [[maybe_unused]] const Tensor& like, [[maybe_unused]] cudaStream_t stream) {
#if defined(RK_EMULATED)
  const Key mask = bits >= static_cast<int>(8 * sizeof(Key)) ? ~Key{0} : (Key{1} << bits) - 1;
  std::vector<int64_t> order(static_cast<size_t>(count));
  std::iota(order.begin(), order.end(), int64_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return (keys[a] & mask) < (keys[b] & mask); });
  for (int64_t i = 0; i < count; ++i) {
    sorted_keys[i] = keys[order[static_cast<size_t>(i)]];
    sorted_values[i] = values[order[static_cast<size_t>(i)]];
  }
#else
  const auto items = static_cast<uint32_t>(count);  // 64-bit counts cost CUB registers
  size_t bytes = 0;
  STD_CUDA_CHECK(cub::DeviceRadixSort::SortPairs(nullptr, bytes, keys, sorted_keys, values, sorted_values, items, 0,
                                                 bits, stream));
  Tensor memory = new_tensor(like, {static_cast<int64_t>(bytes)}, ScalarType::Byte);
  STD_CUDA_CHECK(cub::DeviceRadixSort::SortPairs(memory.mutable_data_ptr(), bytes, keys, sorted_keys, values,
                                                 sorted_values, items, 0, bits, stream));
#endif
}

// sums[i] = values[0] + ... + values[i - 1].
template <class T>
void exclusive_sum(const T* values, T* sums, int64_t count, [[maybe_unused]] const Tensor& like,
                   [[maybe_unused]] cudaStream_t stream) {
#if defined(RK_EMULATED)
  std::exclusive_scan(values, values + count, sums, T{0});
#else
  const auto items = static_cast<uint32_t>(count);
  size_t bytes = 0;
  STD_CUDA_CHECK(cub::DeviceScan::ExclusiveSum(nullptr, bytes, values, sums, items, stream));
  Tensor memory = new_tensor(like, {static_cast<int64_t>(bytes)}, ScalarType::Byte);
  STD_CUDA_CHECK(cub::DeviceScan::ExclusiveSum(memory.mutable_data_ptr(), bytes, values, sums, items, stream));
#endif
}

}  // namespace rec_kernels
