// Sources of pooled rows (embedding_bag/cpu/pool.h): a table, several parts of a feature, or a row cache and its table.
// A source derives from a block of columns of float or encoded rows: in_row(row) is the address where the block reads,
// row() opens the row there, and read() returns one step of its columns.
#pragma once

#include "embedding_bag/cpu/pool.h"
#include "rows/cpu/reader.h"

namespace rec_kernels {
inline namespace RK_ISA {

// Columns [first, first + NV * W) of float rows, one register per step; the last one holds `tail` columns if kTail.
template <int NV, bool kTail>
struct FloatBlock {
  using Step = Vec;
  static constexpr int kSteps = NV;
  int64_t first;
  int tail;

  RK_HOST_DEVICE int64_t column() const { return first; }
  RK_HOST_DEVICE const uint8_t* in_row(const uint8_t* row) const { return row + first * 4; }
  RK_HOST_DEVICE static const float* row(const uint8_t* row) { return reinterpret_cast<const float*>(row); }
  RK_HOST_DEVICE Vec read(const float* row, int s) const {
    return s < NV - 1 ? Vec::load(row + s * W) : load_columns<kTail>(row + (NV - 1) * W, tail);
  }
  RK_HOST_DEVICE void store(const Vec* sum, float* out) const { store_columns<NV, kTail>(sum, out, tail); }
  RK_HOST_DEVICE static void prefetch(uintptr_t row, int64_t) {
    for (int line = 0; line < NV * W; line += 16) prefetch_line(reinterpret_cast<const float*>(row) + line);
  }
};

// Maximum steps of 16 columns per block: the sums take half of the registers and leave the others to decoding.
constexpr int kMostSteps = kLanes == 16 ? 8 : (kLanes == 8 ? 4 : 2);

// Columns [first, first + kSteps * 16) of encoded rows, decoded in registers. Only `columns` of them exist, fewer if
// kPartial.
template <class Format, int kBlockSteps, bool kPartial>
struct EncodedBlock {
  using Step = Columns;
  static constexpr int kSteps = kBlockSteps;
  int64_t first, columns, D;

  RK_HOST_DEVICE int64_t column() const { return first; }
  RK_HOST_DEVICE static const uint8_t* in_row(const uint8_t* row) { return row; }
  RK_HOST_DEVICE RowReader<Format> row(const uint8_t* row) const { return RowReader<Format>(row, D); }
  RK_HOST_DEVICE Columns read(const RowReader<Format>& row, int s) const {
    const int64_t c = first + s * kStep, left = columns - s * kStep;
    if (kPartial && left <= 0) return Columns{};
    return kPartial && left < kStep ? row.template read<true>(c, left) : row.template read<false>(c, kStep);
  }
  RK_HOST_DEVICE void store(const Columns* sum, float* out) const {
#pragma GCC unroll 8
    for (int s = 0; s < kSteps; ++s) {
      const int64_t left = columns - s * kStep;
      if (!kPartial || left >= kStep) store_as(out + s * kStep, sum[s]);
      else if (left > 0) memcpy(out + s * kStep, &sum[s], static_cast<size_t>(left) * sizeof(float));
    }
  }
  RK_HOST_DEVICE void prefetch(uintptr_t row, int64_t row_bytes) const {
    prefetch_bytes(reinterpret_cast<const void*>(row), row_bytes);
  }
};

// Row index per id: the ids themselves, or indices that were computed for a range of ids.
struct RowIndices {
  const void* indices;
  bool wide;        // int64, else int32
  int64_t first;    // position of the id that indices[0] belongs to
  uint64_t limit;   // indices are out of range from here on; compared unsigned, which includes negative ones
  int64_t skipped;  // index of ids that do not contribute

  static RowIndices of_ids(const Bags& bags, const Part& f) {
    const uint64_t limit = bags.check_ids ? static_cast<uint64_t>(f.id_limit) : UINT64_MAX;
    return {bags.ids, bags.ids64, 0, limit, bags.padding_of(f)};
  }
  static RowIndices computed(const PooledBags& k, const int64_t* indices) {
    return {indices, true, k.first_id(), UINT64_MAX, kSkippedRow};
  }
};

// Rows of one table by index. kIndexBytes: 8, 4, or 0 if the width is only known at run time.
template <class Block, int kIndexBytes>
struct TableRows : Block {
  const uint8_t* rows;
  int64_t row_bytes;
  RowIndices indices;

  RK_HOST_DEVICE TableRows(const Block& block, const uint8_t* rows, int64_t row_bytes, const RowIndices& indices)
      : Block(block), rows(block.in_row(rows)), row_bytes(row_bytes), indices(indices) {}
  RK_HOST_DEVICE int64_t index(int64_t i) const {
    if (kIndexBytes == 8 || (kIndexBytes == 0 && __builtin_expect(indices.wide, 1)))
      return static_cast<const int64_t*>(indices.indices)[i - indices.first];
    return static_cast<const int32_t*>(indices.indices)[i - indices.first];
  }
  RK_HOST_DEVICE int64_t ahead() const { return prefetch_distance(row_bytes); }
  // Prefetching is harmless for a bad id, so the index is not checked.
  RK_HOST_DEVICE void prefetch(int64_t i) const {
    const auto row =
        reinterpret_cast<uintptr_t>(rows) + static_cast<uintptr_t>(index(i)) * static_cast<uintptr_t>(row_bytes);
    Block::prefetch(row, row_bytes);
  }
  RK_HOST_DEVICE bool out_of_range(int64_t i) const { return static_cast<uint64_t>(index(i)) >= indices.limit; }
  RK_HOST_DEVICE bool counts(int64_t i) const { return !out_of_range(i) && index(i) != indices.skipped; }
  RK_HOST_DEVICE auto row(int64_t i) const { return Block::row(rows + index(i) * row_bytes); }
};

// The rows of ids in the table of one part of a feature.
struct PartRows {
  const uint8_t* rows;
  const int64_t* indices;  // row per id, starting at Composition::first; kSkippedRow for an id that does not contribute
  bool far;                // the table exceeds the cache
};

// The added or multiplied parts of a feature.
struct Composition {
  PartRows parts[kMaxParts];
  int64_t count;
  int64_t first;
  int64_t row_bytes;
};

// Sums or products of the rows of several parts, computed in registers. kParts: their number, or 0 if not constant.
template <class Block, int kParts, bool kMultiply>
struct ComposedRows : Block {
  Composition c;

  using Step = typename Block::Step;
  struct Row {
    Step x[Block::kSteps];
  };
  RK_HOST_DEVICE ComposedRows(const Block& block, const Composition& composition) : Block(block), c(composition) {
    for (int64_t p = 0; p < num_parts(); ++p) c.parts[p].rows = block.in_row(c.parts[p].rows);
  }
  RK_HOST_DEVICE int64_t num_parts() const { return kParts > 0 ? kParts : c.count; }
  RK_HOST_DEVICE int64_t ahead() const { return prefetch_distance(c.row_bytes); }
  RK_HOST_DEVICE void prefetch(int64_t i) const {
    for (int64_t p = 0; p < num_parts(); ++p)
      if (c.parts[p].far) Block::prefetch(address(p, i), c.row_bytes);
  }
  RK_HOST_DEVICE static bool out_of_range(int64_t) { return false; }  // reported when ids were mapped
  RK_HOST_DEVICE bool counts(int64_t i) const { return c.parts[0].indices[i - c.first] != kSkippedRow; }
  RK_HOST_DEVICE Row row(int64_t i) const {
    Row row;
    for_steps(0, i, [&](int s, const Step& x) { row.x[s] = x; });
    for (int64_t p = 1; p < num_parts(); ++p)
      for_steps(p, i, [&](int s, const Step& x) { row.x[s] = kMultiply ? row.x[s] * x : row.x[s] + x; });
    return row;
  }
  RK_HOST_DEVICE static Step read(const Row& row, int s) { return row.x[s]; }

 private:
  RK_HOST_DEVICE uintptr_t address(int64_t p, int64_t i) const {
    return reinterpret_cast<uintptr_t>(c.parts[p].rows) +
           static_cast<uintptr_t>(c.parts[p].indices[i - c.first]) * static_cast<uintptr_t>(c.row_bytes);
  }
  template <class Each>
  RK_HOST_DEVICE void for_steps(int64_t p, int64_t i, const Each& each) const {
    const auto part = Block::row(c.parts[p].rows + c.parts[p].indices[i - c.first] * c.row_bytes);
#pragma GCC unroll 8
    for (int s = 0; s < Block::kSteps; ++s) each(s, Block::read(part, s));
  }
};

// Float rows by pointer: in a row cache, in a float32 table, or in a buffer of decoded rows.
template <class Block>
struct CachedRows : Block {
  const uint8_t* const* pointers;  // row per id, starting at `first_id`; null for an id that does not contribute
  int64_t first_id;
  int64_t row_bytes;

  RK_HOST_DEVICE CachedRows(const Block& block, const uint8_t* const* pointers, int64_t first_id, int64_t row_bytes)
      : Block(block), pointers(pointers), first_id(first_id), row_bytes(row_bytes) {}
  RK_HOST_DEVICE const uint8_t* pointer(int64_t i) const { return pointers[i - first_id]; }
  RK_HOST_DEVICE int64_t ahead() const { return prefetch_distance(row_bytes); }
  RK_HOST_DEVICE void prefetch(int64_t i) const {
    if (counts(i)) Block::prefetch(reinterpret_cast<uintptr_t>(Block::in_row(pointer(i))), row_bytes);
  }
  RK_HOST_DEVICE static bool out_of_range(int64_t) { return false; }  // reported when pointers were set
  RK_HOST_DEVICE bool counts(int64_t i) const { return pointer(i) != nullptr; }
  RK_HOST_DEVICE auto row(int64_t i) const { return Block::row(Block::in_row(pointer(i))); }
};

}  // namespace RK_ISA
}  // namespace rec_kernels
