#include "cpu/row_sort.h"

#include <algorithm>
#include <vector>

#include "core/parallel.h"

namespace rec_kernels {
namespace {

// A digit's counters (2^11 of 8 bytes a worker) stay in the first-level cache while entries are scattered.
constexpr int kMaxDigitBits = 11;
// Below this, starting threads and clearing counters costs more than a comparison sort.
constexpr int64_t kSmall = 256;
constexpr int64_t kGrain = 8192;

struct Slice {
  int64_t begin, end;
};

Slice slice_of(int64_t count, int64_t workers, int64_t worker) {
  return {count * worker / workers, count * (worker + 1) / workers};
}

// One stable pass over the digit at `shift`: count per worker, give each (digit, worker) its place, move.
void radix_pass(const uint64_t* from, uint64_t* to, int64_t count, int shift, int digit_bits, int64_t workers) {
  const int64_t digits = int64_t{1} << digit_bits;
  const uint64_t mask = static_cast<uint64_t>(digits - 1);
  std::vector<int64_t> places(static_cast<size_t>(digits * workers), 0);
  parallel_workers(workers, [&](int64_t worker) {
    int64_t* counts = places.data() + worker * digits;
    const Slice s = slice_of(count, workers, worker);
    for (int64_t i = s.begin; i < s.end; ++i) ++counts[(from[i] >> shift) & mask];
  });
  int64_t place = 0;
  for (int64_t d = 0; d < digits; ++d)
    for (int64_t worker = 0; worker < workers; ++worker) {
      int64_t& here = places[static_cast<size_t>(worker * digits + d)];
      const int64_t n = here;
      here = place;
      place += n;
    }
  parallel_workers(workers, [&](int64_t worker) {
    int64_t* next = places.data() + worker * digits;
    const Slice s = slice_of(count, workers, worker);
    for (int64_t i = s.begin; i < s.end; ++i) to[next[(from[i] >> shift) & mask]++] = from[i];
  });
}

void radix_sort(std::unique_ptr<uint64_t[]>& entries, int64_t count, int row_bits, int payload_bits, int64_t workers) {
  std::unique_ptr<uint64_t[]> other(new uint64_t[static_cast<size_t>(count)]);
  const int passes = (row_bits + kMaxDigitBits - 1) / kMaxDigitBits;
  for (int pass = 0, done = 0; pass < passes; ++pass) {
    const int bits = (row_bits - done + passes - pass - 1) / (passes - pass);
    radix_pass(entries.get(), other.get(), count, payload_bits + done, bits, workers);
    entries.swap(other);
    done += bits;
  }
}

void find_runs(RowSort* sort, int64_t valid, int64_t workers) {
  const uint64_t* entries = sort->entries.get();
  const int shift = sort->payload_bits;
  const auto begins_run = [&](int64_t i) { return i == 0 || (entries[i] >> shift) != (entries[i - 1] >> shift); };
  std::vector<int64_t> runs(static_cast<size_t>(workers + 1), 0);
  parallel_workers(workers, [&](int64_t worker) {
    const Slice s = slice_of(valid, workers, worker);
    int64_t n = 0;
    for (int64_t i = s.begin; i < s.end; ++i) n += begins_run(i);
    runs[static_cast<size_t>(worker + 1)] = n;
  });
  for (int64_t w = 0; w < workers; ++w) runs[static_cast<size_t>(w + 1)] += runs[static_cast<size_t>(w)];
  sort->num_runs = runs[static_cast<size_t>(workers)];
  sort->starts.reset(new int64_t[static_cast<size_t>(sort->num_runs + 1)]);
  int64_t* starts = sort->starts.get();
  parallel_workers(workers, [&](int64_t worker) {
    const Slice s = slice_of(valid, workers, worker);
    int64_t* out = starts + runs[static_cast<size_t>(worker)];
    for (int64_t i = s.begin; i < s.end; ++i)
      if (begins_run(i)) *out++ = i;
  });
  starts[sort->num_runs] = valid;
}

}  // namespace

int bit_width(uint64_t n) { return n == 0 ? 0 : 64 - __builtin_clzll(n); }

RowSort sort_rows(std::unique_ptr<uint64_t[]> entries, int64_t count, int64_t valid, int row_bits, int payload_bits) {
  RowSort sort;
  sort.entries = std::move(entries);
  sort.payload_bits = payload_bits;
  const int64_t workers = workers_for(count, kGrain);
  // Payloads ascend in the order of writing, so that comparing whole entries is stable too.
  if (count < kSmall) std::sort(sort.entries.get(), sort.entries.get() + count);
  else radix_sort(sort.entries, count, row_bits, payload_bits, workers);
  find_runs(&sort, valid, workers);
  return sort;
}

}  // namespace rec_kernels
