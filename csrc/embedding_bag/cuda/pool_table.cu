// Forward of embedding_bag.
//
// A group of lanes takes a bag, a lane four adjacent columns (one 16-byte load for aligned floats), or two blocks of
// four for formats that are bound by instructions instead of bytes. The group loads its ids together, one per lane, and
// shuffles them; it has kRowsOf rows in flight before it decodes the first. Rows are added in ascending position. Bytes
// moved: every row read once per occurrence, the ids, the output written once.
#include "embedding_bag/cuda/pool.cuh"

namespace rec_kernels {
namespace {

template <class Format>
constexpr bool kHalves = std::is_same<Format, Fp16>::value || std::is_same<Format, Bf16>::value;
template <class Format>
constexpr bool kIntegers = std::is_same<Format, Int8>::value || std::is_same<Format, Int4>::value;
template <class Format>
constexpr bool kShares =
    std::is_same<Format, Mx9>::value || std::is_same<Format, Mx6>::value || std::is_same<Format, Mx4>::value;
// Formats whose lookups use half the lanes with two blocks of columns each for rows of up to 128 columns, which halves
// the fixed cost of rows and bags per column. Other formats would lose resident blocks.
template <class Format>
constexpr bool kHalfTheLanes = kIntegers<Format> || kShares<Format>;
// Formats and widths where a lane takes eight adjacent columns instead of two blocks of four, which share the sign
// byte, the exponent and the pair bits.
template <class Format, int kBlocks>
constexpr bool kEightColumns = kShares<Format> && kBlocks == 2;

// Formats and widths without a separate kernel for unweighted bags, which use a factor of 1 (no bit changes): it costs
// a few of hundreds of instructions and no resident block.
template <class Format, int kBlocks>
constexpr bool kAlwaysWeighted =
    kEightColumns<Format, kBlocks> || (kBlocks == kMaxBlocks && !std::is_same<Format, Fp32>::value);

// Formats and widths that decode rows unconditionally. If only the additions are conditional, nvcc makes a branch and
// sinks decoding and loads behind it, so that rows are loaded one after the other. Float rows need no decoding; planes
// of four columns and wider rows would take too many registers.
template <class Format, int kBlocks>
constexpr bool kDecodesAll =
    ((kHalves<Format> || kIntegers<Format>) && kBlocks < kMaxBlocks) || kEightColumns<Format, kBlocks>;

// Type that holds a lane's undecoded columns of a row.
template <class Format, int G, int kBlocks, bool kEights = kEightColumns<Format, kBlocks>>
struct RawOf {
  using type = RawRow<Format, G, kBlocks>;
  static constexpr int kBytes = FourColumns<Format>::kBytes;  // required alignment
};
template <class Format, int G, int kBlocks>
struct RawOf<Format, G, kBlocks, true> {
  using type = RawEightColumns<Format>;
  static constexpr int kBytes = type::kBytes;
};

// Optimization barrier: the compiler must compute x here, and not later where it is used.
__device__ __forceinline__ void keep_here([[maybe_unused]] Vec4& x) {
#if defined(__CUDA_ARCH__)
  asm volatile("" : "+f"(x.v[0]), "+f"(x.v[1]), "+f"(x.v[2]), "+f"(x.v[3]));
#endif
}

// Rows of one table.
template <class Format, int G, int kBlocks, bool kWeighted, bool kAligned>
struct TableRows {
  const uint8_t* first_row;
  int64_t D;

  // With one load per four columns and no factor, shuffling places one by one takes fewer registers.
  static constexpr bool kPassFirst = kWeighted || !std::is_same<Format, Fp32>::value;
  static constexpr bool kEights = kEightColumns<Format, kBlocks>;
  using Place = const uint8_t*;  // start of the row
  __device__ __forceinline__ Place find(int64_t id, int64_t) const { return first_row + id * Format::row_bytes(D); }
  using Passed = Place;
  __device__ __forceinline__ static Passed pass(const Group<G>& group, Place place, int from) {
    return group.broadcast(place, from);
  }
  __device__ __forceinline__ static Place place_of_lane(const Group<G>& group, Place place, int lane) {
    return group.template broadcast<kWarpSize>(place, lane);
  }

