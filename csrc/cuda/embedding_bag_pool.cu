// Forward of embedding_bag.
//
// A group of lanes takes a bag, a lane four neighbouring columns (one 16-byte load where rows are aligned floats). The
// group loads its ids together, one to a lane, and passes them around; it asks for kRowsOf rows before it decodes the
// first of them. Rows are added in ascending position. Bytes moved: every row read once per occurrence, the
// ids, the output written once.
#include "cuda/embedding_bag_pool.cuh"

namespace rec_kernels {
namespace {

template <class Format>
constexpr bool kHalves = std::is_same<Format, Fp16>::value || std::is_same<Format, Bf16>::value;
template <class Format>
constexpr bool kIntegers = std::is_same<Format, Int8>::value || std::is_same<Format, Int4>::value;

// The rows of a table.
template <class Format, int G, int kBlocks, bool kAligned>
struct TableRows {
  const uint8_t* weights;
  int64_t weight_offset, D;

  static constexpr bool kFactorsTogether =
      std::is_same<Format, Fp32>::value || kHalves<Format> || (kIntegers<Format> && kBlocks == 1);
  using Place = int64_t;  // a row's first byte
  __device__ __forceinline__ Place find(int64_t id, int64_t) const { return weight_offset + id * Format::row_bytes(D); }
  __device__ __forceinline__ static Place broadcast(const Group<G>& group, Place place, int from) {
    return group.broadcast(place, from);
  }

  struct Row {
    RawRow<Format, G, kBlocks> raw;

    __device__ __forceinline__ void load(const TableRows& table, const Group<G>& group, Place place, int from,
                                         int64_t first) {
      raw.load(table.weights + group.broadcast(place, from), first, table.D, kAligned);
    }
    __device__ __forceinline__ void decode(const TableRows&, const Group<G>&, Place, int, int64_t first,
                                           Vec4 (&x)[kBlocks]) const {
      raw.decode(first, x);
    }
  };
};

// Rows on their way: as many as registers hold without spills and without fewer resident blocks than kResident. A
// factor for each of them takes its own register.
template <class Format, bool kWeighted>
constexpr bool kTwice = kHalves<Format> || (!kWeighted && (kIntegers<Format> || std::is_same<Format, Mx9>::value));
template <class Format, int kBlocks, bool kWeighted>
constexpr int kRowsOf =
    kBlocks == kMaxBlocks ? (kHalves<Format> || kIntegers<Format> ? kFewInFlight : kRowsInFlight<kBlocks>)
                          : (kBlocks == 1 && kTwice<Format, kWeighted> ? 2 * kFewInFlight : kFewInFlight);

template <class Format, int G, int kBlocks, bool kWeighted, bool kAligned>
__device__ __forceinline__ void pool_table(const PoolArgs& a, const Feature& f, const Group<G>& group, Range ids,
                                           uint8_t* out, int64_t column) {
  // Byte by byte, several rows would only cost registers.
  constexpr bool kSeveral = kAligned || (kBlocks < kMaxBlocks && std::is_same<Format, Fp32>::value);
  constexpr int kInFlight = kSeveral ? kRowsOf<Format, kBlocks, kWeighted> : 1;
  using Rows = TableRows<Format, G, kBlocks, kAligned>;
  pool_columns<Rows, G, kBlocks, kInFlight, kWeighted>(a, Rows{a.weights, f.weight_offset, f.embedding_dim}, f, group,
                                                       ids, out, column, column == 0);
}

// Blocks that a multiprocessor holds at least: told nothing, the compiler spills a little to make room for one more.
// The planes of wide rows take too many addresses for two.
template <class Format, int kBlocks>
constexpr int kResident = kBlocks == 1 ? 3 : (kBlocks == kMaxBlocks && FourColumns<Format>::kWhole ? 1 : 2);

template <class Format, int G, int kBlocks, bool kWeighted>
__device__ __forceinline__ void pool_bag(const PoolArgs& a, const Group<G>& group, int64_t bag) {
  const int64_t feature = a.bags.feature_of(bag), part = a.bags.first_part(feature);
  if (!a.features.has_format(part, a.format) || !a.features.is_plain(part)) return;
  const Feature f = a.features[part];
  uint8_t* out = a.output_of(bag, feature, f.output_offset);
  const Range ids = range_of(a.bags, bag, a.status);
  const bool aligned = columns_aligned<Format>(a.weights + f.weight_offset, f.embedding_dim);
  for (int64_t column = 0; column < columns_behind<kBlocks>(f.embedding_dim); column += kBlocks * 4 * G) {
    if (aligned) pool_table<Format, G, kBlocks, kWeighted, true>(a, f, group, ids, out, column);
    else pool_table<Format, G, kBlocks, kWeighted, false>(a, f, group, ids, out, column);
  }
  store_zeros_behind(a, bag, f.embedding_dim, group);
}

template <class Format, int G, int kBlocks, bool kWeighted>
__global__ void __launch_bounds__(kThreads, (kResident<Format, kBlocks>)) pool_kernel(PoolArgs a) {
  if (*a.status == kBadLayout) return store_nans(a);  // nothing can be looked up
  const Group<G> group;
  for (int64_t bag = Group<G>::first(); bag < a.bags.num_bags; bag += Group<G>::stride())
    pool_bag<Format, G, kBlocks, kWeighted>(a, group, bag);
}

// Bags that a group of pool_short_kernel takes together: finding a feature, and waiting for ids, costs as much as for
// one, and four rows are on their way where each bag has a single one.
constexpr int kShortBags = 4;

// The bags from `first` on that a group takes together; each lane below `count` has one.
struct ShortBags {
  int64_t first, begin;  // the first of them, and of their ids
  int count, stop;       // of this lane's bag: the first id behind it, from `begin` on

