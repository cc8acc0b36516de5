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
                                           int64_t out, int64_t column) {
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
__global__ void __launch_bounds__(kThreads, (kResident<Format, kBlocks>)) pool_kernel(PoolArgs a) {
  if (*a.status == kBadLayout) return store_nans(a);  // nothing can be looked up
  const Group<G> group;
  for (int64_t bag = Group<G>::first(); bag < a.bags.num_bags; bag += Group<G>::stride()) {
    const int64_t feature = a.bags.feature_of(bag), part = a.bags.first_part(feature);
    if (!a.features.has_format(part, a.format) || !a.features.is_plain(part)) continue;
    const Feature f = a.features[part];
    const int64_t out = a.bags.output_row(bag, feature) * a.output_dim + f.output_offset;
    const Range ids = range_of(a.bags, bag, a.status);
    const bool aligned = columns_aligned<Format>(a.weights + f.weight_offset, f.embedding_dim);
    for (int64_t column = 0; column < columns_behind<kBlocks>(f.embedding_dim); column += kBlocks * 4 * G) {
      if (aligned) pool_table<Format, G, kBlocks, kWeighted, true>(a, f, group, ids, out, column);
      else pool_table<Format, G, kBlocks, kWeighted, false>(a, f, group, ids, out, column);
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
