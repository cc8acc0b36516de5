// What the CUDA kernels of embedding_bag read, and how lanes share a bag or a row.
#pragma once

#include "core/vec.cuh"
#include "core/warp.cuh"
#include "ops/embedding_bag.h"

namespace rec_kernels {

// The first element of `status`. The smallest one that is noted wins: a bad layout goes before every offset
// (kBadLayout + 1 + i for offsets[i]), an offset before every id (i).
constexpr int64_t kBadLayout = INT64_MIN;

inline namespace RK_ISA {

constexpr int kThreads = 256;

// The layout tensors; null: one table.
struct Features {
  const int64_t *weight_offsets, *row_offsets, *num_embeddings, *embedding_dims, *output_offsets;
  const bool* means;
  Feature one;

  __device__ __forceinline__ Feature operator[](int64_t f) const {
    if (!embedding_dims) return one;
    return {weight_offsets[f], row_offsets[f],    num_embeddings[f],
            embedding_dims[f], output_offsets[f], means ? means[f] : one.mean};
  }
};

__device__ __forceinline__ void note_bad(int64_t* status, int64_t position) {
  atomicMin(reinterpret_cast<long long*>(status), static_cast<long long>(position));
}

// Ids [start, stop) of a bag; none of a bag whose offsets are bad, which is noted.
struct Range {
  int64_t start, stop;
};
__device__ __forceinline__ Range range_of(const Bags& bags, int64_t bag, int64_t* status) {
  const Range r = {bags.offset(bag), bags.offset(bag + 1)};
  if (bag == 0 && (r.start < 0 || r.start > bags.num_ids)) {
    note_bad(status, kBadLayout + 1);
    return {0, 0};
  }
  if (r.stop < r.start || r.stop > bags.num_ids) {
    note_bad(status, kBadLayout + 1 + bag + 1);
    return {0, 0};
  }
  return r.start < 0 ? Range{0, 0} : r;  // the offset before was noted by its own bag
}

// A group of G neighbouring lanes of a warp that works on one bag or row. Lane l of it takes columns 4l .. 4l+3 of
// every block of 4G columns.
template <int G>
struct Group {
  int lane;       // in the group
  unsigned mask;  // of its lanes in the warp

  __device__ __forceinline__ Group() {
    const int in_warp = threadIdx.x % kWarpSize;
    lane = in_warp % G;
    mask = (G == kWarpSize ? kFullWarp : (1u << G % kWarpSize) - 1) << (in_warp - lane);
  }
  __device__ __forceinline__ static int64_t first() { return (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / G; }
  __device__ __forceinline__ static int64_t stride() { return int64_t{gridDim.x} * blockDim.x / G; }
  // x of lane `from` of the group.
  template <class T>
  __device__ __forceinline__ T broadcast(T x, int from) const {
    return __shfl_sync(mask, x, from, G);
  }
};

}  // namespace RK_ISA

// Blocks of kThreads for `items` groups of `lanes`, at most `most`.
inline dim3 blocks_for(int64_t items, int lanes, int64_t most = kMostBlocks) {
  const int64_t blocks = ceil_div(items * lanes, kThreads);
  return dim3(static_cast<unsigned>(blocks < 1 ? 1 : (blocks < most ? blocks : most)));
}

// Lanes for rows of `columns` floats, four to a lane.
inline int lanes_for(int64_t columns) {
  int lanes = 1;
  while (lanes < kWarpSize && lanes * 4 < columns) lanes *= 2;
  return lanes;
}

// Calls body(std::integral_constant<int, G>) with G = lanes, a power of two up to a warp.
template <class Body>
void with_lanes(int lanes, const Body& body) {
  switch (lanes) {
    case 1:
    case 2:
    case 4:
      return body(std::integral_constant<int, 4>());
    case 8:
      return body(std::integral_constant<int, 8>());
    case 16:
      return body(std::integral_constant<int, 16>());
    default:
      return body(std::integral_constant<int, 32>());
  }
}

// The arguments of a call as the kernels read them; owns contiguous copies where the caller's tensors were not.
struct BagInput {
  Tensor values, offsets;
  OptionalTensor per_sample_weights;
  Features features;
  Bags bags;
  BagOptions options;
  int64_t num_features, output_dim;
  int64_t max_dim, num_rows;  // widest row; above every linear row number
  bool any_mean;              // or the features' own say is not known to the host
};

// `rows` and `columns` describe the single table of a call without a layout.
BagInput read_bags(const Tensor& values, const Tensor& offsets, const OptionalTensor& per_sample_weights,
                   const TableLayout& layout, const BagOptions& options, int64_t rows, int64_t columns,
                   bool include_last_offset, cudaStream_t stream);

// A status with nothing noted but whether the layout is bad, on the stream. `weights`: how many floats they are.
// `updates`: tables that overlap in part are bad, because two groups would write the same weights.
Tensor new_status(const BagInput& in, int64_t weights, bool updates, const Tensor& like, cudaStream_t stream);

}  // namespace rec_kernels