  struct Row {
    typename RawOf<Format, G, kBlocks>::type raw;

    __device__ __forceinline__ void load(const TableRows&, Place place, int64_t first, uint32_t D) {
      raw.load(place, first, D, kAligned);
    }
    __device__ __forceinline__ void decode(const TableRows&, Place, int64_t first, uint32_t, Vec4 (&x)[kBlocks]) const {
      raw.decode(first, x);
      if constexpr (kDecodesAll<Format, kBlocks>)
        for (int k = 0; k < kBlocks; ++k) keep_here(x[k]);
    }
  };
};

// Rows in flight: as many as fit in registers without spills at kResident blocks. Each factor takes a register as well.
template <class Format>
constexpr bool kTwice = kHalves<Format> || kIntegers<Format> || std::is_same<Format, Mx9>::value;
template <class Format, int kBlocks>
constexpr int kRowsOf =
    kBlocks == kMaxBlocks ? (kHalves<Format> || kIntegers<Format> ? kFewInFlight : kRowsInFlight<kBlocks>)
                          : (kBlocks == 1 && kTwice<Format> ? 2 * kFewInFlight : kFewInFlight);

template <class Format, int G, int kBlocks, bool kWeighted, bool kAligned>
__device__ __forceinline__ void pool_table(const PoolArgs& a, const Part& f, const Group<G>& group, Range ids,
                                           BagOfFeature bag, int64_t column, bool there) {
  // Unaligned rows are read byte by byte, where several in flight would only cost registers.
  constexpr bool kSeveral = kAligned || (kBlocks < kMaxBlocks && std::is_same<Format, Fp32>::value);
  constexpr int kInFlight = kSeveral ? kRowsOf<Format, kBlocks> : 1;
  using Rows = TableRows<Format, G, kBlocks, kWeighted, kAligned>;
  pool_columns<Rows, G, kBlocks, kInFlight, kWeighted>(a, Rows{a.weights + f.weight_offset, f.embedding_dim}, f, group,
                                                       ids, bag, column, column == 0, there);
}

// Minimum resident blocks per multiprocessor for __launch_bounds__: the most without spills. Without it, nvcc spills to
// fit one more block, or wastes registers that exclude one. Planes take address registers, factors one register each.
// kThreeOfTwo: three resident blocks for groups with two blocks of columns.
template <class Format, bool kWeighted>
constexpr bool kThreeOfTwo = !std::is_same<Format, Fp32>::value || !kWeighted;
template <class Format, int kBlocks, bool kWeighted>
constexpr int kResident = kBlocks == 1 ? (kWeighted || FourColumns<Format>::kWhole ? 3 : 4)
                                       : (kBlocks == 2 && kThreeOfTwo<Format, kWeighted> ? 3 : 2);

// Looks up a bag if its rows have the kernel's format. `there` is false for a group in step without a bag.
template <class Format, int G, int kBlocks, bool kWeighted>
__device__ __forceinline__ void pool_bag(const PoolArgs& a, const Group<G>& group, int64_t bag, bool there) {
  const int64_t feature = a.bags.feature_of(bag), part = a.bags.first_part(feature);
  there = there && a.parts.has_format(part, a.format) && a.parts.is_plain(part);
  if (!group.any_group(there)) return;
  const Part f = a.parts[part];
  const Range ids = there ? range_of(a.bags, bag, a.status) : Range{};
  constexpr int kBytes = RawOf<Format, G, kBlocks>::kBytes;
  const bool aligned =
      !group.any_group(there && !columns_aligned<Format, kBytes>(a.weights + f.weight_offset, f.embedding_dim));
  for (int64_t column = 0; column < columns_behind<kBlocks>(f.embedding_dim); column += kBlocks * 4 * G) {
    const BagOfFeature own(bag, feature);
    if (aligned) pool_table<Format, G, kBlocks, kWeighted, true>(a, f, group, ids, own, column, there);
    else pool_table<Format, G, kBlocks, kWeighted, false>(a, f, group, ids, own, column, there);
  }
  if (there) store_zeros_behind(a, bag, f.embedding_dim, group);
}

template <class Format, int G, int kBlocks, bool kWeighted>
__global__ void __launch_bounds__(kThreads, (kResident<Format, kBlocks, kWeighted>)) pool_kernel(PoolArgs a) {
  if (*a.status == kBadLayout) return store_nans(a);  // nothing can be looked up
  const Group<G> group(Pace::kInStep);
  const auto number = static_cast<uint32_t>(group.in_warp());
  // 32 bits hold every bag index; 64 would take one register too many.
  const auto bags = static_cast<uint32_t>(a.bags.num_bags), stride = static_cast<uint32_t>(Group<G>::stride());
  for (uint32_t first = static_cast<uint32_t>(Group<G>::first()) - number; first < bags;
       first += stride < bags - first ? stride : bags - first) {
    const bool there = number < bags - first;
    pool_bag<Format, G, kBlocks, kWeighted>(a, group, there ? first + number : first, there);
  }
}

// Bags that a group of pool_short_kernel processes together. Finding the feature and waiting for ids costs as much as
// for one bag, and four rows are in flight even if each bag has only one.
constexpr int kShortBags = 4;

// Consecutive bags of one feature with at most G ids in total. Lane b describes the b-th bag; lanes after the last bag
// repeat it.
struct ShortBags {
  int64_t feature, first, begin;  // feature, first bag, position of the first id
  int count, start, stop;         // number of bags; ids of this lane's bag, relative to `begin`
};

// The bag that the row of this lane's id belongs to; undefined in lanes after the last id.
template <int G>
struct BagOfRow {
  uint8_t* out;   // output address
  int counted;    // contributing ids, for mean pooling
  unsigned last;  // bit mask of rows that are the last of their bag
  bool whole;     // all groups in step store sums unchanged, with aligned stores of four columns

