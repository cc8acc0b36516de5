// Forward of embedding_bag where an id is not one row of one table: ids are mapped to rows, and the rows of added or
// multiplied parts become one in registers, never in memory.
//
// A group of lanes takes a bag and one part of its feature, whose columns are its own, or all parts together. The lanes
// map the group's ids, one each, to their rows and pass these around, as for plain features (embedding_bag_pool.cu).
// Bytes moved: every part's row read once per occurrence, the ids once per part, the output written once.
#include "cuda/embedding_bag_pool.cuh"

namespace rec_kernels {
namespace {

// Parts that have the same columns, of one width and format: `count` from `first` on.
struct PartsOfColumns {
  int64_t first;
  int count;
  bool multiply;  // or are added
};

// Ids [begin, begin + G) of a bag, one to a lane: the first byte of its row in every part, which is -1 in the first one
// where the id does not count, and its factor.
template <int G>
struct RowsOfLanes {
  int64_t row[kMaxParts];
  float factor;

  __device__ __forceinline__ RowsOfLanes(const PoolArgs& a, const PartsOfColumns& parts, const Feature& f,
                                         int64_t row_bytes, const Group<G>& group, int64_t begin, int64_t stop,
                                         bool report)
      : row{-1}, factor(1.0f) {
    const int64_t i = begin + group.lane;
    if (i >= stop) return;
    const int64_t id = a.bags.id(i);
    if (!a.bags.in_range(id, f)) {
      if (!report) return;
      note_bad(a.status, i);
      atomicAdd(reinterpret_cast<unsigned long long*>(a.status + 1), 1ull);
    } else if (id != a.bags.padding_idx) {
#pragma unroll
      for (int p = 0; p < kMaxParts; ++p)
        if (p < parts.count)
          row[p] = a.features[parts.first + p].weight_offset +
                   a.features.parts[parts.first + p].partition.row(id) * row_bytes;
      if (a.bags.per_sample_weights) factor = a.bags.per_sample_weights[i];
    }
  }
};

__device__ __forceinline__ void combine(bool multiply, const Vec4& y, Vec4* x) {
  for (int j = 0; j < 4; ++j) x->v[j] = multiply ? x->v[j] * y.v[j] : x->v[j] + y.v[j];
}

// Columns [column, column + kBlocks * 4 * G) of one bag; kAlone: of one part.
template <class Format, int G, int kBlocks, bool kAlone, bool kAligned>
__device__ __forceinline__ void pool_columns(const PoolArgs& a, const PartsOfColumns& parts, const Feature& f,
                                             const Group<G>& group, Range ids, int64_t out, int64_t column,
                                             bool report) {
  const int64_t D = f.embedding_dim, first = column + 4 * group.lane;
  const int64_t row_bytes = Format::row_bytes(D);
  // Ids: of one row, as many as a plain feature has on its way; else half of them, of two rows each or more.
  constexpr int kIds = kAlone ? (kBlocks == kMaxBlocks ? 2 : kMostInFlight) : (kBlocks == 1 ? kMostInFlight / 2 : 1);
  constexpr int kInFlight = kAligned ? kIds : 1;
  const int count = kAlone ? 1 : parts.count;
  Vec4 sum[kBlocks] = {};
  int64_t counted = 0;
  for (int64_t begin = ids.start; begin < ids.stop; begin += G) {
    const RowsOfLanes<G> mine(a, parts, f, row_bytes, group, begin, ids.stop, report);
    const int here = static_cast<int>(ids.stop - begin < G ? ids.stop - begin : G);
    for (int next = 0; next < here; next += kInFlight) {
      int64_t row[kInFlight];
      Vec4 x[kInFlight][kBlocks], y[kInFlight][kBlocks];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        // Lanes past the last id hold no row, and the number of the last lane is never passed.
        row[u] = group.broadcast(mine.row[0], next + u);
        const int64_t other = kAlone ? 0 : group.broadcast(mine.row[1], next + u);
        if (row[u] < 0) continue;
#pragma unroll
        for (int k = 0; k < kBlocks; ++k) {
          x[u][k] = load_row<Format>(a.weights + row[u], first + k * 4 * G, D, kAligned);
          if (count > 1) y[u][k] = load_row<Format>(a.weights + other, first + k * 4 * G, D, kAligned);
        }
      }
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        if (row[u] < 0) continue;
        ++counted;
        if (count > 1)
          for (int k = 0; k < kBlocks; ++k) combine(parts.multiply, y[u][k], &x[u][k]);
#pragma unroll
        for (int p = 2; p < kMaxParts; ++p) {
          if (p >= count) continue;
          const uint8_t* other = a.weights + group.broadcast(mine.row[p], next + u);
#pragma unroll
          for (int k = 0; k < kBlocks; ++k)
            combine(parts.multiply, load_row<Format>(other, first + k * 4 * G, D, kAligned), &x[u][k]);
        }
        // A factor of 1 changes no bit of a sum.
        const float factor = group.broadcast(mine.factor, next + u);
#pragma unroll
        for (int k = 0; k < kBlocks; ++k)
          for (int j = 0; j < 4; ++j) sum[k].v[j] = fused_multiply_add(factor, x[u][k].v[j], sum[k].v[j]);
      }
    }
  }
  store_sums<G>(a, f, counted, out, first, sum);
}

