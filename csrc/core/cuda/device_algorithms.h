// Device-wide sort and scan: CUB on a GPU, the standard library in the emulator. Temporary storage is allocated by
// torch.
#pragma once

#include <iterator>

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

#if defined(RK_EMULATED)
// Nodes of a CUDA graph for what CUB does in more than one block: a sort clears two counters, counts digits of 8 bits
// and sums the counts, and each pass is a filling and a kernel; a sum is a start and a kernel.
inline void count_sort(int bits) { graph_nodes += 4 + 2 * ((bits + 7) / 8); }
inline void count_sum() { graph_nodes += 2; }
#endif

// Stable sort of (key, value) pairs by the lowest `bits` bits of the keys. count < 2^32.
template <class Key>
void sort_pairs(const Key* keys, Key* sorted_keys, const uint32_t* values, uint32_t* sorted_values, int64_t count,
                int bits, [[maybe_unused]] const Tensor& like, cudaStream_t stream) {
#if defined(RK_EMULATED)
  check_stream(stream);
  count_sort(bits);
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
  check_cuda(cub::DeviceRadixSort::SortPairs(nullptr, bytes, keys, sorted_keys, values, sorted_values, items, 0, bits,
                                             stream));
  Tensor memory = new_tensor(like, {static_cast<int64_t>(bytes)}, ScalarType::Byte);
  check_cuda(cub::DeviceRadixSort::SortPairs(memory.mutable_data_ptr(), bytes, keys, sorted_keys, values, sorted_values,
                                             items, 0, bits, stream));
#endif
}

// Input iterator over of(0), of(1), ..., computed without an array.
template <class Of>
struct Computed {
  using iterator_category = std::random_access_iterator_tag;
  using value_type = uint32_t;
  using difference_type = int64_t;
  using pointer = void;
  using reference = uint32_t;
  Of of;
  uint32_t at = 0;

  __host__ __device__ __forceinline__ Computed operator+(uint32_t n) const { return {of, at + n}; }
  __device__ __forceinline__ uint32_t operator[](uint32_t n) const { return of(at + n); }
  __device__ __forceinline__ uint32_t operator*() const { return of(at); }
};

// Output iterator that passes the value written at position i to take(i, value).
template <class Take>
struct TakenBy {
  struct Place {
    const Take& take;
    uint32_t at;

    __device__ __forceinline__ void operator=(uint32_t number) const { take(at, number); }
  };
  using iterator_category = std::random_access_iterator_tag;
  using value_type = void;
  using difference_type = int64_t;
  using pointer = void;
  using reference = Place;
  Take take;
  uint32_t at = 0;

  __host__ __device__ __forceinline__ TakenBy operator+(uint32_t n) const { return {take, at + n}; }
  __device__ __forceinline__ Place operator[](uint32_t n) const { return {take, at + n}; }
  __device__ __forceinline__ Place operator*() const { return {take, at}; }
};

// Exclusive prefix sum over pointers or iterators: sums[i] = values[0] + ... + values[i - 1].
template <class Values, class Sums>
void exclusive_sum(Values values, Sums sums, int64_t count, [[maybe_unused]] const Tensor& like, cudaStream_t stream) {
#if defined(RK_EMULATED)
  check_stream(stream);
  count_sum();
  typename std::iterator_traits<Values>::value_type sum = 0;
  for (uint32_t i = 0; i < count; ++i) {
    const auto value = values[i];
    sums[i] = sum;
    sum += value;
  }
#else
  const auto items = static_cast<uint32_t>(count);
  size_t bytes = 0;
  check_cuda(cub::DeviceScan::ExclusiveSum(nullptr, bytes, values, sums, items, stream));
  Tensor memory = new_tensor(like, {static_cast<int64_t>(bytes)}, ScalarType::Byte);
  check_cuda(cub::DeviceScan::ExclusiveSum(memory.mutable_data_ptr(), bytes, values, sums, items, stream));
#endif
}

}  // namespace rec_kernels
