// Lookups with a row cache for features of one part, and the gradient of per_sample_weights for all features of one
// part. As in pool_table.cu, a group of lanes takes a bag and has several rows in flight; each is read from the cache
// as floats, or from the table and decoded. Bytes moved: the rows as stored, the ids and slots, and once the output, or
// the gradients of bags and weights.
#include "embedding_bag/cuda/pool.cuh"

namespace rec_kernels {
namespace {

// Rows of one part. kCached: some may be in the cache. kAligned: table and cache can be read four columns at a time.
template <class Format, int G, int kBlocks, bool kAligned, bool kCached>
struct OnePartRows {
  const PoolArgs& a;
  const Part& f;
  int64_t part;

  // 2 * byte offset in the table, or 2 * byte offset in the cache + 1.
  using Place = int64_t;
  __device__ __forceinline__ Place find(int64_t id, int64_t i) const {
    const int64_t cached = kCached ? a.cached_place(part, f.embedding_dim, i) : -1;
    if (cached >= 0) return 2 * static_cast<int64_t>(sizeof(float)) * cached + 1;
    const int64_t number = a.parts.mapped ? a.parts.mapped[part].partition.row(id) : id;
    return 2 * (f.weight_offset + number * Format::row_bytes(f.embedding_dim));
  }
  using Passed = Place;
  __device__ __forceinline__ static Passed pass(const Group<G>& group, Place place, int from) {
    return group.broadcast(place, from);
  }
  __device__ __forceinline__ static Place place_of_lane(const Group<G>& group, Place place, int lane) {
    return group.template broadcast<kWarpSize>(place, lane);
  }

  [[maybe_unused]] static constexpr bool kPassFirst = true, kEights = false;
  // Rows in flight. kEither: registers hold the raw bytes of both kinds, so only two narrow rows fit, and wide rows are
  // decoded at once.
  static constexpr bool kEither = kCached && !std::is_same<Format, Fp32>::value;
  static constexpr int kInFlight = !kAligned || kBlocks == kMaxBlocks ? 1 : (kEither ? kFewInFlight / 2 : kFewInFlight);

  struct Row {
    bool cached;
    RawRow<Fp32, G, kBlocks> floats;
    RawRow<Format, G, kBlocks> encoded;
    Vec4 decoded[kBlocks];