  __device__ __forceinline__ BagOfRow(const PoolArgs& a, const Part& f, const Group<G>& group, const ShortBags& bags,
                                      unsigned counting) {
    int bag = 0;
#pragma unroll
    for (int b = 0; b < kShortBags - 1; ++b) bag += group.broadcast(bags.stop, b) <= group.lane;
    const int start = group.broadcast(bags.start, bag), stop = group.broadcast(bags.stop, bag);
    last = group.ballot(group.lane + 1 == stop);
    out = a.output_of(bags.first + bag, bags.feature, f.output_offset);
    const auto rows = reinterpret_cast<uintptr_t>(a.bags.rows_of(bags.feature, a.output));
    whole = !group.any_group(a.output_format != RowFormat::kFp32 || f.mean || rows % 16 != 0 ||
                             ((a.output_dim | f.output_offset | f.embedding_dim) & 3) != 0);
    counted =
        f.mean ? count_bits(static_cast<uint32_t>(counting & ((uint64_t{1} << stop) - (uint64_t{1} << start)))) : 0;
  }
};

// Stores zeros for bags without a contributing row, given by the bit mask `zeros`, and for the columns after the
// feature's.
template <int G>
__device__ __forceinline__ void store_zeros_of(const PoolArgs& a, const Part& f, const Group<G>& group,
                                               const ShortBags& bags, unsigned zeros) {
#pragma unroll 1
  for (int b = 0; b < bags.count; ++b) {
    const int64_t bag = bags.first + b;
    if (zeros >> b & 1u)
      store_output(a, a.output_of(bag, bags.feature, f.output_offset), 4 * group.lane, f.embedding_dim, Vec4{});
    store_zeros_behind(a, bag, f.embedding_dim, group);
  }
}

// Stores the sum after each of rows [next, next + kFewInFlight) that is the last of its bag.
template <int G>
__device__ __forceinline__ void store_short_bags(const PoolArgs& a, const Part& f, const Group<G>& group,
                                                 const BagOfRow<G>& bag, int next, const Vec4 (&sums)[kFewInFlight]) {
  const int64_t first = 4 * group.lane, D = f.embedding_dim;
  if (bag.whole) {
#pragma unroll
    for (int u = 0; u < kFewInFlight; ++u) {
      auto* out = reinterpret_cast<float*>(group.broadcast(bag.out, next + u));
      if (bag.last >> (next + u) & 1u) store_columns(out, first, D, true, sums[u]);
    }
    return;
  }
  // Not unrolled, to limit code size.
#pragma unroll 1
  for (int u = 0; u < kFewInFlight; ++u) {
    const int counted = group.broadcast(bag.counted, next + u);
    uint8_t* out = group.broadcast(bag.out, next + u);
    if (!(bag.last >> (next + u) & 1u)) continue;
    Vec4 sum[1] = {sums[0]};
#pragma unroll
    for (int v = 1; v < kFewInFlight; ++v)
      if (u == v) sum[0] = sums[v];
    store_sums<4 * G>(a, f, counted, out, first, sum);
  }
}

// Pools ShortBags, which have one block of columns. Adds rows in the order of pool_columns(), with the same bits.
template <class Source, int G, bool kWeighted>
__device__ __forceinline__ void pool_short_bags(const PoolArgs& a, const Source& source, const Part& f,
                                                const Group<G>& group, const ShortBags& bags) {
  const int64_t first = 4 * group.lane;
  const int total = group.broadcast(bags.stop, bags.count - 1);  // 0 on every lane of a group without bags
  const IdsOfLanes<Source, G> mine(a, source, f, group, bags.begin, bags.begin + total, true);
  const bool zero = group.lane < bags.count && (mine.counting == 0 || bags.start == bags.stop);
  const unsigned zeros = group.ballot(zero);
  if (zeros != 0 || a.bags.own_rows) store_zeros_of(a, f, group, bags, zeros);
  if (!mine.any) return;
  const BagOfRow<G> bag(a, f, group, bags, mine.counting);
  const int most = static_cast<int>(group.most_of_groups(static_cast<uint32_t>(total)));
  Vec4 sum[1] = {};
#pragma unroll 1
  for (int next = 0; next < most; next += kFewInFlight) {
    Vec4 sums[kFewInFlight];
    add_rows<kFewInFlight, kWeighted>(source, group, mine, next, first, sum, [&](int u) {
      sums[u] = sum[0];
      if (bag.last >> (next + u) & 1u) sum[0] = {};
    });
    store_short_bags(a, f, group, bag, next, sums);
  }
}

// Bags of several features, with more ids than lanes, with bad offsets or with unaligned rows are processed one by one,
// and so are the bags of all groups in step.
template <class Format, int G, bool kWeighted>
__global__ void __launch_bounds__(kThreads, 3) pool_short_kernel(PoolArgs a) {
  if (*a.status == kBadLayout) return store_nans(a);  // nothing can be looked up
  const Group<G> group(Pace::kInStep);
  const int64_t items = ceil_div(a.bags.num_bags, kShortBags);
  for (int64_t item = Group<G>::first(); item - group.in_warp() < items; item += Group<G>::stride()) {
    const int64_t first = item < items ? item * kShortBags : 0, left = a.bags.num_bags - first;
    int count = left < kShortBags ? static_cast<int>(left) : kShortBags;
    const int64_t feature = a.bags.feature_of(first), part = a.bags.first_part(feature);
    const bool together = first + count <= a.bags.first_bag(feature + 1);
    if (item >= items || (together && !(a.parts.has_format(part, a.format) && a.parts.is_plain(part)))) count = 0;
    if (!group.any_group(count > 0)) continue;
    const int last = count > 0 ? count - 1 : 0;
    const int64_t bag = first + (group.lane < last ? group.lane : last);
    const int64_t start = count > 0 ? a.bags.offset(bag) : 0, stop = count > 0 ? a.bags.offset(bag + 1) : 0;
    const int64_t begin = group.broadcast(start, 0);
    const Part f = a.parts[part];
    const bool fits = together && begin >= 0 && start >= begin && stop >= start && stop <= a.bags.num_ids &&
                      stop - begin <= G && columns_aligned<Format>(a.weights + f.weight_offset, f.embedding_dim);
    const bool all_fit = group.ballot(!fits) == 0;
    if (group.any_group(count > 0 && !all_fit)) {
#pragma unroll 1
      for (int b = 0; b < kShortBags; ++b)
        pool_bag<Format, G, 1, kWeighted>(a, group, first + (b < count ? b : 0), b < count);
      continue;
    }
    using Rows = TableRows<Format, G, 1, kWeighted, true>;
    const ShortBags bags{feature, first, begin, count, static_cast<int>(start - begin), static_cast<int>(stop - begin)};
    pool_short_bags<Rows, G, kWeighted>(a, Rows{a.weights + f.weight_offset, f.embedding_dim}, f, group, bags);
  }
}

// Formats that have a kernel for short bags: floats, whose lookups are bound by reading rows.
template <class Format>
constexpr bool kShort = std::is_same<Format, Fp32>::value || kHalves<Format>;

// True if on average kShortBags bags have at most G ids and need at most two rounds of rows. False if max_dim is not a
// multiple of four: unaligned rows would be processed one by one.
template <int G>
bool are_short(const Bags& bags, int64_t max_dim) {
  constexpr int64_t kMost = G / kShortBags < 2 ? G / kShortBags : 2;
  return bags.num_ids <= kMost * bags.num_bags && max_dim % 4 == 0;
}

// with_widths(), adapted to the lookups of a format.
template <class Format, class Body>
void with_lookup_widths(int64_t max_dim, const Body& body) {
  with_widths(max_dim, [&](auto group, auto blocks) {
    constexpr int G = decltype(group)::value, kBlocks = decltype(blocks)::value;
    constexpr int kTimes = kHalfTheLanes<Format> && kBlocks == 1 && G > 4 ? 2 : 1;
    body(Constant<G / kTimes>(), Constant<kBlocks * kTimes>());
  });
}

template <class Format, bool kWeighted>
void launch_format(const PoolArgs& a, int64_t max_dim, cudaStream_t stream) {
  with_lookup_widths<Format>(max_dim, [&](auto group, auto blocks) {
    constexpr int G = decltype(group)::value, kBlocks = decltype(blocks)::value;
    if constexpr (kShort<Format> && kBlocks == 1) {
      if (are_short<G>(a.bags, max_dim)) {
        launch_for_bags(ceil_div(a.bags.num_bags, kShortBags), G, stream, pool_short_kernel<Format, G, kWeighted>, a);
        return;
      }
    }
    constexpr bool kFactors = kWeighted || kAlwaysWeighted<Format, kBlocks>;
    launch_for_bags(a.bags.num_bags, G, stream, pool_kernel<Format, G, kBlocks, kFactors>, a);
  });
}

}  // namespace

void launch_pool(const PoolArgs& a, int64_t max_dim, cudaStream_t stream) {
  with_bag_format(a.parts.formats[a.format], [&](auto format) {
    if (a.bags.per_sample_weights) launch_format<decltype(format), true>(a, max_dim, stream);
    else launch_format<decltype(format), false>(a, max_dim, stream);
  });
}

}  // namespace rec_kernels
