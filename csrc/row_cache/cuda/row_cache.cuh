// Device functions and launchers that the CUDA kernels of the row cache share.
#pragma once

#include "embedding_bag/cuda/cache_input.cuh"
#include "rows/cuda/writer.cuh"

namespace rec_kernels {
inline namespace RK_ISA {

// Shared memory per block that every GPU provides.
constexpr int64_t kSharedBytes = 48 * 1024;

// The first cached part whose table has a linear row, or -1.
__device__ __forceinline__ int64_t part_of_row(const CacheTensors& cache, const Parts& parts, int64_t row) {
  const int64_t* firsts = cache.order.first_rows;
  const int64_t i = first_behind(0, *cache.order.count, [&](int64_t j) { return firsts[j] > row; }) - 1;
  if (i < 0) return -1;
  const int64_t p = cache.order.parts[i];
  return row - firsts[i] < parts.records[p].num_embeddings ? p : -1;
}

// part_of_row() for the row in a slot; also -1 if that part cannot use the slot.
__device__ __forceinline__ int64_t part_at(const CacheTensors& cache, const Parts& parts, int64_t slot, int64_t row) {
  const int64_t p = part_of_row(cache, parts, row);
  return p >= 0 && place_of(cache, parts, p).has(slot, cache.ways) ? p : -1;
}

// Calls body(feature, first, last) for the bags [first, last) of each feature in this warp's share: an equal,
// contiguous range of bags.
template <class Body>
__device__ __forceinline__ void for_features_of_warp(const Bags& bags, const Body& body) {
  const int64_t each = ceil_div(bags.num_bags, Group<kWarpSize>::stride());
  const int64_t begin = Group<kWarpSize>::first() * each;
  const int64_t end = begin + each < bags.num_bags ? begin + each : bags.num_bags;
  for (int64_t bag = begin; bag < end;) {
    const int64_t feature = bags.feature_of(bag), behind = bags.first_bag(feature + 1);
    const int64_t last = behind < end ? behind : end;
    body(feature, bag, last);
    bag = last;
  }
}

}  // namespace RK_ISA

// Allocates cache.order and launches the kernel that fills it after the layout checks.
Tensor order_parts(CacheTensors* cache, const BagInput& in, const int64_t* status, cudaStream_t stream);

// For insertion: sort keys of the ids whose row is not cached. With keys, the caller has set all slots to -1; without
// (null, for lookups), find_slots() does.
struct MissingKeys {
  uint64_t* keys;
  int row_bits;
};
// Lanes per bag in kernels where each lane takes an id.
inline int lanes_of_bags(const Bags& bags) { return lanes_for(4 * ceil_div(bags.num_ids, bags.num_bags)); }
// slots[i] = the slot of the row of ids[i], or -1. Records bad ids and offsets in `status`.
void find_slots(const BagInput& in, const CacheTensors& cache, int64_t* slots, const MissingKeys& missing,
                int64_t* status, cudaStream_t stream);

// Arguments of encoding evicted rows.
struct Eviction {
  uint8_t* weights;
  const int64_t *seed, *clock;  // a null seed is 0
  bool stochastic;
};

inline namespace RK_ISA {

// Writes the row in a slot back to its part's table of format Format, with a group of lanes.
template <class Format, int G>
__device__ __forceinline__ void encode_slot(const Eviction& e, const CacheTensors& cache, const Parts& parts,
                                            int64_t part, int64_t row, int64_t slot, const Group<G>& group) {
  const Part f = parts[part];
  const int64_t D = f.embedding_dim, number = row - f.row_offset;
  const float* from = cache.rows + (parts.records[part].cache_row_offset + slot * D);
  uint8_t* to = e.weights + f.weight_offset + number * Format::row_bytes(D);
  Rounding how = update_rounding(e.seed, e.clock, f.shard, e.stochastic);
  how.noise.stream = kEvictionStream;
  const bool aligned = rows_aligned(from, D);
  ColumnWriter<Format, G> writer{group, how, f.whole_row(row),
                                 D,     to,  columns_aligned<Format>(e.weights + f.weight_offset, D)};
  if constexpr (ColumnWriter<Format, G>::kScans) {
    for (int64_t c = 0; c < D; c += 4 * G)
      writer.scan(c + 4 * group.lane, load_columns(from, c + 4 * group.lane, D, aligned));
    writer.close_scan();
  }
  for (int64_t c = 0; c < D; c += 4 * G)
    writer.write(c + 4 * group.lane, load_columns(from, c + 4 * group.lane, D, aligned));
}

}  // namespace RK_ISA
}  // namespace rec_kernels