template <class Format>
__device__ __forceinline__ bool all_aligned(const PoolArgs& a, const PartsOfColumns& parts, int64_t D) {
  bool aligned = true;
  for (int p = 0; p < parts.count; ++p)
    aligned = aligned && columns_aligned<Format>(a.weights + a.features[parts.first + p].weight_offset, D);
  return aligned;
}

template <class Format, int G, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks == 1 ? 2 : 1) pool_composed_kernel(PoolArgs a) {
  if (*a.status == kBadLayout) return;
  const Group<G> group;
  const int bits = a.features.part_bits;
  for (int64_t item = Group<G>::first(); item < a.bags.num_bags << bits; item += Group<G>::stride()) {
    const int64_t bag = item >> bits, number = item - (bag << bits), feature = a.bags.feature_of(bag);
    const int64_t part = a.bags.first_part(feature) + number, behind = a.bags.first_part(feature + 1);
    if (part >= behind || !a.features.has_format(part, a.format) || a.features.is_plain(part)) continue;
    if (a.may_be_cached(feature)) continue;
    const Combine how = a.features.parts[part].combine;
    if (how != Combine::kConcat && number > 0) continue;
    const int count = how == Combine::kConcat ? 1 : static_cast<int>(behind - part);
    const PartsOfColumns parts{part, count, how == Combine::kMult};
    const Feature f = a.features[part];
    const int64_t D = f.embedding_dim, out = a.bags.output_row(bag, feature) * a.output_dim + f.output_offset;
    const Range ids = range_of(a.bags, bag, a.status);
    const bool aligned = all_aligned<Format>(a, parts, D);
    for (int64_t column = 0; column < D; column += kBlocks * 4 * G) {
      const bool report = number == 0 && column == 0;  // once for an id
      if (!aligned) pool_columns<Format, G, kBlocks, false, false>(a, parts, f, group, ids, out, column, report);
      else if (count == 1) pool_columns<Format, G, kBlocks, true, true>(a, parts, f, group, ids, out, column, report);
      else pool_columns<Format, G, kBlocks, false, true>(a, parts, f, group, ids, out, column, report);
    }
    if (part + count == behind) store_zeros_behind(a, bag, f.output_offset + D, group);
  }
}

// The dot product of g and the row that an id's parts make.
template <class Format>
__device__ __forceinline__ float composed_dot(const PoolArgs& a, const PartsOfColumns& parts, int64_t D, const float* g,
                                              int64_t id, int lane) {
  const uint8_t* rows[kMaxParts] = {};
#pragma unroll
  for (int p = 0; p < kMaxParts; ++p)
    if (p < parts.count)
      rows[p] = a.weights + a.features[parts.first + p].weight_offset +
                a.features.parts[parts.first + p].partition.row(id) * Format::row_bytes(D);
  float s[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int64_t c = 4 * lane; c < D; c += 4 * kWarpSize) {
    Vec4 x = load_row<Format>(rows[0], c, D, columns_aligned<Format>(rows[0], D));
#pragma unroll
    for (int p = 1; p < kMaxParts; ++p)
      if (p < parts.count)
        combine(parts.multiply, load_row<Format>(rows[p], c, D, columns_aligned<Format>(rows[p], D)), &x);
    for (int j = 0; j < 4; ++j)
      if (c + j < D) s[j] = fused_multiply_add(g[c + j], x.v[j], s[j]);
  }
  return warp_butterfly_sum((s[0] + s[1]) + (s[2] + s[3]));
}

