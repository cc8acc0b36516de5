// Finds rows by their last ids: a rolling hash, and a hash table from hashes to rows.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/bits.h"
#include "core/cpu/scratch.h"

namespace rec_kernels {

// Rolling hash: the hash of kCount ids is a polynomial in kHashBase modulo 2^64, in which the first id has coefficient
// 1. Moving back by one position adds one id and removes another.
constexpr uint64_t kHashBase = 0x9E3779B97F4A7C15u;  // odd, with well distributed bits: 2^64 / golden ratio
constexpr uint64_t hash_power(int64_t n) { return n == 0 ? 1 : kHashBase * hash_power(n - 1); }

template <int64_t kCount, class Id>
uint64_t hash_ids(const Id* ids) {
  uint64_t h = 0;
  for (int64_t j = kCount; j-- > 0;) h = h * kHashBase + static_cast<uint64_t>(ids[j]);
  return h;
}
// Returns the hash of the kCount ids at ids - 1, given the hash of those at ids.
template <int64_t kCount, class Id>
uint64_t hash_before(uint64_t h, const Id* ids) {
  return (h - static_cast<uint64_t>(ids[kCount - 1]) * hash_power(kCount - 1)) * kHashBase +
         static_cast<uint64_t>(ids[-1]);
}

// Maps the hash of a row's last ids to the latest such row. `Memory` is a parameter so that tests can count reads.
template <template <class> class Memory = Scratch>
class LastIds {
 public:
  explicit LastIds(int64_t rows) {
    int64_t size = 2;
    for (; size < 2 * rows; size *= 2) --shift_;
    slots_ = Memory<Slot>(size);
    std::fill_n(slots_.get(), size, Slot{0, -1});
    mask_ = static_cast<uint64_t>(size) - 1;
  }
  // Returns -1 if none.
  int64_t find(uint64_t hash) const { return slot_of(hash).row; }
  void put(uint64_t hash, int64_t row) { slot_of(hash) = {hash, row}; }

 private:
  struct Slot {
    uint64_t hash;
    int64_t row;
  };
  // Returns the slot with this hash, or the empty slot to insert it. The hash is mixed, since hashes of ids that differ
  // only in the first are adjacent and would cluster in the table.
  Slot& slot_of(uint64_t hash) const {
    for (uint64_t place = fmix64(hash) >> shift_;; place = (place + 1) & mask_) {
      Slot& slot = slots_[static_cast<int64_t>(place)];
      if (slot.row < 0 || slot.hash == hash) return slot;
    }
  }

  int shift_ = 63;
  uint64_t mask_ = 0;
  Memory<Slot> slots_;
};

}  // namespace rec_kernels
