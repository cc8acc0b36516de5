#include "core/cpu/radix_sort.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/cpu/parallel.h"

namespace rec_kernels {
namespace {

// The counters of a digit, 2^11 of 8 bytes per worker, stay in the L1 cache while entries are scattered.
constexpr int kMaxDigitBits = 11;
// Below this, clearing counters costs more than a comparison sort.
constexpr int64_t kSmall = 256;

struct Slice {
  int64_t begin, end;
};

Slice slice_of(int64_t count, int64_t workers, int64_t worker) {
  return {count * worker / workers, count * (worker + 1) / workers};
}

// Separate from the threading code, so that its loops keep everything but the entries in registers.
struct Digit {
  int shift;
  uint64_t mask;

  void count(const uint64_t* entries, Slice s, int64_t* counts) const {
    const Digit d = *this;
    for (int64_t i = s.begin; i < s.end; ++i) ++counts[(entries[i] >> d.shift) & d.mask];
  }
  void move(const uint64_t* from, uint64_t* to, Slice s, int64_t* next) const {
    const Digit d = *this;
    for (int64_t i = s.begin; i < s.end; ++i) to[next[(from[i] >> d.shift) & d.mask]++] = from[i];
  }
};

// One stable pass over a digit: count per worker, compute the start of each (digit, worker), scatter.
void radix_pass(const uint64_t* from, uint64_t* to, int64_t count, int shift, int digit_bits, int64_t workers) {
  const int64_t digits = int64_t{1} << digit_bits;
  const Digit digit{shift, static_cast<uint64_t>(digits - 1)};
  std::vector<int64_t> places(static_cast<size_t>(digits * workers), 0);
  parallel_workers(workers, [&](int64_t worker) {
    digit.count(from, slice_of(count, workers, worker), places.data() + worker * digits);
  });
  int64_t place = 0;
  for (int64_t d = 0; d < digits; ++d)
    for (int64_t worker = 0; worker < workers; ++worker)
      place += std::exchange(places[static_cast<size_t>(worker * digits + d)], place);
  parallel_workers(workers, [&](int64_t worker) {
    digit.move(from, to, slice_of(count, workers, worker), places.data() + worker * digits);
  });
}

// find_runs() with several threads: count, then write.
int64_t find_runs_parallel(const uint64_t* entries, int64_t count, int payload_bits, int64_t base, int64_t* starts,
                           int64_t workers) {
  const auto begins = [&](int64_t i) { return i == 0 || entries[i] >> payload_bits != entries[i - 1] >> payload_bits; };
  std::vector<int64_t> before(static_cast<size_t>(workers + 1), 0);
  parallel_workers(workers, [&](int64_t worker) {
    const Slice s = slice_of(count, workers, worker);
    int64_t runs = 0;
    for (int64_t i = s.begin; i < s.end; ++i) runs += begins(i);
    before[static_cast<size_t>(worker + 1)] = runs;
  });
  for (size_t w = 0; w + 1 < before.size(); ++w) before[w + 1] += before[w];
  parallel_workers(workers, [&](int64_t worker) {
    const Slice s = slice_of(count, workers, worker);
    int64_t* out = starts + before[static_cast<size_t>(worker)];
    for (int64_t i = s.begin; i < s.end; ++i)
      if (begins(i)) *out++ = base + i;
  });
  return before.back();
}

// Branch-free: writes every position as the next run's start, and advances only if a run starts there.
int64_t find_runs_serial(const uint64_t* entries, int64_t count, int payload_bits, int64_t base, int64_t* starts) {
  uint64_t previous = ~uint64_t{0};  // not a valid row, since payloads have at least one bit
  int64_t runs = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t row = entries[i] >> payload_bits;
    starts[runs] = base + i;
    runs += row != previous;
    previous = row;
  }
  return runs;
}

}  // namespace

RowSort::RowSort(int64_t count, int row_bits, int payload_bits)
    : count_(count),
      row_bits_(row_bits),
      payload_bits_(payload_bits),
      passes_(count < kSmall ? 0 : (row_bits + kMaxDigitBits - 1) / kMaxDigitBits) {}

void RowSort::sort(uint64_t* sorted, uint64_t* other, int64_t workers) const {
  // Payloads are ascending in input order, so comparing whole entries is also stable.
  if (count_ < kSmall) return std::sort(sorted, sorted + count_);
  uint64_t *from = first_buffer(sorted, other), *to = from == sorted ? other : sorted;
  for (int pass = 0, done = 0; pass < passes_; ++pass) {
    const int bits = (row_bits_ - done + passes_ - pass - 1) / (passes_ - pass);
    radix_pass(from, to, count_, payload_bits_ + done, bits, workers);
    std::swap(from, to);
    done += bits;
  }
}

int64_t find_runs(const uint64_t* entries, int64_t count, int payload_bits, int64_t base, int64_t* starts,
                  int64_t workers) {
  const int64_t runs = workers > 1 ? find_runs_parallel(entries, count, payload_bits, base, starts, workers)
                                   : find_runs_serial(entries, count, payload_bits, base, starts);
  starts[runs] = base + count;
  return runs;
}

}  // namespace rec_kernels
