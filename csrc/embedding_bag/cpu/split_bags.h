// Splits the bags of a call into pieces for all threads.
#pragma once

#include <vector>

#include "core/cpu/parallel.h"
#include "embedding_bag/cpu/input.h"

namespace rec_kernels {

// Minimum floats read per piece of work, which amortizes the cost of fetching a piece (one atomic add).
constexpr int64_t kForwardFloats = 32768;

struct BagSplit {
  int64_t bags_per_piece;
  int64_t workers;
};

inline BagSplit split_bags(const BagInput& in) {
  const int64_t floats = in.bags.num_ids * in.max_dim + in.bags.num_bags * 16;
  const int64_t workers = workers_for(1 + floats / kForwardFloats, 1);
  return {ceil_div(in.bags.num_bags, pieces_for(floats, kForwardFloats, workers)), workers};
}

// Runs body(begin, end, &bounds) over all bags and returns the combined bounds of all workers.
template <class Body>
Bounds for_bags(const BagInput& in, const Body& body) {
  const BagSplit split = split_bags(in);
  Bounds one[64];
  std::vector<Bounds> more;
  Bounds* bounds = one;
  if (split.workers > 64) {
    more.resize(static_cast<size_t>(split.workers));
    bounds = more.data();
  }
  parallel_pieces(in.bags.num_bags, split.bags_per_piece, split.workers,
                  [&](int64_t begin, int64_t end, int64_t worker) { body(begin, end, bounds + worker); });
  Bounds all;
  for (int64_t w = 0; w < split.workers; ++w) {
    all.position = bounds[w].position < all.position ? bounds[w].position : all.position;
    all.skipped += bounds[w].skipped;
  }
  return all;
}

}  // namespace rec_kernels
