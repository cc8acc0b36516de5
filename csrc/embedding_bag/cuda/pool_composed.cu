// Forward of embedding_bag for mapped ids and features of several parts. Rows of added or multiplied parts are combined
// in registers, never in memory.
//
// A group of lanes takes a bag and one concatenated part of its feature, or all added or multiplied parts. Each lane
// maps one id to its rows and shares them with the group, as for plain features (pool_table.cu). Bytes moved: every
// part's row read once per occurrence, the ids once per part, the output written once.
#include "embedding_bag/cuda/pool.cuh"

namespace rec_kernels {
namespace {

// Parts [first, first + count), which share their columns, width and format.
struct PartsOfColumns {
  int64_t first;
  int count;
  bool multiply;  // else they are added
};

__device__ __forceinline__ void combine(bool multiply, const Vec4& y, Vec4* x) {
  for (int j = 0; j < 4; ++j) x->v[j] = multiply ? x->v[j] * y.v[j] : x->v[j] + y.v[j];
}

// Combined rows of an id's parts. kAlone: exactly one part. `aligned`: all_aligned().
template <class Format, int G, int kBlocks, bool kAlone>
struct PartRows {
  const PoolArgs& a;
  const PartsOfColumns& parts;
  int64_t D;
  bool aligned;

  static constexpr bool kPassFirst = false, kEights = false;
  // Ids in flight: kRowsInFlight with one row per id, else at most half, with two or more rows per id.
  static constexpr int kInFlight = kAlone ? kRowsInFlight<kBlocks> : (kBlocks == 1 ? kFewInFlight / 2 : 1);

  // Byte offset of the row in each part; unused elements repeat the first part's.
  struct Place {
    int64_t row[kMaxParts];
  };
  __device__ __forceinline__ int count() const { return kAlone ? 1 : parts.count; }
  __device__ __forceinline__ Place find(int64_t id, int64_t) const {
    Place place;
#pragma unroll
    for (int p = 0; p < kMaxParts; ++p) {
      const int64_t part = parts.first + p;
      place.row[p] = p < count()
                         ? a.parts[part].weight_offset + a.parts.mapped[part].partition.row(id) * Format::row_bytes(D)
                         : place.row[0];
    }
    return place;
  }
  // Another lane's place, shuffled part by part when its row is loaded: all at once would take too many registers.
  struct Passed {
    const Group<G>* group;
    const Place* place;
    int from;

    __device__ __forceinline__ int64_t row(int p) const { return group->broadcast(place->row[p], from); }
    __device__ __forceinline__ operator Place() const {
      Place out;
#pragma unroll
      for (int p = 0; p < kMaxParts; ++p) out.row[p] = row(p);
      return out;
    }
  };
  __device__ __forceinline__ static Passed pass(const Group<G>& group, const Place& place, int from) {
    return {&group, &place, from};
  }
  __device__ __forceinline__ static Place place_of_lane(const Group<G>& group, const Place& place, int lane) {
    return pass(group, place, lane % G);
  }

  // The rows of two parts are in flight at once; those of further parts are loaded afterwards.
  struct Row {
    RawRow<Format, G, kBlocks> first_part, second_part;

