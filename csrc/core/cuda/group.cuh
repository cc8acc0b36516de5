// Groups of lanes, which share a bag or a row.
#pragma once

#include <type_traits>

#include "core/cuda/vec.cuh"
#include "core/host_device.h"

namespace rec_kernels {
inline namespace RK_ISA {

constexpr int kThreads = 256, kWarpSize = 32;
constexpr unsigned kFullWarp = 0xffffffffu;

// How the groups of a warp go on: each at its own pace or, in step, all together, where those that have nothing to say
// make every exchange, too: a branch or loop around one is taken by any_group() or most_of_groups(), or alike by all.
// The compiler knows the lanes of an exchange then; else the GPU finds out, at each of them, which have come together.
enum class Pace { kOwn, kInStep };

// A group of G neighbouring lanes of a warp that works on one bag or row. Lane l of it takes columns 4l .. 4l+3 of
// every block of 4G columns.
template <int G>
struct Group {
  int lane;       // in the group
  unsigned mask;  // of the lanes in the warp that make an exchange: its own, or, in step, all
  bool in_step;   // with other groups

  __device__ __forceinline__ explicit Group(Pace pace = Pace::kOwn)
      : lane(threadIdx.x % kWarpSize % G), in_step(pace == Pace::kInStep && G < kWarpSize) {
    mask = in_step ? kFullWarp : lanes();
  }
  // Number of this group in its warp.
  __device__ __forceinline__ static int in_warp() { return static_cast<int>(threadIdx.x) % kWarpSize / G; }
  __device__ __forceinline__ static int64_t first() { return (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / G; }
  __device__ __forceinline__ static int64_t stride() { return int64_t{gridDim.x} * blockDim.x / G; }
  // x of lane `from` of the group, or of kWidth lanes around it that make the exchange.
  template <int kWidth = G, class T>
  __device__ __forceinline__ T broadcast(T x, int from) const {
    return __shfl_sync(mask, x, from, kWidth);
  }
  // Broadcasts an address in global memory; the conversion tells the compiler that it is one.
  template <int kWidth = G, class T>
  __device__ __forceinline__ T* broadcast(T* x, int from) const {
    return static_cast<T*>(
        __cvta_global_to_generic(static_cast<size_t>(broadcast<kWidth>(reinterpret_cast<intptr_t>(x), from))));
  }
  // The sum of the lanes' x, on every lane: floats by the xor butterfly G / 2, ..., 2, 1 of docs/numerics.md.
  template <class T>
  __device__ __forceinline__ T sum(T x) const {
#pragma unroll
    for (int distance = G / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(mask, x, distance, G);
    return x;
  }
  // A bit for each of the group's lanes in the warp.
  __device__ __forceinline__ unsigned lanes() const {
    return G == kWarpSize ? kFullWarp : ((1u << G % kWarpSize) - 1) << (threadIdx.x % kWarpSize - lane);
  }
  // Bit l: what lane l of the group says, of a bit for each lane of the warp.
  __device__ __forceinline__ unsigned bits_of(unsigned all) const {
    return (all & lanes()) >> (threadIdx.x % kWarpSize - lane);
  }
  __device__ __forceinline__ unsigned ballot(bool x) const { return bits_of(__ballot_sync(mask, x)); }
  // True if x is: that of the group, which all of its lanes have, or, in step, that of any.
  __device__ __forceinline__ bool any_group(bool x) const { return in_step ? __any_sync(kFullWarp, x) != 0 : x; }
  // The group's x or, in step, the largest.
  __device__ __forceinline__ uint32_t most_of_groups(uint32_t x) const {
    return in_step ? __reduce_max_sync(kFullWarp, x) : x;
  }
};

// Columns of a row from `first` on, at most kBlocks * 4 * G: a number to compare places with that fits in 32 bits.
template <int G, int kBlocks>
__device__ __forceinline__ int columns_left(int64_t first, int64_t columns) {
  constexpr int kMost = kBlocks * 4 * G;
  return columns - first < kMost ? static_cast<int>(columns - first) : kMost;
}

// The group's columns of a row from `column` on, kBlocks blocks of them: load_columns() of vec.cuh, with one branch for
// all. Columns at or beyond `columns` are 0.
template <int G, int kBlocks>
__device__ __forceinline__ void load_row(const float* row, int64_t column, int64_t columns, bool aligned,
                                         const Group<G>& group, Vec4 (&x)[kBlocks]) {
  const int64_t first = column + group.lane * 4;
  const int left = columns_left<G, kBlocks>(first, columns);
  const float* mine = row + first;
  if (aligned) {
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) x[k] = load_columns(mine, k * G * 4, left, true);
  } else {
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) x[k] = load_columns(mine, k * G * 4, left, false);
  }
}

// Writes them.
template <int G, int kBlocks>
__device__ __forceinline__ void store_row(float* row, int64_t column, int64_t columns, bool aligned,
                                          const Group<G>& group, const Vec4 (&x)[kBlocks]) {
  const int64_t first = column + group.lane * 4;
  const int left = columns_left<G, kBlocks>(first, columns);
  float* mine = row + first;
  if (aligned) {
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) store_columns(mine, k * G * 4, left, true, x[k]);
  } else {
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) store_columns(mine, k * G * 4, left, false, x[k]);
  }
}

}  // namespace RK_ISA

// Blocks for `items` groups of `lanes`, at most `most`.
inline dim3 at_most(int64_t most, int64_t items, int lanes, int threads = kThreads) {
  const int64_t blocks = ceil_div(items * lanes, threads);
  return dim3(static_cast<unsigned>(blocks < 1 ? 1 : (blocks < most ? blocks : most)));
}

