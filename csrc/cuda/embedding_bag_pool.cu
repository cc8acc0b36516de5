// Forward of embedding_bag.
//
// A group of lanes takes a bag, a lane four neighbouring columns (one 16-byte load where rows are aligned). The group
// loads its ids together, one to a lane, and passes them around; kInFlight rows are on their way at any time. Rows are
// added in ascending position. Bytes moved: every row read once per occurrence, the ids, the output written once.
#include "cuda/embedding_bag_pool.cuh"

namespace rec_kernels {
namespace {

// Ids [begin, begin + G) of a bag, one to a lane: the row's first byte (or -1: the id does not count) and its factor.
template <int G>
struct IdsOfLanes {
  int64_t row;
  float factor;

  __device__ __forceinline__ IdsOfLanes(const PoolArgs& a, const Feature& f, int64_t row_bytes, const Group<G>& group,
                                        int64_t begin, int64_t stop, bool report)
      : row(-1), factor(1.0f) {
    const int64_t i = begin + group.lane;
    if (i >= stop) return;
    const int64_t id = a.bags.id(i);
    if (!a.bags.in_range(id, f)) {
      if (!report) return;
      note_bad(a.status, i);
      atomicAdd(reinterpret_cast<unsigned long long*>(a.status + 1), 1ull);
    } else if (id != a.bags.padding_idx) {
      row = f.weight_offset + id * row_bytes;
      if (a.bags.per_sample_weights) factor = a.bags.per_sample_weights[i];
    }
  }
};

// Columns [column, column + kBlocks * 4 * G) of one bag.
template <class Format, int G, int kBlocks, bool kWeighted, bool kAligned>
__device__ __forceinline__ void pool_columns(const PoolArgs& a, const Feature& f, const Group<G>& group, Range ids,
                                             int64_t out, int64_t column) {
  const int64_t D = f.embedding_dim, first = column + 4 * group.lane;
  const int64_t row_bytes = Format::row_bytes(D);
  // Wide rows keep enough bytes on their way with two; byte by byte, several rows would only cost registers.
  constexpr int kInFlight = kAligned ? (kBlocks == kMaxBlocks ? 2 : kMostInFlight) : 1;
  Vec4 sum[kBlocks] = {};
  int64_t counted = 0;
  for (int64_t begin = ids.start; begin < ids.stop; begin += G) {
    const IdsOfLanes<G> mine(a, f, row_bytes, group, begin, ids.stop, column == 0);
    const int here = static_cast<int>(ids.stop - begin < G ? ids.stop - begin : G);
    for (int next = 0; next < here; next += kInFlight) {
      int64_t row[kInFlight];
      float factor[kInFlight];
      Vec4 x[kInFlight][kBlocks];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        // Lanes past the last id hold no row, and the number of the last lane is never passed.
        row[u] = group.broadcast(mine.row, next + u);
        factor[u] = kWeighted ? group.broadcast(mine.factor, next + u) : 1.0f;
#pragma unroll
        for (int k = 0; k < kBlocks; ++k)
          if (row[u] >= 0) x[u][k] = load_row<Format>(a.weights + row[u], first + k * 4 * G, D, kAligned);
      }
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        if (row[u] < 0) continue;
        ++counted;
#pragma unroll
        for (int k = 0; k < kBlocks; ++k)
#pragma unroll
          for (int j = 0; j < 4; ++j)
            sum[k].v[j] =
                kWeighted ? fused_multiply_add(factor[u], x[u][k].v[j], sum[k].v[j]) : sum[k].v[j] + x[u][k].v[j];
      }
    }
  }
  store_sums<G>(a, f, counted, out, first, sum);
}

// Told nothing, the compiler spills a little to make room for one more block on a multiprocessor.
template <class Format, int G, int kBlocks, bool kWeighted>
__global__ void __launch_bounds__(kThreads, kBlocks == 1 ? 3 : 1) pool_kernel(PoolArgs a) {
  if (*a.status == kBadLayout) return store_nans(a);  // nothing can be looked up
  const Group<G> group;
  for (int64_t bag = Group<G>::first(); bag < a.bags.num_bags; bag += Group<G>::stride()) {
    const int64_t feature = a.bags.feature_of(bag), part = a.bags.first_part(feature);
    if (!a.features.has_format(part, a.format) || !a.features.is_plain(part)) continue;
    const Feature f = a.features[part];
    const int64_t out = a.bags.output_row(bag, feature) * a.output_dim + f.output_offset;
    const Range ids = range_of(a.bags, bag, a.status);
    const bool aligned = columns_aligned<Format>(a.weights + f.weight_offset, f.embedding_dim);
    for (int64_t column = 0; column < f.embedding_dim; column += kBlocks * 4 * G) {
      if (aligned) pool_columns<Format, G, kBlocks, kWeighted, true>(a, f, group, ids, out, column);
      else pool_columns<Format, G, kBlocks, kWeighted, false>(a, f, group, ids, out, column);
    }
    store_zeros_behind(a, bag, f.embedding_dim, group);
  }
}

template <class Format, bool kWeighted>
void launch_format(const PoolArgs& a, int64_t max_dim, cudaStream_t stream) {
  with_widths(max_dim, [&](auto group, auto blocks) {
    constexpr int G = decltype(group)::value, kBlocks = decltype(blocks)::value;
    launch(pool_kernel<Format, G, kBlocks, kWeighted>, blocks_for_bags(a.bags.num_bags, G), dim3(kThreads), 0, stream,
           a);
  });
}

}  // namespace

void launch_pool(const PoolArgs& a, int64_t max_dim, cudaStream_t stream) {
  with_bag_format(a.features.formats[a.format], [&](auto format) {
    if (a.bags.per_sample_weights) launch_format<decltype(format), true>(a, max_dim, stream);
    else launch_format<decltype(format), false>(a, max_dim, stream);
  });
}

}  // namespace rec_kernels