    __device__ __forceinline__ void load(const PartRows& rows, Passed place, int64_t first, uint32_t) {
      first_part.load(rows.a.weights + place.row(0), first, rows.D, rows.aligned);
      if constexpr (!kAlone) second_part.load(rows.a.weights + place.row(1), first, rows.D, rows.aligned);
    }
    __device__ __forceinline__ void decode(const PartRows& rows, Passed place, int64_t first, uint32_t,
                                           Vec4 (&x)[kBlocks]) const {
      first_part.decode(first, x);
      if (rows.count() > 1) combine_with(rows, second_part, first, x);
#pragma unroll
      for (int p = 2; p < kMaxParts; ++p) {
        if (p >= rows.count()) continue;
        RawRow<Format, G, kBlocks> other;
        other.load(rows.a.weights + place.row(p), first, rows.D, rows.aligned);
        combine_with(rows, other, first, x);
      }
    }
    __device__ __forceinline__ static void combine_with(const PartRows& rows, const RawRow<Format, G, kBlocks>& other,
                                                        int64_t first, Vec4 (&x)[kBlocks]) {
      Vec4 y[kBlocks];
      other.decode(first, y);
#pragma unroll
      for (int k = 0; k < kBlocks; ++k) combine(rows.parts.multiply, y[k], &x[k]);
    }
  };
};

template <class Format, int G, int kBlocks, bool kAlone, bool kAligned>
__device__ __forceinline__ void pool_parts(const PoolArgs& a, const PartsOfColumns& parts, const Part& f,
                                           const Group<G>& group, Range ids, BagOfFeature bag, int64_t column,
                                           bool report) {
  using Rows = PartRows<Format, G, kBlocks, kAlone>;
  // A factor of 1 changes no bit of a sum, so one kernel serves bags with and without weights.
  pool_columns<Rows, G, kBlocks, kAligned ? Rows::kInFlight : 1, true>(a, Rows{a, parts, f.embedding_dim, kAligned}, f,
                                                                       group, ids, bag, column, report, true);
}

template <class Format>
__device__ __forceinline__ bool all_aligned(const PoolArgs& a, const PartsOfColumns& parts, int64_t D) {
  bool aligned = true;
  for (int p = 0; p < parts.count; ++p)
    aligned = aligned && columns_aligned<Format>(a.weights + a.parts[parts.first + p].weight_offset, D);
  return aligned;
}

template <class Format, int G, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks == 1 ? 2 : 1) pool_composed_kernel(PoolArgs a) {
  if (*a.status == kBadLayout) return;
  const Group<G> group;
  const int bits = a.parts.part_bits;
  for (int64_t item = Group<G>::first(); item < a.bags.num_bags << bits; item += Group<G>::stride()) {
    const int64_t bag = item >> bits, number = item - (bag << bits), feature = a.bags.feature_of(bag);
    const int64_t part = a.bags.first_part(feature) + number, behind = a.bags.first_part(feature + 1);
    if (part >= behind || !a.parts.has_format(part, a.format) || a.parts.is_plain(part)) continue;
    if (a.may_be_cached(feature)) continue;
    const Combine how = a.parts.mapped[part].combine;
    if (how != Combine::kConcat && number > 0) continue;
    const int count = how == Combine::kConcat ? 1 : static_cast<int>(behind - part);
    const PartsOfColumns parts{part, count, how == Combine::kMult};
    const Part f = a.parts[part];
    const int64_t D = f.embedding_dim;
    const BagOfFeature out(bag, feature);
    const Range ids = range_of(a.bags, bag, a.status);
    const bool aligned = all_aligned<Format>(a, parts, D);
    for (int64_t column = 0; column < columns_behind<kBlocks>(D); column += kBlocks * 4 * G) {
      const bool report = number == 0 && column == 0;  // once per id
      if (!aligned) pool_parts<Format, G, kBlocks, false, false>(a, parts, f, group, ids, out, column, report);
      else if (count == 1) pool_parts<Format, G, kBlocks, true, true>(a, parts, f, group, ids, out, column, report);
      else pool_parts<Format, G, kBlocks, false, true>(a, parts, f, group, ids, out, column, report);
    }
    if (part + count == behind) store_zeros_behind(a, bag, f.output_offset + D, group);
  }
}

// A group of lanes takes a bag of a feature of several parts. One launch handles all formats, since the dot products of
// concatenated parts are added in the order of parts, whose formats may differ.
template <int G>
__global__ void __launch_bounds__(kThreads, 2)
    composed_weight_gradient_kernel(PoolArgs a, const float* grad, float* out) {
  if (*a.status == kBadLayout) return;
  const Group<G> group;
  for (int64_t bag = Group<G>::first(); bag < a.bags.num_bags; bag += Group<G>::stride()) {
    const int64_t feature = a.bags.feature_of(bag), part = a.bags.first_part(feature);
    const int count = static_cast<int>(a.bags.first_part(feature + 1) - part);
    if (count == 1) continue;
    const Combine how = a.parts.mapped[part].combine;
    const int combined = how == Combine::kConcat ? 1 : count;  // parts per set of columns
    const float* g = a.bags.row_of(bag, feature, grad, a.output_dim);
    const Range ids = range_of(a.bags, bag, a.status);
    write_dots(a, a.parts[part], group, ids, out, [&](int64_t begin) {
      float sum = 0.0f;
      for (int p = 0; p < count; p += combined) {
        const Part f = a.parts[part + p];
        const PartsOfColumns parts{part + p, combined, how == Combine::kMult};
        const float dot = with_bag_format(f.format, [&](auto of) {
          using Rows = PartRows<decltype(of), G, 1, false>;
          const bool aligned = all_aligned<decltype(of)>(a, parts, f.embedding_dim);
          return dot_of_lane<Rows::kInFlight, 1, true>(a, Rows{a, parts, f.embedding_dim, aligned}, f, group, begin,
                                                       ids.stop, g + f.output_offset);
        });
        sum = p == 0 ? dot : sum + dot;
      }
      return sum;
    });
  }
}

}  // namespace

void launch_composed_weight_gradient(const PoolArgs& a, int64_t max_dim, const float* grad, float* out,
                                     cudaStream_t stream) {
  with_row_lanes(max_dim, [&](auto lanes) {
    launch_for_bags(a.bags.num_bags, lanes, stream, composed_weight_gradient_kernel<lanes>, a, grad, out);
  });
}

void launch_pool_composed(const PoolArgs& a, int64_t max_dim, cudaStream_t stream) {
  with_bag_format(a.parts.formats[a.format], [&](auto format) {
    using Format = decltype(format);
    with_widths_of<Format>(max_dim, [&](auto group, auto blocks) {
      const int64_t items = a.bags.num_bags << a.parts.part_bits;
      launch_for_bags(items, group, stream, pool_composed_kernel<Format, group, blocks>, a);
    });
  });
}

}  // namespace rec_kernels
