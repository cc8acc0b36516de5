// Searches for the first item of an input that is bad, with several workers.
#pragma once

#include <vector>

#include "core/cpu/parallel.h"
#include "embedding_bag/bags.h"

namespace rec_kernels {

// The smallest position that a worker has found bad.
class FirstBad {
 public:
  explicit FirstBad(int64_t workers) : found_(static_cast<size_t>(workers), kNoBadPosition) {}
  void note(int64_t worker, int64_t position) {
    int64_t& mine = found_[static_cast<size_t>(worker)];
    if (position < mine) mine = position;
  }
  int64_t position() const {
    int64_t first = kNoBadPosition;
    for (const int64_t each : found_) first = each < first ? each : first;
    return first;
  }

 private:
  std::vector<int64_t> found_;
};

// The first of items [begin, end) that is_bad(i) is true of, or kNoBadPosition. Without branches while all is well.
template <class IsBad>
int64_t first_bad_of(int64_t begin, int64_t end, const IsBad& is_bad) {
  constexpr int64_t kAtOnce = 1024;
  const IsBad mine = is_bad;  // owned: compilers then keep what it reads in registers
  for (; begin < end; begin += kAtOnce) {
    const int64_t stop = begin + kAtOnce < end ? begin + kAtOnce : end;
    bool bad = false;
    for (int64_t i = begin; i < stop; ++i) bad |= mine(i);
    if (!bad) continue;
    for (int64_t i = begin; i < stop; ++i)
      if (mine(i)) return i;
  }
  return kNoBadPosition;
}

// Searches all items, with several workers.
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

// True if a number is outside of [0, limit).
inline bool is_outside(int64_t number, int64_t limit) {
  return static_cast<uint64_t>(number) >= static_cast<uint64_t>(limit);
}

}  // namespace rec_kernels
