// Indices are sorted; then one thread sums one column of an output row, with coalesced reads. For rows of more than
// kChunk terms, a kernel before that sums the full chunks in parallel.
#include <algorithm>

#include "core/bits.h"
#include "core/cuda/device_algorithms.h"
#include "embedding_bag/cuda/sum_rows.cuh"

namespace rec_kernels {
namespace {

// Positions count the sorted indices over all groups, M per group. Index `rows` stands for ignored ones.
struct SumRowsArgs {
  RowNumbers numbers;
  RowSums sums;
  RowKeys keys;             // per position: key_of() its group and index
  const uint32_t* order;    // per position: the row of `grad`
  uint32_t *begins, *ends;  // [G, rows + 1]: range of positions per index; fewer than 2^32
  float* partials;          // per window of kChunk positions of a group: sum of the full chunk that begins in it
  Divisor columns;

  __device__ int group_of(int64_t column) const { return sums.column_groups ? sums.column_groups[column] : 0; }
  __device__ int64_t size_of(int64_t group) const { return numbers.sizes ? numbers.sizes[group] : numbers.rows; }
  __device__ int64_t key_of(int64_t group, int64_t number) const { return group * (numbers.rows + 1) + number; }
  // The sum of `count` >= 1 terms, starting at a position.
  __device__ float sum(int64_t place, int64_t count, int64_t column) const {
    const uint32_t* from = order + place;
    float total = sums.grad[int64_t{from[0]} * sums.columns + column];
#pragma unroll 4
    for (int64_t i = 1; i < count; ++i) total = total + sums.grad[int64_t{from[i]} * sums.columns + column];
    return total;
  }
};

__global__ void __launch_bounds__(kThreads) keys_kernel(SumRowsArgs a, RowKeys keys, uint32_t* positions) {
  const int64_t count = a.numbers.count, all = a.numbers.groups * count;
  for (int64_t i = Group<1>::first(); i < a.numbers.groups * (a.numbers.rows + 1); i += Group<1>::stride())
    a.begins[i] = a.ends[i] = 0;
  for (int64_t i = Group<1>::first(); i < all; i += Group<1>::stride()) {
    const int64_t group = i / count, number = a.numbers.numbers[i], size = a.size_of(group);
    const bool good = number >= 0 && number < size;
    keys.set(i, a.key_of(group, good ? number : a.numbers.rows));
    positions[i] = static_cast<uint32_t>(i - group * count);
  }
}

__global__ void __launch_bounds__(kThreads) places_kernel(SumRowsArgs a) {
  const int64_t all = a.numbers.groups * a.numbers.count;
  for (int64_t i = Group<1>::first(); i < all; i += Group<1>::stride()) {
    const int64_t key = a.keys[i];
    if (i == 0 || a.keys[i - 1] != key) a.begins[key] = static_cast<uint32_t>(i);
    if (i == all - 1 || a.keys[i + 1] != key) a.ends[key] = static_cast<uint32_t>(i + 1);
  }
}

// Start of the full chunk of a long row that begins in the kChunk positions at `window`, or -1. At most one does.
__device__ int64_t chunk_in(const SumRowsArgs& a, int64_t window, int64_t last) {
  const int64_t first_key = a.keys[window], last_key = a.keys[last];
  const int64_t begin = a.begins[first_key], end = a.ends[first_key];
  const int64_t next = begin + (window - begin + kChunk - 1) / kChunk * kChunk;
  if (end - begin > kChunk && next + kChunk <= end) return next;
  const int64_t last_begin = a.begins[last_key];
  if (first_key == last_key || a.ends[last_key] - last_begin <= kChunk) return -1;
  return last_begin;  // it continues after the window
}

__global__ void __launch_bounds__(kThreads) sum_full_chunks_kernel(SumRowsArgs a, int64_t windows) {
  const int64_t count = a.numbers.count;
  for (int64_t i = Group<1>::first(); i < windows * a.sums.columns; i += Group<1>::stride()) {
    const int64_t window = a.columns.divide(i), column = i - window * a.sums.columns, group = a.group_of(column);
    if (group < 0) continue;
    const int64_t end = window * kChunk + kChunk, last = (end < count ? end : count) - 1;
    const int64_t chunk = chunk_in(a, group * count + window * kChunk, group * count + last);
    if (chunk >= 0) a.partials[i] = a.sum(chunk, kChunk, column);
  }
}

// Adds chunk sums incrementally and hierarchically: kChunk of them are one term of the next level.
class ChunkSums {
 public:
  __device__ void add(float term) {
    for (int level = 0; level < kLevels; ++level) {
      sums_[level] = counts_[level] > 0 ? sums_[level] + term : term;
      if (++counts_[level] < kChunk) return;
      term = sums_[level];
      counts_[level] = 0;
    }
  }
  // Total of at least one sum. An incomplete chunk of a level is the last term of the next level.
  __device__ float total() const {
    bool any = false;
    float total = 0.0f;
    for (int level = 0; level < kLevels; ++level) {
      if (counts_[level] == 0) continue;
      total = any ? sums_[level] + total : sums_[level];
      any = true;
    }
    return total;
  }

