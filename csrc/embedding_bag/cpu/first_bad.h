// Parallel search for the first invalid item of an input.
#pragma once

#include <vector>

#include "core/cpu/parallel.h"
#include "embedding_bag/bags.h"

namespace rec_kernels {

// Minimum over workers of the invalid positions that they found.
class FirstBad {
 public:
  explicit FirstBad(int64_t workers) : found_(static_cast<size_t>(workers), kNoBadPosition) {}
  void note(int64_t worker, int64_t position) {
    int64_t& first = found_[static_cast<size_t>(worker)];
    if (position < first) first = position;
  }
  int64_t position() const {
    int64_t first = kNoBadPosition;
    for (const int64_t each : found_) first = each < first ? each : first;
    return first;
  }

 private:
  std::vector<int64_t> found_;
};

// First item of [begin, end) for which is_bad(i) is true, or kNoBadPosition. Branch-free as long as none is.
template <class IsBad>
int64_t first_bad_of(int64_t begin, int64_t end, const IsBad& is_bad) {
  constexpr int64_t kBlock = 1024;
  const IsBad copy = is_bad;  // a local copy, whose captures compilers keep in registers
  for (; begin < end; begin += kBlock) {
    const int64_t stop = begin + kBlock < end ? begin + kBlock : end;
    bool bad = false;
    for (int64_t i = begin; i < stop; ++i) bad |= copy(i);
    if (!bad) continue;
    for (int64_t i = begin; i < stop; ++i)
      if (copy(i)) return i;
  }
  return kNoBadPosition;
}

// First invalid item of all, found by several workers.
template <class IsBad>
int64_t first_bad(int64_t items, const IsBad& is_bad) {
  const int64_t workers = workers_for(items, 4 * kFewItems), piece = ceil_div(items, workers);
  FirstBad bad(workers);
  parallel_workers(workers, [&](int64_t w) {
    const int64_t begin = w * piece, end = items - begin < piece ? items : begin + piece;
    bad.note(w, first_bad_of(begin, end, is_bad));
  });
  return bad.position();
}

// True if an index is outside of [0, limit).
inline bool is_outside(int64_t index, int64_t limit) {
  return static_cast<uint64_t>(index) >= static_cast<uint64_t>(limit);
}

}  // namespace rec_kernels