  // Behind the ids of a bag.
  template <int G>
  __device__ __forceinline__ int stop_of(const Group<G>& group, int bag) const {
    return group.broadcast(stop, bag);
  }
};

// One block of columns of bags whose ids, at most G of them, lie side by side. Rows are added, bag by bag, as in
// pool_columns: the sums have the same bits.
template <class Source, int G, bool kWeighted>
__device__ __forceinline__ void pool_short_bags(const PoolArgs& a, const Source& source, const Feature& f,
                                                int64_t feature, const Group<G>& group, const ShortBags& bags) {
  constexpr int kRows = kShortBags < G ? kShortBags : G;
  const int64_t first = 4 * group.lane;
  const int total = bags.stop_of(group, bags.count - 1);
  const IdsOfLanes<Source, G> mine(a, source, f, group, bags.begin, bags.begin + total, true);
  Vec4 sum[1] = {};
  int bag = 0, from = 0, stop = bags.stop_of(group, 0);
  // Stores the sums of all bags whose last id is before number `row`, the empty ones behind them among these.
  const auto store_until = [&](int row) {
    while (bag < bags.count && stop <= row) {
      const uint64_t own = uint64_t{mine.counting} >> from & ((uint64_t{1} << (stop - from)) - 1);
      const int64_t number = bags.first + bag;
      store_sums<G>(a, f, count_bits(static_cast<uint32_t>(own)), a.output_of(number, feature, f.output_offset), first,
                    sum);
      store_zeros_behind(a, number, f.embedding_dim, group);
      sum[0] = {};
      from = stop;
      ++bag;
      stop = bags.stop_of(group, bag < kShortBags ? bag : 0);
    }
  };
  store_until(0);
  if (mine.counting == 0) return store_until(total);
#pragma unroll 1
  for (int next = 0; next < total; next += kRows) {
    typename Source::Row row[kRows];
    float factor[kRows];
#pragma unroll
    for (int u = 0; u < kRows; ++u) row[u].load(source, group, mine.place, next + u, first);
#pragma unroll
    for (int u = 0; u < kRows; ++u) factor[u] = kWeighted ? group.broadcast(mine.factor, next + u) : 1.0f;
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      Vec4 x[1];
      row[u].decode(source, group, mine.place, next + u, first, x);
      const bool counts = mine.counting >> (next + u) & 1u;
      for (int j = 0; j < 4; ++j)
        if (counts)
          sum[0].v[j] = kWeighted ? fused_multiply_add(factor[u], x[0].v[j], sum[0].v[j]) : sum[0].v[j] + x[0].v[j];
      if (next + u < total) store_until(next + u + 1);
    }
  }
}

// The same of calls whose bags have at most two ids on average.
template <class Format, int G, bool kWeighted>
__global__ void __launch_bounds__(kThreads, 3) pool_short_kernel(PoolArgs a) {
  if (*a.status == kBadLayout) return store_nans(a);  // nothing can be looked up
  const Group<G> group;
  const int64_t items = ceil_div(a.bags.num_bags, kShortBags);
  for (int64_t item = Group<G>::first(); item < items; item += Group<G>::stride()) {
    const int64_t first = item * kShortBags, left = a.bags.num_bags - first;
    const int count = left < kShortBags ? static_cast<int>(left) : kShortBags;
    const int64_t feature = a.bags.feature_of(first), part = a.bags.first_part(feature);
    const int64_t bag = first + (group.lane < count ? group.lane : count - 1);
    const int64_t start = a.bags.offset(bag), stop = a.bags.offset(bag + 1), begin = group.broadcast(start, 0);
    // Of one feature, with offsets that rise and lie among the ids, and no more ids than lanes.
    const bool good = bag < a.bags.first_bag(feature + 1) && begin >= 0 && start >= begin && stop >= start &&
                      stop <= a.bags.num_ids && stop - begin <= G;
    const unsigned bad = group.ballot(!good);
    const Feature f = a.features[part];
    if (bad != 0 || !columns_aligned<Format>(a.weights + f.weight_offset, f.embedding_dim)) {
      for (int b = 0; b < count; ++b) pool_bag<Format, G, 1, kWeighted>(a, group, first + b);
      continue;
    }
    if (!a.features.has_format(part, a.format) || !a.features.is_plain(part)) continue;
    using Rows = TableRows<Format, G, 1, true>;
    pool_short_bags<Rows, G, kWeighted>(a, Rows{a.weights, f.weight_offset, f.embedding_dim}, f, feature, group,
                                        {first, begin, count, static_cast<int>(stop - begin)});
  }
}

// Formats for which there are kernels for short bags: rows of floats, which are what their time is spent on.
template <class Format>
constexpr bool kShort = std::is_same<Format, Fp32>::value || kHalves<Format>;

template <class Format, bool kWeighted>
void launch_format(const PoolArgs& a, int64_t max_dim, cudaStream_t stream) {
  with_widths(max_dim, [&](auto group, auto blocks) {
    constexpr int G = decltype(group)::value, kBlocks = decltype(blocks)::value;
    if constexpr (kShort<Format> && kBlocks == 1) {
      if (a.bags.num_ids <= 2 * a.bags.num_bags) {
        launch(pool_short_kernel<Format, G, kWeighted>, blocks_for_bags(ceil_div(a.bags.num_bags, kShortBags), G),
               dim3(kThreads), 0, stream, a);
        return;
      }
    }
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
