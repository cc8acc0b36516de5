// Lookups of rows of which some are in a row cache. Compiled once per instruction set: no torch header and no std
// template here.
//
// A few bags at a time: rows that are not cached are decoded into memory, unless they are floats in their table, too.
#include "embedding_bag/cpu/pool_cached.h"
#include "embedding_bag/cpu/pool_table.h"
#include "rows/cpu/row_formats.h"

namespace rec_kernels {
inline namespace RK_ISA {
namespace {

// Ids at once: as many decoded rows stay close to the core.
constexpr int64_t kIdsAtOnce = 512;

// Memory for decoded rows. It has no destructor: unwinding would need a symbol that all instruction sets share.
struct Decoded {
  float* memory = nullptr;
  int64_t reserved = 0;

  // Room for so many floats, in the place of those before.
  void reserve(int64_t floats) {
    if (floats <= reserved) return;
    release();
    memory = new float[static_cast<uint64_t>(floats)];
    reserved = floats;
  }
  void release() { delete[] memory; }
};

// Finds the rows of all ids of some bags (CachedRows). Uncached rows are prefetched before the first is decoded.
void find_rows(const PoolArgs& a, const Part& f, const PooledBags& k, Decoded* decoded, const uint8_t** places) {
  const int64_t first = k.first_id(), count = k.num_ids(), D = f.embedding_dim;
  const int64_t* slots = a.cache.slots + first;
  const uint8_t* table = a.weights + f.weight_offset;
  const int64_t padding = k.bags->padding_of(f);
  int64_t missing = 0;
  for (int64_t i = 0; i < count; ++i) {
    places[i] = reinterpret_cast<const uint8_t*>(cached_row(a, f, first + i));
    if (places[i]) continue;
    const int64_t id = k.bags->id(first + i);
    if (!k.bags->in_range(id, f)) note_bad(k.bounds, first + i);
    else if (id != padding) {
      places[i] = table + f.row(id) * f.row_bytes;
      prefetch_bytes(places[i], f.row_bytes);
      ++missing;
    }
  }
  if (missing == 0 || f.format == RowFormat::kFp32) return;
  decoded->reserve(missing * D);
  const auto decode = RowFormatKernels::table<CpuIsa::RK_ISA>.decode[static_cast<int>(f.format)];
  float* next = decoded->memory;
  for (int64_t i = 0; i < count; ++i) {
    if (slots[i] >= 0 || !places[i]) continue;
    decode(places[i], 1, D, next);
    places[i] = reinterpret_cast<const uint8_t*>(next);
    next += D;
  }
}

// for_blocks: pools the bags block by block of columns.
struct PoolPlaces {
  const PooledBags& k;
  const uint8_t* const* places;
  int64_t row_bytes;

  template <int NV, bool kTail>
  void block(int64_t column, int tail) const {
    const FloatBlock<NV, kTail> block{column, tail};
    pool_block<BagKind::kAny>(k, CachedRows<FloatBlock<NV, kTail>>(block, places, k.first_id(), row_bytes));
  }
};

// Tells if none or all of some rows are cached.
struct Share {
  bool none, all;
};
Share share_of(const int64_t* slots, int64_t count) {
  int64_t every = -1, some = 0;
  for (int64_t i = 0; i < count; ++i) {
    every &= slots[i];
    some |= slots[i];
  }
  return {every < 0, some >= 0};
}

}  // namespace

bool pool_cached(const PoolArgs& a, const Part& f, const PooledBags& k) {
  const int64_t* slots = a.cache.slots + k.first_id();
  const Share cached = share_of(slots, k.num_ids());
  if (cached.none) return false;
  Part floats = f;
  floats.format = RowFormat::kFp32;
  floats.row_bytes = 4 * f.embedding_dim;
  if (cached.all) {
    const float* rows = a.cache.rows + a.records[&f - a.parts].cache_row_offset;
    pool_table(k, floats, reinterpret_cast<const uint8_t*>(rows), RowNumbers::found(k, slots));
    return true;
  }
  Decoded decoded;
  for_few_bags<const uint8_t*>(k, kIdsAtOnce, 1, [&](const PooledBags& few, const uint8_t** places) {
    find_rows(a, f, few, &decoded, places);
    for_blocks(f.embedding_dim, PoolPlaces{few, places, floats.row_bytes});
  });
  decoded.release();
  return true;
}

}  // namespace RK_ISA
}  // namespace rec_kernels