 private:
  static constexpr int kLevels = 5;  // 64^5 > 2^26 chunks
  float sums_[kLevels];
  int counts_[kLevels] = {};
};

// Sums a row of more than kChunk terms.
__device__ float sum_long_row(const SumRowsArgs& a, int64_t group, int64_t begin, int64_t end, int64_t column) {
  ChunkSums sums;
  const int64_t chunks = (end - begin) / kChunk, last = begin + chunks * kChunk;
  const float* partials = a.partials + (begin - group * a.numbers.count) / kChunk * a.sums.columns + column;
  constexpr int kTerms = 8;  // loads in flight; those past the end repeat the last one
  for (int64_t first = 0; first < chunks; first += kTerms) {
    float term[kTerms];
#pragma unroll
    for (int u = 0; u < kTerms; ++u) term[u] = partials[(first + u < chunks ? first + u : chunks - 1) * a.sums.columns];
#pragma unroll
    for (int u = 0; u < kTerms; ++u)
      if (first + u < chunks) sums.add(term[u]);
  }
  if (last < end) sums.add(a.sum(last, end - last, column));
  return sums.total();
}

__global__ void __launch_bounds__(kThreads) sum_rows_kernel(SumRowsArgs a) {
  for (int64_t i = Group<1>::first(); i < a.numbers.rows * a.sums.columns; i += Group<1>::stride()) {
    const int64_t row = a.columns.divide(i), column = i - row * a.sums.columns, group = a.group_of(column);
    if (group < 0 || row >= a.size_of(group)) continue;
    const int64_t begin = a.begins[a.key_of(group, row)], end = a.ends[a.key_of(group, row)];
    float sum = 0.0f;
    if (end - begin > kChunk) sum = sum_long_row(a, group, begin, end, column);
    else if (end > begin) sum = a.sum(begin, end - begin, column);
    a.sums.out[i] = sum;
  }
}

}  // namespace

void sum_rows(const RowNumbers& numbers, const RowSums& sums, const Tensor& like, cudaStream_t stream) {
  const int64_t all = numbers.groups * numbers.count, keys = numbers.groups * (numbers.rows + 1);
  if (numbers.rows * sums.columns == 0) return;
  check_value(all < INT64_C(0xffffffff), "gradients are summed by ", all,
              " numbers; at most 2^32 - 2 fit in a call on a GPU");
  const int64_t windows = numbers.count > kChunk ? ceil_div(numbers.count, kChunk) : 0;
  const bool wide = keys > INT64_C(0xffffffff);
  DeviceMemory memory(like);
  const auto make_keys = [&] { return RowKeys{memory.make<uint8_t>((wide ? 8 : 4) * all), wide}; };
  const RowKeys unsorted_keys = make_keys();
  auto *unsorted_positions = memory.make<uint32_t>(all), *order = memory.make<uint32_t>(all);
  auto* begins = memory.make<uint32_t>(2 * keys);
  const SumRowsArgs args{numbers,
                         sums,
                         make_keys(),
                         order,
                         begins,
                         begins + keys,
                         memory.make<float>(windows * sums.columns),
                         Divisor::of(sums.columns)};
  launch_for(std::max(all, keys), 1, stream, keys_kernel, args, unsorted_keys, unsorted_positions);
  if (all > 0) {
    const auto sort = [&](auto key) {
      using Key = decltype(key);
      sort_pairs(static_cast<const Key*>(unsorted_keys.keys), static_cast<Key*>(args.keys.keys), unsorted_positions,
                 order, all, bit_width(static_cast<uint64_t>(keys - 1)), like, stream);
    };
    if (wide) sort(uint64_t{});
    else sort(uint32_t{});
    launch_for(all, 1, stream, places_kernel, args);
  }
  if (windows > 0) launch_for(windows * sums.columns, 1, stream, sum_full_chunks_kernel, args, windows);
  launch_for(numbers.rows * sums.columns, 1, stream, sum_rows_kernel, args);
}

}  // namespace rec_kernels
