// Lookups with a row cache. Compiled once per instruction set: no torch header and no std template here.
//
// Bags are processed in small batches. Rows that are not cached are decoded into a buffer, unless the table is float32.
#include "embedding_bag/cpu/pool_cached.h"
#include "embedding_bag/cpu/pool_table.h"
#include "rows/cpu/row_formats.h"

namespace rec_kernels {
inline namespace RK_ISA {
namespace {

// Ids per batch, so that decoded rows stay in the L2 cache.
constexpr int64_t kBatchIds = 512;

// Buffer of decoded rows. It has no destructor: unwinding would need a symbol that all instruction sets share.
struct DecodeBuffer {
  float* memory = nullptr;
  int64_t reserved = 0;

  // Makes room for `floats`; discards the contents.
  void reserve(int64_t floats) {
    if (floats <= reserved) return;
    release();
    memory = new float[static_cast<uint64_t>(floats)];
    reserved = floats;
  }
  void release() { delete[] memory; }
};

// Finds the row pointers of all ids of some bags for CachedRows. Prefetches all uncached rows before decoding any.
void find_rows(const PoolArgs& a, const Part& f, const PooledBags& k, DecodeBuffer* decoded, const uint8_t** pointers) {
  const int64_t first = k.first_id(), count = k.num_ids(), D = f.embedding_dim;
  const int64_t* slots = a.cache.slots + first;
  const uint8_t* table = a.weights + f.weight_offset;
  const int64_t padding = k.bags->padding_of(f);
  int64_t missing = 0;
  for (int64_t i = 0; i < count; ++i) {
    pointers[i] = reinterpret_cast<const uint8_t*>(cached_row(a, f, first + i));
    if (pointers[i]) continue;
    const int64_t id = k.bags->id(first + i);
    if (!k.bags->in_range(id, f)) note_bad(k.bounds, first + i);
    else if (id != padding) {
      pointers[i] = table + f.row(id) * f.row_bytes;
      prefetch_bytes(pointers[i], f.row_bytes);
      ++missing;
    }
  }
  if (missing == 0 || f.format == RowFormat::kFp32) return;
  decoded->reserve(missing * D);
  const auto decode = RowFormatKernels::table<CpuIsa::RK_ISA>.decode[static_cast<int>(f.format)];
  float* next = decoded->memory;
  for (int64_t i = 0; i < count; ++i) {
    if (slots[i] >= 0 || !pointers[i]) continue;
    decode(pointers[i], 1, D, next);
    pointers[i] = reinterpret_cast<const uint8_t*>(next);
    next += D;
  }
}

// Body of for_blocks: pools one block of columns.
struct PoolPointers {
  const PooledBags& k;
  const uint8_t* const* pointers;
  int64_t row_bytes;

  template <int NV, bool kTail>
  void block(int64_t column, int tail) const {
    const FloatBlock<NV, kTail> block{column, tail};
    pool_block<BagKind::kAny>(k, CachedRows<FloatBlock<NV, kTail>>(block, pointers, k.first_id(), row_bytes));
  }
};

// True if no row, or every row, of some ids is cached.
struct CacheHits {
  bool none, all;
};
CacheHits hits_of(const int64_t* slots, int64_t count) {
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
  const CacheHits hits = hits_of(slots, k.num_ids());
  if (hits.none) return false;
  Part floats = f;
  floats.format = RowFormat::kFp32;
  floats.row_bytes = 4 * f.embedding_dim;
  if (hits.all) {
    const float* rows = a.cache.rows + a.records[&f - a.parts].cache_row_offset;
    pool_table(k, floats, reinterpret_cast<const uint8_t*>(rows), RowIndices::computed(k, slots));
    return true;
  }
  DecodeBuffer decoded;
  for_bag_batches<const uint8_t*>(k, kBatchIds, 1, [&](const PooledBags& batch, const uint8_t** pointers) {
    find_rows(a, f, batch, &decoded, pointers);
    for_blocks(f.embedding_dim, PoolPointers{batch, pointers, floats.row_bytes});
  });
  decoded.release();
  return true;
}

}  // namespace RK_ISA
}  // namespace rec_kernels