__device__ __forceinline__ float composed_dot(const PoolArgs& a, const PartsOfColumns& parts, int64_t D, const float* g,
                                              int64_t id, int lane) {
  const int64_t index = a.features.format_of ? a.features.format_of[parts.first] : 0;
  switch (a.features.formats[index]) {
    case RowFormat::kFp16:
      return composed_dot<Fp16>(a, parts, D, g, id, lane);
    case RowFormat::kBf16:
      return composed_dot<Bf16>(a, parts, D, g, id, lane);
    case RowFormat::kInt8:
      return composed_dot<Int8>(a, parts, D, g, id, lane);
    case RowFormat::kInt4:
      return composed_dot<Int4>(a, parts, D, g, id, lane);
    case RowFormat::kMx9:
      return composed_dot<Mx9>(a, parts, D, g, id, lane);
    case RowFormat::kMx6:
      return composed_dot<Mx6>(a, parts, D, g, id, lane);
    case RowFormat::kMx4:
      return composed_dot<Mx4>(a, parts, D, g, id, lane);
    default:
      return composed_dot<Fp32>(a, parts, D, g, id, lane);
  }
}

// A warp takes a bag. One launch for all formats: the dot products of parts side by side are added in the parts' order,
// whatever their formats are.
__global__ void __launch_bounds__(kThreads) composed_weight_gradient_kernel(PoolArgs a, const float* grad, float* out) {
  if (*a.status == kBadLayout) return;
  const Group<kWarpSize> warp;
  for (int64_t bag = Group<kWarpSize>::first(); bag < a.bags.num_bags; bag += Group<kWarpSize>::stride()) {
    const int64_t feature = a.bags.feature_of(bag), part = a.bags.first_part(feature);
    if (a.features.is_plain(part)) continue;
    const int count = static_cast<int>(a.bags.first_part(feature + 1) - part);
    const Combine how = a.features.parts[part].combine;
    const int combined = how == Combine::kConcat ? 1 : count;  // into the same columns
    const float* g = grad + a.bags.output_row(bag, feature) * a.output_dim;
    write_dots(a, a.features[part], range_of(a.bags, bag, a.status), warp.lane, out, [&](int64_t id, int64_t i) {
      const Feature first = a.features[part];
      const float* cached = count == 1 ? a.cached_row(part, first.embedding_dim, i) : nullptr;
      if (cached) return warp_row_dot(g + first.output_offset, cached, first.embedding_dim, warp.lane);
      float sum = 0.0f;
      for (int p = 0; p < count; p += combined) {
        const Feature f = a.features[part + p];
        const PartsOfColumns parts{part + p, combined, how == Combine::kMult};
        const float dot = composed_dot(a, parts, f.embedding_dim, g + f.output_offset, id, warp.lane);
        sum = p == 0 ? dot : sum + dot;
      }
      return sum;
    });
  }
}

}  // namespace

void launch_composed_weight_gradient(const PoolArgs& a, const float* grad, float* out, cudaStream_t stream) {
  launch(composed_weight_gradient_kernel, blocks_for_bags(a.bags.num_bags, kWarpSize), dim3(kThreads), 0, stream, a,
         grad, out);
}

void launch_pool_composed(const PoolArgs& a, int64_t max_dim, cudaStream_t stream) {
  with_bag_format(a.features.formats[a.format], [&](auto format) {
    using Format = decltype(format);
    const auto start = [&](auto group, auto blocks) {
      constexpr int G = decltype(group)::value, kBlocks = decltype(blocks)::value;
      const int64_t items = a.bags.num_bags << a.features.part_bits;
      launch(pool_composed_kernel<Format, G, kBlocks>, blocks_for_bags(items, G), dim3(kThreads), 0, stream, a);
    };
    if constexpr (std::is_same<Format, Fp32>::value) with_widths(max_dim, start);
    else with_few_widths(max_dim, start);
  });
}

}  // namespace rec_kernels
