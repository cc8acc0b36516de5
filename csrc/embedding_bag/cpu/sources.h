// Sources of pooled rows (embedding_bag/cpu/pool.h): a table, several parts of one, or a row cache and its table. A
// source extends a block of columns, which reads rows of floats or of a format: in_row(address of a row) is where the
// block reads, row() opens it there, and read() gives a step of its columns.
#pragma once

#include "embedding_bag/cpu/pool.h"
#include "rows/cpu/reader.h"

namespace rec_kernels {
inline namespace RK_ISA {

// Columns [first, first + NV * W) of rows of floats, a register to a step; the last one holds `tail` columns if kTail.
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

// Steps of 16 columns of a block: its sums take half of the registers, decoding needs the others.
constexpr int kMostSteps = kLanes == 16 ? 8 : (kLanes == 8 ? 4 : 2);

// Columns [first, first + kSteps * 16) of encoded rows, which are decoded in registers, of which `columns` exist: fewer
// than these when kPartial.
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

// The rows of a table that ids name: the ids themselves, or numbers that were found for some of them.
struct RowNumbers {
  const void* numbers;
  bool wide;         // int64, or int32
  int64_t first;     // the id that the first number is of
  uint64_t limit;    // a number from it on is out of range; compared unsigned, so that a negative one is, too
  int64_t left_out;  // the number that does not count

  static RowNumbers of_ids(const Bags& bags, const Part& f) {
    const uint64_t limit = bags.check_ids ? static_cast<uint64_t>(f.id_limit) : UINT64_MAX;
    return {bags.ids, bags.ids64, 0, limit, bags.padding_of(f)};
  }
  static RowNumbers found(const PooledBags& k, const int64_t* numbers) {
    return {numbers, true, k.first_id(), UINT64_MAX, kLeftOut};
  }
};

// Numbered rows of one table. kNumberBytes: 8, 4, or 0 where the width is known at run time only.
template <class Block, int kNumberBytes>
struct TableRows : Block {
  const uint8_t* rows;
  int64_t row_bytes;
  RowNumbers numbers;

  RK_HOST_DEVICE TableRows(const Block& block, const uint8_t* rows, int64_t row_bytes, const RowNumbers& numbers)
      : Block(block), rows(block.in_row(rows)), row_bytes(row_bytes), numbers(numbers) {}
  RK_HOST_DEVICE int64_t number(int64_t i) const {
    if (kNumberBytes == 8 || (kNumberBytes == 0 && __builtin_expect(numbers.wide, 1)))
      return static_cast<const int64_t*>(numbers.numbers)[i - numbers.first];
    return static_cast<const int32_t*>(numbers.numbers)[i - numbers.first];
  }
  RK_HOST_DEVICE int64_t ahead() const { return prefetch_distance(row_bytes); }
  // Prefetches any id's row: the address is computed, not checked.
  RK_HOST_DEVICE void prefetch(int64_t i) const {
    const auto row =
        reinterpret_cast<uintptr_t>(rows) + static_cast<uintptr_t>(number(i)) * static_cast<uintptr_t>(row_bytes);
    Block::prefetch(row, row_bytes);
  }
  RK_HOST_DEVICE bool out_of_range(int64_t i) const { return static_cast<uint64_t>(number(i)) >= numbers.limit; }
  RK_HOST_DEVICE bool counts(int64_t i) const { return !out_of_range(i) && number(i) != numbers.left_out; }
  RK_HOST_DEVICE auto row(int64_t i) const { return Block::row(rows + number(i) * row_bytes); }
};

// The rows of ids in the table of one part of a feature.
struct PartRows {
  const uint8_t* rows;
  const int64_t* numbers;  // of ids from Composition::first on; kLeftOut for an id that does not count
  bool far;                // no cache holds the table
};

// The parts of a feature that are added up or multiplied.
struct Composition {
  PartRows parts[kMaxParts];
  int64_t count;
  int64_t first;
  int64_t row_bytes;
};

// Rows that are the sums or products of those of several parts, made in registers. kParts: how many there are, or 0.
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
  RK_HOST_DEVICE static bool out_of_range(int64_t) { return false; }  // noted when the numbers were found
  RK_HOST_DEVICE bool counts(int64_t i) const { return c.parts[0].numbers[i - c.first] != kLeftOut; }
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
           static_cast<uintptr_t>(c.parts[p].numbers[i - c.first]) * static_cast<uintptr_t>(c.row_bytes);
  }
  template <class Each>
  RK_HOST_DEVICE void for_steps(int64_t p, int64_t i, const Each& each) const {
    const auto part = Block::row(c.parts[p].rows + c.parts[p].numbers[i - c.first] * c.row_bytes);
#pragma GCC unroll 8
    for (int s = 0; s < Block::kSteps; ++s) each(s, Block::read(part, s));
  }
};

// Rows of floats wherever they are: in a row cache, in their table, decoded from it.
template <class Block>
struct CachedRows : Block {
  const uint8_t* const* places;  // of the rows of ids from `first_id` on; null for an id that does not count
  int64_t first_id;
  int64_t row_bytes;

  RK_HOST_DEVICE CachedRows(const Block& block, const uint8_t* const* places, int64_t first_id, int64_t row_bytes)
      : Block(block), places(places), first_id(first_id), row_bytes(row_bytes) {}
  RK_HOST_DEVICE const uint8_t* place(int64_t i) const { return places[i - first_id]; }
  RK_HOST_DEVICE int64_t ahead() const { return prefetch_distance(row_bytes); }
  RK_HOST_DEVICE void prefetch(int64_t i) const {
    if (counts(i)) Block::prefetch(reinterpret_cast<uintptr_t>(Block::in_row(place(i))), row_bytes);
  }
  RK_HOST_DEVICE static bool out_of_range(int64_t) { return false; }  // noted when the places were found
  RK_HOST_DEVICE bool counts(int64_t i) const { return place(i) != nullptr; }
  RK_HOST_DEVICE auto row(int64_t i) const { return Block::row(Block::in_row(place(i))); }
};

}  // namespace RK_ISA
}  // namespace rec_kernels
