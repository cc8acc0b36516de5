// The row cache as CUDA kernels see it.
#pragma once

#include "cuda/embedding_bag.cuh"
#include "cuda/row_codec.cuh"
#include "ops/row_cache.h"

namespace rec_kernels {

// The tensors of a cache; `tags` is null where there is none.
struct CacheTensors {
  const int64_t *sets, *set_starts, *offsets;  // of the parts
  int64_t num_parts;
  int64_t* tags;
  uint8_t *marks, *dirty;
  float* rows;
  int64_t ways, num_slots, num_elements;

  // What rows are found by.
  RK_HOST_DEVICE CacheView view() const { return {tags, marks, nullptr, nullptr, nullptr, ways}; }
};

inline namespace RK_ISA {

__device__ __forceinline__ CachePlace place_of(const CacheTensors& cache, const Features& features, int64_t part) {
  return CachePlace::of(cache.sets[part], cache.set_starts[part], cache.offsets ? cache.offsets[part] : 0, cache.ways,
                        features.num_embeddings[part]);
}

// The cached part whose table has a linear row, or -1.
__device__ __forceinline__ int64_t part_of_row(const CacheTensors& cache, const Features& features, int64_t row) {
  for (int64_t p = 0; p < cache.num_parts; ++p)
    if (cache.sets[p] > 0 && row >= features.row_offsets[p] &&
        row - features.row_offsets[p] < features.num_embeddings[p])
      return p;
  return -1;
}

// The same of a row in a slot: -1, too, where its table has no such slot.
__device__ __forceinline__ int64_t part_at(const CacheTensors& cache, const Features& features, int64_t slot,
                                           int64_t row) {
  const int64_t p = part_of_row(cache, features, row);
  return p >= 0 && place_of(cache, features, p).has(slot, cache.ways) ? p : -1;
}

template <class T>
__device__ __forceinline__ T warp_min(T x) {
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    const T other = __shfl_xor_sync(kFullWarp, x, distance);
    x = other < x ? other : x;
  }
  return x;
}

}  // namespace RK_ISA

// Checks on the device, with kBadLayout for what is wrong, that places lie in the cache and apart from each other.
void check_places(const CacheTensors& cache, const BagInput& in, int64_t* status, cudaStream_t stream);
CacheTensors read_cache(const CacheArguments& cache, const TableLayout& layout, const BagInput& in,
                        const Tensor& values, CacheUse use = CacheUse::kUpdate);

// What finding the slots of ids also gives insertion: the sorting key of each id whose row is in none; or null.
struct MissingKeys {
  uint64_t* keys;
  int row_bits;
};
// slots[i]: where id i's row is, or -1. Bad ids and offsets are noted.
void find_slots(const BagInput& in, const CacheTensors& cache, int64_t* slots, const MissingKeys& missing,
                int64_t* status, cudaStream_t stream);

// How rows are encoded when they leave the cache.
struct Eviction {
  uint8_t* weights;
  const int64_t *seed, *clock;  // seed may be null: 0
  bool stochastic;
};

inline namespace RK_ISA {

// A group of lanes takes the row in a slot back into its part's table, whose format is Format.
template <class Format, int G>
__device__ __forceinline__ void encode_slot(const Eviction& e, const CacheTensors& cache, const Features& features,
                                            int64_t part, int64_t row, int64_t slot, const Group<G>& group) {
  const Feature f = features[part];
  const int64_t D = f.embedding_dim, number = row - f.row_offset;
  const float* from = cache.rows + (cache.offsets[part] + slot * D);
  uint8_t* to = e.weights + f.weight_offset + number * Format::row_bytes(D);
  Rounding how = update_rounding(e.seed, e.clock, f.table_id, e.stochastic);
  how.noise.stream = kEvictionStream;
  const bool aligned = rows_aligned(from, D);
  ColumnWriter<Format, G> writer{group, how, number, D, to, columns_aligned<Format>(e.weights + f.weight_offset, D)};
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
