// Lookups of features of one part whose rows may lie in a row cache. As in embedding_bag_pool.cu, a group of lanes
// takes a bag and has several rows on their way; each comes from the cache, as floats, or from the table, decoded.
// Bytes moved: those of the rows as they lie there, the ids and slots, the output written once.
#include "cuda/embedding_bag_pool.cuh"

namespace rec_kernels {
namespace {

// Ids [begin, begin + G) of a bag, one to a lane: the row's first byte, or none of an id that does not count.
template <int G>
struct RowsOfLanes {
  const uint8_t* row = nullptr;
  bool cached = false;
  float factor = 1.0f;

  __device__ __forceinline__ RowsOfLanes(const PoolArgs& a, int64_t part, const Feature& f, int64_t row_bytes,
                                         const Group<G>& group, int64_t begin, int64_t stop, bool report) {
    const int64_t i = begin + group.lane;
    if (i >= stop) return;
    const int64_t id = a.bags.id(i);
    if (!a.bags.in_range(id, f)) {
      if (!report) return;
      note_bad(a.status, i);
      atomicAdd(reinterpret_cast<unsigned long long*>(a.status + 1), 1ull);
    } else if (id != a.bags.padding_idx) {
      row = reinterpret_cast<const uint8_t*>(a.cached_row(part, f.embedding_dim, i));
      cached = row != nullptr;
      const int64_t number = a.features.parts ? a.features.parts[part].partition.row(id) : id;
      if (!cached) row = a.weights + f.weight_offset + number * row_bytes;
      if (a.bags.per_sample_weights) factor = a.bags.per_sample_weights[i];
    }
  }
};

// Whether rows can be read four columns at a time.
struct Aligned {
  bool cache, table;
};

// Columns [column, column + kBlocks * 4 * G) of one bag.
template <class Format, int G, int kBlocks>
__device__ __forceinline__ void pool_columns(const PoolArgs& a, int64_t part, const Feature& f, const Group<G>& group,
                                             Range ids, int64_t out, int64_t column, Aligned aligned) {
  const int64_t D = f.embedding_dim, first = column + 4 * group.lane, row_bytes = Format::row_bytes(D);
  constexpr int kInFlight = kBlocks == kMaxBlocks ? 1 : 2;
  Vec4 sum[kBlocks] = {};
  int64_t counted = 0;
  for (int64_t begin = ids.start; begin < ids.stop; begin += G) {
    const RowsOfLanes<G> mine(a, part, f, row_bytes, group, begin, ids.stop, column == 0);
    const int here = static_cast<int>(ids.stop - begin < G ? ids.stop - begin : G);
    for (int next = 0; next < here; next += kInFlight) {
      const uint8_t* row[kInFlight];
      Vec4 x[kInFlight][kBlocks];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        // Lanes past the last id hold no row, and the number of the last lane is never passed.
        row[u] = reinterpret_cast<const uint8_t*>(group.broadcast(reinterpret_cast<intptr_t>(mine.row), next + u));
        const int cached = group.broadcast(int{mine.cached}, next + u);
        if (!row[u]) continue;
#pragma unroll
        for (int k = 0; k < kBlocks; ++k)
          x[u][k] = cached ? load_row<Fp32>(row[u], first + k * 4 * G, D, aligned.cache)
                           : load_row<Format>(row[u], first + k * 4 * G, D, aligned.table);
      }
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        // A factor of 1 changes no bit of a sum.
        const float factor = group.broadcast(mine.factor, next + u);
        if (!row[u]) continue;
        ++counted;
#pragma unroll
        for (int k = 0; k < kBlocks; ++k)
          for (int j = 0; j < 4; ++j) sum[k].v[j] = fused_multiply_add(factor, x[u][k].v[j], sum[k].v[j]);
      }
    }
  }
  store_sums<G>(a, f, counted, out, first, sum);
}

template <class Format, int G, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks == 1 ? 2 : 1) pool_cached_kernel(PoolArgs a) {
  if (*a.status == kBadLayout) return store_nans(a);  // nothing can be looked up
  const Group<G> group;
  for (int64_t bag = Group<G>::first(); bag < a.bags.num_bags; bag += Group<G>::stride()) {
    const int64_t feature = a.bags.feature_of(bag), part = a.bags.first_part(feature);
    if (!a.features.has_format(part, a.format) || !a.may_be_cached(feature)) continue;
    const Feature f = a.features[part];
    const int64_t out = a.bags.output_row(bag, feature) * a.output_dim + f.output_offset;
    const Range ids = range_of(a.bags, bag, a.status);
    const float* first_cached = a.cache.rows + a.cache.offsets[part];
    const Aligned aligned{rows_aligned(first_cached, f.embedding_dim),
                          columns_aligned<Format>(a.weights + f.weight_offset, f.embedding_dim)};
    for (int64_t column = 0; column < f.embedding_dim; column += kBlocks * 4 * G)
      pool_columns<Format, G, kBlocks>(a, part, f, group, ids, out, column, aligned);
    store_zeros_behind(a, bag, f.embedding_dim, group);
  }
}

}  // namespace

void launch_pool_cached(const PoolArgs& a, int64_t max_dim, cudaStream_t stream) {
  with_bag_format(a.features.formats[a.format], [&](auto format) {
    with_few_widths(max_dim, [&](auto group, auto blocks) {
      constexpr int G = decltype(group)::value, kBlocks = decltype(blocks)::value;
      launch(pool_cached_kernel<decltype(format), G, kBlocks>, blocks_for_bags(a.bags.num_bags, G), dim3(kThreads), 0,
             stream, a);
    });
  });
}

}  // namespace rec_kernels
