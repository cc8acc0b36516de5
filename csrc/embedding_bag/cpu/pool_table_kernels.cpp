// Lookups of rows of floats. Compiled once per instruction set: no torch header and no std template here.
#include "embedding_bag/cpu/pool_encoded.h"
#include "embedding_bag/cpu/pool_table.h"

namespace rec_kernels {
inline namespace RK_ISA {
namespace {

// for_blocks: pools the bags block by block of columns.
struct PoolFloats {
  const PooledBags& k;
  const uint8_t* rows;
  int64_t row_bytes;
  const RowNumbers& numbers;
  BagKind kind;

  template <int NV, bool kTail>
  void block(int64_t column, int tail) const {
    if (numbers.wide) pool<8>(FloatBlock<NV, kTail>{column, tail});
    else pool<4>(FloatBlock<NV, kTail>{column, tail});
  }

 private:
  template <int kNumberBytes, class Block>
  void pool(const Block& block) const {
    const TableRows<Block, kNumberBytes> source(block, rows, row_bytes, numbers);
    if (kind == BagKind::kWeighted) pool_block<BagKind::kWeighted>(k, source);
    else if (kind == BagKind::kOneId) pool_block<BagKind::kOneId>(k, source);
    else pool_block<BagKind::kPlain>(k, source);
  }
};

}  // namespace

void pool_table(const PooledBags& k, const Part& f, const uint8_t* rows, const RowNumbers& numbers) {
  if (f.format != RowFormat::kFp32) return pool_encoded(k, f, rows, numbers);
  for_blocks(f.embedding_dim, PoolFloats{k, rows, f.row_bytes, numbers, kind_of(k)});
}

}  // namespace RK_ISA
}  // namespace rec_kernels