    __device__ __forceinline__ void load(const OnePartRows& rows, Place place, int64_t first, uint32_t D) {
      cached = place & 1;
      const int64_t byte = place >> 1;
      const auto* cache = reinterpret_cast<const uint8_t*>(rows.a.cache.rows);
      if constexpr (!kEither) {
        encoded.load((kCached && cached ? cache : rows.a.weights) + byte, first, D, kAligned);
      } else if (cached) {
        floats.load(cache + byte, first, D, kAligned);
        if (kInFlight == 1) floats.decode(first, decoded);
      } else {
        encoded.load(rows.a.weights + byte, first, D, kAligned);
        if (kInFlight == 1) encoded.decode(first, decoded);
      }
    }
    __device__ __forceinline__ void decode(const OnePartRows&, Place, int64_t first, uint32_t,
                                           Vec4 (&x)[kBlocks]) const {
      if constexpr (!kEither) {
        encoded.decode(first, x);
      } else if constexpr (kInFlight == 1) {
        for (int k = 0; k < kBlocks; ++k) x[k] = decoded[k];
      } else {
        if (cached) floats.decode(first, x);
        else encoded.decode(first, x);
      }
    }
  };
};

template <class Format, int G, int kBlocks, bool kAligned>
__device__ __forceinline__ void pool_part(const PoolArgs& a, int64_t part, const Part& f, const Group<G>& group,
                                          Range ids, BagOfFeature bag, int64_t column, bool there) {
  using Rows = OnePartRows<Format, G, kBlocks, kAligned, true>;
  // A factor of 1 changes no bit of a sum, so one kernel serves bags with and without weights.
  pool_columns<Rows, G, kBlocks, Rows::kInFlight, true>(a, Rows{a, f, part}, f, group, ids, bag, column, column == 0,
                                                        there);
}

// True if rows of the part can be read four columns at a time, in its table and in the cache.
template <class Format>
__device__ __forceinline__ bool are_aligned(const PoolArgs& a, int64_t part, const Part& f) {
  const bool of_cache = !a.cache.slots || (rows_aligned(a.cache.rows, f.embedding_dim) &&
                                           a.parts.records[part].cache_row_offset % 4 == 0);
  return of_cache && columns_aligned<Format>(a.weights + f.weight_offset, f.embedding_dim);
}

template <class Format, int G, int kBlocks>
__global__ void __launch_bounds__(kThreads, 2) pool_cached_kernel(PoolArgs a) {
  if (*a.status == kBadLayout) return store_nans(a);  // nothing can be looked up
  const Group<G> group(Pace::kInStep);
  for (int64_t own = Group<G>::first(); own - group.in_warp() < a.bags.num_bags; own += Group<G>::stride()) {
    const int64_t bag = own < a.bags.num_bags ? own : 0;
    const int64_t feature = a.bags.feature_of(bag), part = a.bags.first_part(feature);
    const bool there = own == bag && a.parts.has_format(part, a.format) && a.may_be_cached(feature);
    if (!group.any_group(there)) continue;
    const Part f = a.parts[part];
    const Range ids = there ? range_of(a.bags, bag, a.status) : Range{};
    const bool aligned = !group.any_group(there && !are_aligned<Format>(a, part, f));
    for (int64_t column = 0; column < columns_behind<kBlocks>(f.embedding_dim); column += kBlocks * 4 * G) {
      const BagOfFeature out(bag, feature);
      if (aligned) pool_part<Format, G, kBlocks, true>(a, part, f, group, ids, out, column, there);
      else pool_part<Format, G, kBlocks, false>(a, part, f, group, ids, out, column, there);
    }
    if (there) store_zeros_behind(a, bag, f.embedding_dim, group);
  }
}

// A group of lanes takes a bag: out[i] = (gradient of the bag) . (row of id i), times 1 / n for mean.
template <class Format, int G, int kBlocks, bool kCached>
__global__ void __launch_bounds__(kThreads, 2) weight_gradient_kernel(PoolArgs a, const float* grad, float* out) {
  if (*a.status == kBadLayout) return;
  const Group<G> group;
  for (int64_t bag = Group<G>::first(); bag < a.bags.num_bags; bag += Group<G>::stride()) {
    const int64_t feature = a.bags.feature_of(bag), part = a.bags.first_part(feature);
    if (!a.parts.has_format(part, a.format) || a.bags.first_part(feature + 1) - part > 1) continue;
    const Part f = a.parts[part];
    const float* g = a.bags.row_of(bag, feature, grad, a.output_dim) + f.output_offset;
    const Range ids = range_of(a.bags, bag, a.status);
    const bool aligned = are_aligned<Format>(a, part, f);
    write_dots(a, f, group, ids, out, [&](int64_t begin) {
      const auto dot = [&](auto rows) {
        return dot_of_lane<decltype(rows)::kInFlight, kBlocks, kTakesWider<kBlocks>>(a, rows, f, group, begin, ids.stop,
                                                                                     g);
      };
      if (aligned) return dot(OnePartRows<Format, G, kBlocks, true, kCached>{a, f, part});
      return dot(OnePartRows<Format, G, kBlocks, false, kCached>{a, f, part});
    });
  }
}

}  // namespace

void launch_pool_cached(const PoolArgs& a, int64_t max_dim, cudaStream_t stream) {
  with_bag_format(a.parts.formats[a.format], [&](auto format) {
    with_few_widths(max_dim, [&](auto group, auto blocks) {
      launch_for_bags(a.bags.num_bags, group, stream, pool_cached_kernel<decltype(format), group, blocks>, a);
    });
  });
}

void launch_weight_gradient(const PoolArgs& a, int64_t max_dim, const float* grad, float* out, cudaStream_t stream) {
  with_bag_format(a.parts.formats[a.format], [&](auto format) {
    using Format = decltype(format);
    with_widths_of<Format>(max_dim, [&](auto group, auto blocks) {
      const auto kernel = a.cache.slots ? weight_gradient_kernel<Format, group, blocks, true>
                                        : weight_gradient_kernel<Format, group, blocks, false>;
      launch_for_bags(a.bags.num_bags, group, stream, kernel, a, grad, out);
    });
  });
}

}  // namespace rec_kernels
