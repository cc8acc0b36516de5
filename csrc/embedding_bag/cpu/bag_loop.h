// Loops over bags that lookups and the gradient of per_sample_weights share.
#pragma once

#include "embedding_bag/cpu/forward.h"

namespace rec_kernels {
inline namespace RK_ISA {

// Row index that stands for an id that is out of range or padding. Passed as padding_idx, so that it is skipped.
constexpr int64_t kSkippedRow = -2;

// Prefetch distance in ids: about 8 KiB of rows in flight covers DRAM latency at D = 128; more would be evicted from
// the L1 cache before use.
RK_HOST_DEVICE int64_t prefetch_distance(int64_t row_bytes) {
  const int64_t rows = 8192 / row_bytes;
  return rows < 8 ? 8 : (rows > 64 ? 64 : rows);
}

inline bool offsets_good(const Bags& bags, int64_t begin, int64_t end, Bounds* bounds) {
  const int64_t bad = bags.bad_offset(begin, end);
  if (bad < bounds->position) bounds->position = bad;
  return bad == kNoBadPosition;
}

// Calls body(parts of a feature, their count, from, to) for the bags [from, to) of each feature.
template <class Body>
void by_feature(const Bags& bags, const Part* parts, int64_t begin, int64_t end, const Body& body) {
  while (begin < end) {
    const int64_t feature = bags.feature_of(begin), next = bags.first_bag(feature + 1);
    const int64_t stop = next < end ? next : end, part = bags.first_part(feature);
    body(parts + part, bags.first_part(feature + 1) - part, begin, stop);
    begin = stop;
  }
}

RK_HOST_DEVICE void note_bad(Bounds* bounds, int64_t position) {
  if (position < bounds->position) bounds->position = position;
  ++bounds->skipped;
}

}  // namespace RK_ISA
}  // namespace rec_kernels
