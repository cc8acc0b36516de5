// Lookups where an id does not name a row: it is divided and wrapped to one (embedding_bag/bags.h), or rows of several
// parts make the id's row. For the kernels of one instruction set.
#pragma once

#include "embedding_bag/cpu/pool.h"

namespace rec_kernels {
inline namespace RK_ISA {

// Pools bags of a feature whose ids are mapped to rows of its table; to a row of each of `count` parts, which are added
// or multiplied.
void pool_partitioned(const PoolArgs& a, const Part& f, const PooledBags& k);
void pool_composed(const PoolArgs& a, const Part* parts, int64_t count, const PooledBags& k);

// True if a part's table fits in no cache: a smaller one stays close to the core while it is in use.
RK_HOST_DEVICE bool is_far(const Part& part) { return part.num_embeddings * part.row_bytes > 1 << 18; }

// The floats of an id's row in a part: the table's own, or decoded into scratch [D].
const float* row_of_part(const Part& f, const uint8_t* weights, int64_t id, float* scratch);

// Makes the rows of ids from those of `count` added or multiplied parts; `scratch` is [2, D].
struct ComposedRow {
  const Part* parts;
  int64_t count;
  float* scratch;

  // [D], until the next call.
  const float* read(const uint8_t* weights, int64_t id) const;
};

// out [D] = g times the id's rows in the parts of own's feature but for `own`, one after the other; scratch is [D].
void multiply_by_others(const Part* parts, int64_t count, const Part* own, const uint8_t* weights, int64_t id,
                        const float* g, float* scratch, float* out);

}  // namespace RK_ISA
}  // namespace rec_kernels
