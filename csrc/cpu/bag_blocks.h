// What pooling rows of floats and encoded rows have in common.
#pragma once

#include "cpu/embedding_bag.h"

namespace rec_kernels {
inline namespace RK_ISA {

// The row of an id that is out of range or padding: as a padding_idx, it is left out.
constexpr int64_t kLeftOut = -2;

// Ids whose rows are found at once, of all parts; a longer bag has memory of its own.
constexpr int64_t kMapped = 4096;

// Ids between a row's prefetch and its use: about 8 KiB of rows in flight covers DRAM latency at D = 128; more evicts
// them again from the first-level cache before they are used.
RK_HOST_DEVICE int64_t prefetch_distance(int64_t row_bytes) {
  const int64_t rows = 8192 / row_bytes;
  return rows < 8 ? 8 : (rows > 64 ? 64 : rows);
}

inline bool offsets_good(const Bags& bags, int64_t begin, int64_t end, Bounds* bounds) {
  const int64_t bad = bags.bad_offset(begin, end);
  if (bad < bounds->position) bounds->position = bad;
  return bad == kNoBadPosition;
}

// body(parts of a feature, how many, its bags [from, to), their first row of the output)
template <class Body>
void by_feature(const Bags& bags, const Feature* features, int64_t begin, int64_t end, const Body& body) {
  while (begin < end) {
    const int64_t feature = bags.feature_of(begin), next = bags.first_bag(feature + 1);
    const int64_t stop = next < end ? next : end, part = bags.first_part(feature);
    body(features + part, bags.first_part(feature + 1) - part, begin, stop, bags.output_row(begin, feature));
    begin = stop;
  }
}

// Bags [begin, end) a few at a time: body(first bag, behind the last, numbers: `parts` times the room for their ids).
template <class Body>
void for_few_bags(const Bags& bags, int64_t begin, int64_t end, int64_t parts, const Body& body) {
  const int64_t most = kMapped / parts;
  int64_t reserved[kMapped];
  while (begin < end) {
    int64_t last = end - begin < most ? end : begin + most;
    while (last > begin + 1 && bags.offset(last) - bags.offset(begin) > most) last = begin + (last - begin) / 2;
    const int64_t count = bags.offset(last) - bags.offset(begin);
    int64_t* numbers = count <= most ? reserved : new int64_t[static_cast<uint64_t>(count * parts)];
    body(begin, last, numbers);
    if (numbers != reserved) delete[] numbers;
    begin = last;
  }
}

// Pools bags [from, to) of rows whose numbers are known: pool_plain, positions counting from their first id.
template <class Pool>
void pool_numbered(const PoolArgs& a, const int64_t* numbers, int64_t from, int64_t to, const Pool& pool) {
  const int64_t start = a.bags.offset(from);
  int64_t offsets[kMapped + 1];
  for (int64_t bag = from; bag <= to; ++bag) offsets[bag - from] = a.bags.offset(bag) - start;
  PoolArgs numbered = a;
  Bags& bags = numbered.bags;
  bags.ids = numbers;
  bags.offsets = offsets;
  bags.num_ids = offsets[to - from];
  bags.num_offsets = to - from + 1;
  bags.ids64 = bags.offsets64 = true;
  if (bags.per_sample_weights) bags.per_sample_weights += start;
  bags.check_ids = false;
  bags.padding_idx = kLeftOut;
  pool(numbered);
}

// Columns come in blocks: a bad id is counted with the first.
RK_HOST_DEVICE void note_bad(Bounds* bounds, int64_t column, int64_t position) {
  if (column != 0) return;
  if (position < bounds->position) bounds->position = position;
  ++bounds->skipped;
}

}  // namespace RK_ISA
}  // namespace rec_kernels
