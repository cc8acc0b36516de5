// Lookups that map ids to rows by a divisor and modulus (embedding_bag/table_layout.h), or combine the rows of several
// parts, for the kernels of one instruction set.
#pragma once

#include "embedding_bag/cpu/pool.h"

namespace rec_kernels {
inline namespace RK_ISA {

// Pools bags of a feature whose ids are mapped to rows of one table, or to rows of `count` parts that are added or
// multiplied.
void pool_partitioned(const PoolArgs& a, const Part& f, const PooledBags& k);
void pool_composed(const PoolArgs& a, const Part* parts, int64_t count, const PooledBags& k);

// True if a part's table is larger than 256 KiB. The rows of a smaller one stay in the cache and are not prefetched.
RK_HOST_DEVICE bool exceeds_cache(const Part& part) { return part.num_embeddings * part.row_bytes > 1 << 18; }

// Returns an id's row in a part as floats: a pointer into the table, or the row decoded into scratch [D].
const float* row_of_part(const Part& f, const uint8_t* weights, int64_t id, float* scratch);

// Combines the rows of `count` added or multiplied parts; `scratch` is [2, D].
struct ComposedRow {
  const Part* parts;
  int64_t count;
  float* scratch;

  // Returns the combined row [D], valid until the next call.
  const float* read(const uint8_t* weights, int64_t id) const;
};

// out [D] = g times the id's row in each part of the feature other than `own`, in order; scratch is [D].
void multiply_by_others(const Part* parts, int64_t count, const Part* own, const uint8_t* weights, int64_t id,
                        const float* g, float* scratch, float* out);

}  // namespace RK_ISA
}  // namespace rec_kernels
