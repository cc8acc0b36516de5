// Lookups of rows of floats. Compiled once per instruction set: no torch header and no std template here.
#include "embedding_bag/cpu/pool_encoded.h"
#include "embedding_bag/cpu/pool_table.h"

namespace rec_kernels {
inline namespace RK_ISA {
namespace {

// Body of for_blocks: pools one block of columns.
struct PoolFloats {
  const PooledBags& k;
  const uint8_t* rows;
  int64_t row_bytes;
  const RowIndices& indices;
  BagKind kind;

  template <int NV, bool kTail>
  void block(int64_t column, int tail) const {
    if (indices.wide) pool<8>(FloatBlock<NV, kTail>{column, tail});
    else pool<4>(FloatBlock<NV, kTail>{column, tail});
  }

 private:
  template <int kIndexBytes, class Block>
  void pool(const Block& block) const {
    const TableRows<Block, kIndexBytes> source(block, rows, row_bytes, indices);
    if (kind == BagKind::kWeighted) pool_block<BagKind::kWeighted>(k, source);
    else if (kind == BagKind::kOneId) pool_block<BagKind::kOneId>(k, source);
    else pool_block<BagKind::kPlain>(k, source);
  }
};

}  // namespace

void pool_table(const PooledBags& k, const Part& f, const uint8_t* rows, const RowIndices& indices) {
  if (f.format != RowFormat::kFp32) return pool_encoded(k, f, rows, indices);
  for_blocks(f.embedding_dim, PoolFloats{k, rows, f.row_bytes, indices, kind_of(k)});
}

}  // namespace RK_ISA
}  // namespace rec_kernels
