// Groups of lanes that work on one bag or row.
#pragma once

#include <type_traits>

#include "core/cuda/vec.cuh"
#include "core/host_device.h"

namespace rec_kernels {
inline namespace RK_ISA {

constexpr int kThreads = 256, kWarpSize = 32;
constexpr unsigned kFullWarp = 0xffffffffu;

// Execution of the groups of a warp: each at its own pace, or all in step. In step, groups without work take part in
// every shuffle: branches and loops around shuffles depend on any_group() or most_of_groups(), or are uniform. The
// masks of shuffles are then compile-time constants; otherwise the GPU must determine the converged lanes at each
// shuffle.
enum class Pace { kOwn, kInStep };

// A group of G adjacent lanes of a warp that works on one bag or row. Lane l takes columns 4l .. 4l+3 of every block of
// 4G columns.
template <int G>
struct Group {
  int lane;       // index in the group
  unsigned mask;  // participating lanes of shuffles: the group's, or all of the warp in step
  bool in_step;   // in step with the other groups of the warp

  __device__ __forceinline__ explicit Group(Pace pace = Pace::kOwn)
      : lane(threadIdx.x % kWarpSize % G), in_step(pace == Pace::kInStep && G < kWarpSize) {
    mask = in_step ? kFullWarp : lanes();
  }
  // Index of this group in its warp.
  __device__ __forceinline__ static int in_warp() { return static_cast<int>(threadIdx.x) % kWarpSize / G; }
  __device__ __forceinline__ static int64_t first() { return (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / G; }
  __device__ __forceinline__ static int64_t stride() { return int64_t{gridDim.x} * blockDim.x / G; }
  // x of lane `from` of the group, or of the enclosing kWidth lanes.
  template <int kWidth = G, class T>
  __device__ __forceinline__ T broadcast(T x, int from) const {
    return __shfl_sync(mask, x, from, kWidth);
  }
  // Broadcasts an address in global memory; the conversion keeps the address space known to the compiler.
  template <int kWidth = G, class T>
  __device__ __forceinline__ T* broadcast(T* x, int from) const {
    return static_cast<T*>(
        __cvta_global_to_generic(static_cast<size_t>(broadcast<kWidth>(reinterpret_cast<intptr_t>(x), from))));
  }
  // Sum of x over the lanes, on every lane, in the order of the xor butterfly G / 2, ..., 2, 1 (docs/numerics.md).
  template <class T>
  __device__ __forceinline__ T sum(T x) const {
#pragma unroll
    for (int distance = G / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(mask, x, distance, G);
    return x;
  }
  // Bit mask of the group's lanes in the warp.
  __device__ __forceinline__ unsigned lanes() const {
    return G == kWarpSize ? kFullWarp : ((1u << G % kWarpSize) - 1) << (threadIdx.x % kWarpSize - lane);
  }
  // Extracts the group's bits from a bit mask of the warp; bit l belongs to lane l of the group.
  __device__ __forceinline__ unsigned bits_of(unsigned all) const {
    return (all & lanes()) >> (threadIdx.x % kWarpSize - lane);
  }
  __device__ __forceinline__ unsigned ballot(bool x) const { return bits_of(__ballot_sync(mask, x)); }
  // x, which is uniform over the group; in step, true if it is true for any group of the warp.
  __device__ __forceinline__ bool any_group(bool x) const { return in_step ? __any_sync(kFullWarp, x) != 0 : x; }
  // x, which is uniform over the group; in step, the maximum over the groups of the warp.
  __device__ __forceinline__ uint32_t most_of_groups(uint32_t x) const {
    return in_step ? __reduce_max_sync(kFullWarp, x) : x;
  }
};

// Number of columns of a row in [first, columns), clamped to kBlocks * 4 * G so that they fit in 32 bits.
template <int G, int kBlocks>
__device__ __forceinline__ int columns_left(int64_t first, int64_t columns) {
  constexpr int kMost = kBlocks * 4 * G;
  return columns - first < kMost ? static_cast<int>(columns - first) : kMost;
}

// Loads the lane's columns of kBlocks blocks starting at `column`: load_columns() of vec.cuh with one alignment branch
// for all. Columns at or beyond `columns` are 0.
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

// Stores the same columns.
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

// Grid for `items` groups of `lanes`, capped at `most` blocks.
inline dim3 capped_grid(int64_t most, int64_t items, int lanes, int threads = kThreads) {
  const int64_t blocks = ceil_div(items * lanes, threads);
  return dim3(static_cast<unsigned>(blocks < 1 ? 1 : (blocks < most ? blocks : most)));
}

// Grid size for grid-stride loops over items: at most a few times the resident blocks, so that finished blocks are
// replaced. Empty items do not cost a block launch.
inline dim3 blocks_for(int64_t items, int lanes) {
  constexpr int64_t kRounds = 4;
  const int64_t most = kRounds * ceil_div(resident_threads(), kThreads);
  return capped_grid(most < kMostBlocks ? most : kMostBlocks, items, lanes);
}

// Grid size for bags: one group per bag without a stride, since starting blocks dynamically balances bags of different
// lengths better.
inline dim3 blocks_for_bags(int64_t bags, int lanes) { return capped_grid(kMostBlocks, bags, lanes); }

// Launches a kernel whose groups of `lanes` take items in a grid-stride loop, or (launch_for_bags) one bag each.
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
// Launches a kernel with a single thread.
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

// Integer as a template argument.
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

// Maximum blocks of 4 * 32 columns that a warp keeps in registers; wider rows are processed in several passes.
constexpr int kMaxBlocks = 4;

// Calls body(G, kBlocks) with Constants: the lanes for rows of at most max_dim columns, and the blocks of 4 * G columns
// that they keep.
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

// with_widths() for kernels with a high fixed cost per row: fewer lanes per row, with more columns each, so that a warp
// processes several rows at once. Up to 256 columns, a lane keeps at most kMost blocks, 2 if it also keeps state.
template <int kMost, class Body>
void with_few_lanes(int64_t max_dim, const Body& body) {
  if (max_dim <= 16) body(Constant<4>(), Constant<1>());
  else if (max_dim <= 32) body(Constant<4>(), Constant<2>());
  else if (max_dim <= 64) body(Constant<8>(), Constant<2>());
  else if (max_dim <= 128) body(Constant<32 / kMost>(), Constant<kMost>());
  else if (max_dim <= 256) body(Constant<64 / kMost>(), Constant<kMost>());
  else body(Constant<kWarpSize>(), Constant<kMaxBlocks>());
}

// True for kernels of the widest rows, which may have more columns than a group keeps. In all other kernels rows always
// fit, and the compiler drops the code for wider ones, with its registers.
template <int kBlocks, int G = kWarpSize>
constexpr bool kTakesWider = kBlocks == kMaxBlocks && G == kWarpSize;

// Loop bound for columns 0, kBlocks * 4 * G, ...: 1 if one pass suffices.
template <int kBlocks, int G = kWarpSize>
__device__ __forceinline__ int64_t columns_behind(int64_t D) {
  return kTakesWider<kBlocks, G> ? D : 1;
}
// True if a row of D columns has more columns than a group keeps at once.
template <int G, int kBlocks>
__device__ __forceinline__ bool is_wider(int64_t D) {
  return kTakesWider<kBlocks, G> && D > kBlocks * 4 * G;
}

// Lanes for narrow encoded rows, which would leave most of a warp idle.
constexpr int kFewLanes = 8;

// with_widths() with fewer kernel instances, for encoded rows: rows that exceed one block per lane use the kernel for
// the widest rows.
template <class Body>
void with_few_widths(int64_t max_dim, const Body& body) {
  if (max_dim <= 4 * kFewLanes) body(Constant<kFewLanes>(), Constant<1>());
  else if (max_dim <= 4 * kWarpSize) body(Constant<kWarpSize>(), Constant<1>());
  else body(Constant<kWarpSize>(), Constant<kMaxBlocks>());
}

}  // namespace rec_kernels