// Blocks for the items, at most a few times what the GPU holds: groups go on in a grid stride, and a block that has
// little to do makes room for another. Items that turn out to be nothing cost no start of a block.
inline dim3 blocks_for(int64_t items, int lanes) {
  constexpr int64_t kRounds = 4;
  const int64_t most = kRounds * ceil_div(resident_threads(), kThreads);
  return at_most(most < kMostBlocks ? most : kMostBlocks, items, lanes);
}

// Blocks for bags, which are long and of different lengths: one for each. The GPU starts a block where one has ended,
// which balances better than a stride over bags.
inline dim3 blocks_for_bags(int64_t bags, int lanes) { return at_most(kMostBlocks, bags, lanes); }

// Starts a kernel whose groups of so many lanes take the items in a grid stride; or, launch_for_bags, take a bag each.
template <class... Parameters, class... Arguments>
void launch_for(int64_t items, int lanes, cudaStream_t stream, void (*kernel)(Parameters...),
                const Arguments&... arguments) {
  launch(kernel, blocks_for(items, lanes), dim3(kThreads), 0, stream, arguments...);
}
template <class... Parameters, class... Arguments>
void launch_for_bags(int64_t bags, int lanes, cudaStream_t stream, void (*kernel)(Parameters...),
                     const Arguments&... arguments) {
  launch(kernel, blocks_for_bags(bags, lanes), dim3(kThreads), 0, stream, arguments...);
}
// Starts a kernel of a single thread.
template <class... Parameters, class... Arguments>
void launch_one(cudaStream_t stream, void (*kernel)(Parameters...), const Arguments&... arguments) {
  launch(kernel, dim3(1), dim3(1), 0, stream, arguments...);
}

// Lanes for rows of `columns` floats, four to a lane.
inline int lanes_for(int64_t columns) {
  int lanes = 1;
  while (lanes < kWarpSize && lanes * 4 < columns) lanes *= 2;
  return lanes;
}

// A number that is a template's argument.
template <int N>
using Constant = std::integral_constant<int, N>;

// Calls body(Constant<G>) with G = lanes, a power of two up to a warp; at least 4.
template <class Body>
void with_lanes(int lanes, const Body& body) {
  if (lanes <= 4) body(Constant<4>());
  else if (lanes == 8) body(Constant<8>());
  else if (lanes == 16) body(Constant<16>());
  else body(Constant<32>());
}

// Blocks of 4 * 32 columns that a warp keeps in registers; it goes through a wider row's input again for the next ones.
constexpr int kMaxBlocks = 4;

// Calls body(G, kBlocks), Constants: how many lanes take a row of at most max_dim columns, and how many blocks
// of 4 * G columns they keep.
template <class Body>
void with_widths(int64_t max_dim, const Body& body) {
  with_lanes(lanes_for(max_dim), [&](auto group) {
    constexpr int G = decltype(group)::value;
    const int64_t blocks = ceil_div(max_dim, 4 * G);
    if constexpr (G < kWarpSize) {
      body(group, Constant<1>());
    } else {
      if (blocks == 1) body(group, Constant<1>());
      else if (blocks == 2) body(group, Constant<2>());
      else body(group, Constant<kMaxBlocks>());
    }
  });
}

// with_widths() for kernels that have much to find out about a row before they come to its columns: fewer lanes take
// it, with more columns each, so that a warp finds it out for several rows at once. Up to 256 columns, a lane keeps at
// most kMost blocks, which is 2 where it keeps state beside them.
template <int kMost, class Body>
void with_few_lanes(int64_t max_dim, const Body& body) {
  if (max_dim <= 16) body(Constant<4>(), Constant<1>());
  else if (max_dim <= 32) body(Constant<4>(), Constant<2>());
  else if (max_dim <= 64) body(Constant<8>(), Constant<2>());
  else if (max_dim <= 128) body(Constant<32 / kMost>(), Constant<kMost>());
  else if (max_dim <= 256) body(Constant<64 / kMost>(), Constant<kMost>());
  else body(Constant<kWarpSize>(), Constant<kMaxBlocks>());
}

// True of the kernels for the widest rows: there may be more columns than a group keeps at once. All others are chosen
// by the widest row, and the compiler drops the code for wider ones, and its registers.
template <int kBlocks, int G = kWarpSize>
constexpr bool kTakesWider = kBlocks == kMaxBlocks && G == kWarpSize;

// Bound of a kernel's columns 0, kBlocks * 4 * G, ...
template <int kBlocks, int G = kWarpSize>
__device__ __forceinline__ int64_t columns_behind(int64_t D) {
  return kTakesWider<kBlocks, G> ? D : 1;
}
// True if a row of D columns has more of them than a group keeps at once.
template <int G, int kBlocks>
__device__ __forceinline__ bool is_wider(int64_t D) {
  return kTakesWider<kBlocks, G> && D > kBlocks * 4 * G;
}

// Lanes for the short rows of formats, which a warp would leave mostly idle.
constexpr int kFewLanes = 8;

// with_widths() with fewer kernels, for encoded rows: those that neither fit in few lanes nor in a warp's registers are
// taken block by block.
template <class Body>
void with_few_widths(int64_t max_dim, const Body& body) {
  if (max_dim <= 4 * kFewLanes) body(Constant<kFewLanes>(), Constant<1>());
  else if (max_dim <= 4 * kWarpSize) body(Constant<kWarpSize>(), Constant<1>());
  else body(Constant<kWarpSize>(), Constant<kMaxBlocks>());
}

}  // namespace rec_kernels
