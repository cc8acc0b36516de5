// jagged_overlaps on the CPU. The ids of a row are looked at from its end on: if little of it is new, the end of the
// row that it goes on from is found after few of them.
#include "ops/jagged_overlaps.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "cpu/jagged.h"
#include "cpu/scratch.h"

namespace rec_kernels {
namespace {

// The hash of kAnchor ids is a polynomial of them in kBase, modulo 2^64: from one place to the place before it, one id
// comes and another goes. Its upper bits depend on all bits of the ids.
constexpr uint64_t kBase = 0x9E3779B97F4A7C15u;  // odd, with bits all over: 2^64 over the golden ratio
constexpr uint64_t power(int64_t n) { return n == 0 ? 1 : kBase * power(n - 1); }

template <class Id>
uint64_t hash_anchor(const Id* ids) {
  uint64_t h = 0;
  for (int64_t j = kAnchor; j-- > 0;) h = h * kBase + static_cast<uint64_t>(ids[j]);
  return h;
}
// Of the kAnchor ids at ids - 1, from that of those at ids.
template <class Id>
uint64_t hash_before(uint64_t h, const Id* ids) {
  return (h - static_cast<uint64_t>(ids[kAnchor - 1]) * power(kAnchor - 1)) * kBase + static_cast<uint64_t>(ids[-1]);
}

// From the hash of a row's last ids to the row, the last one of those with this hash.
class LastIds {
 public:
  explicit LastIds(int64_t rows) {
    int64_t size = 2;
    for (; size < 2 * rows; size *= 2) --shift_;
    slots_ = Scratch<Slot>(size);
    std::fill_n(slots_.get(), size, Slot{0, -1});
    mask_ = static_cast<uint64_t>(size) - 1;
  }
  // -1: none.
  int64_t find(uint64_t hash) const { return slot_of(hash).row; }
  void put(uint64_t hash, int64_t row) { slot_of(hash) = {hash, row}; }

 private:
  struct Slot {
    uint64_t hash;
    int64_t row;
  };
  // The one with this hash, or the free one where it would be.
  Slot& slot_of(uint64_t hash) const {
    for (uint64_t place = hash >> shift_;; place = (place + 1) & mask_) {
      Slot& slot = slots_[static_cast<int64_t>(place)];
      if (slot.row < 0 || slot.hash == hash) return slot;
    }
  }

  int shift_ = 63;
  uint64_t mask_ = 0;
  Scratch<Slot> slots_;
};

// Where a row is: in a chain of rows that go on from one another, and from where on in it.
struct Place {
  int64_t chain;
  int64_t start;
  int64_t overlap;  // so many of its ids are the chain's already
  bool continued;   // another row goes on from it
};

template <class Id>
struct Search {
  const Bags& rows;
  const Id* ids;
  Place* places;
  int64_t* chain_ends;  // of each chain: its ids
  int64_t chains = 0;

  int64_t length(int64_t r) const { return rows.offset(r + 1) - rows.offset(r); }

  // Whether the last `overlap` ids of an earlier row are the first of this one, which may be laid over them.
  bool fits(int64_t earlier, int64_t row, int64_t overlap) const {
    if (overlap > length(earlier) || (places[earlier].continued && overlap < length(row))) return false;
    const Id* end = ids + rows.offset(earlier + 1);
    return std::equal(end - overlap, end, ids + rows.offset(row));
  }
  // The row that this one goes on from, and by how many ids they overlap, the most that there are.
  std::tuple<int64_t, int64_t> earlier_of(int64_t row, const LastIds& last_ids) const {
    const int64_t count = length(row);
    if (count < kAnchor) return {-1, 0};
    const Id* first = ids + rows.offset(row);
    uint64_t hash = hash_anchor(first + count - kAnchor);
    for (int64_t overlap = count, tries = 0; tries < kTries; --overlap) {
      const int64_t earlier = last_ids.find(hash);
      if (earlier >= 0 && fits(earlier, row, overlap)) return {earlier, overlap};
      tries += earlier >= 0;
      if (overlap == kAnchor) break;
      hash = hash_before(hash, first + overlap - kAnchor);
    }
    return {-1, 0};
  }
  void place(int64_t row, LastIds* last_ids) {
    const auto [earlier, overlap] = earlier_of(row, *last_ids);
    const int64_t count = length(row);
    if (earlier < 0) {
      places[row] = {chains, 0, 0, false};
      chain_ends[chains++] = count;
    } else {
      Place& before = places[earlier];
      places[row] = {before.chain, before.start + length(earlier) - overlap, overlap, false};
      if (overlap == count) return;  // the other one, which is no shorter, stands for both
      before.continued = true;
      chain_ends[before.chain] += count - overlap;
    }
    if (count >= kAnchor) last_ids->put(hash_anchor(ids + rows.offset(row + 1) - kAnchor), row);
  }
};

// Lays the rows' chains one behind the other.
template <class Id>
std::tuple<Tensor, Tensor> lay_over(const Tensor& values, const Tensor& offsets, const Bags& rows) {
  const int64_t count = rows.num_bags;
  const Scratch<Place> places(count);
  const Scratch<int64_t> chain_ends(count);
  Search<Id> search{rows, static_cast<const Id*>(values.const_data_ptr()), places.get(), chain_ends.get()};
  LastIds last_ids(count);
  for (int64_t r = 0; r < count; ++r) search.place(r, &last_ids);
  int64_t stored = 0;
  for (int64_t c = 0; c < search.chains; ++c) stored += std::exchange(chain_ends[c], stored);
  Tensor output = new_tensor(values, {stored}, values.scalar_type());
  Tensor starts = new_tensor(offsets, {count}, offsets.scalar_type());
  Id* out = static_cast<Id*>(output.mutable_data_ptr());
  with_integers(starts, [&](auto* start) {
    using Start = std::remove_pointer_t<decltype(start)>;
    for (int64_t r = 0; r < count; ++r) {
      const Place& p = places[r];
      const int64_t first = chain_ends[p.chain] + p.start;
      start[r] = static_cast<Start>(first);
      std::copy(search.ids + rows.offset(r) + p.overlap, search.ids + rows.offset(r + 1), out + first + p.overlap);
    }
  });
  return {output, starts};
}

std::tuple<Tensor, Tensor, Tensor> jagged_overlaps_cpu(const Tensor& values_in, const Tensor& offsets_in) {
  check_jagged_overlaps(values_in, offsets_in);
  const Tensor values = as_contiguous(values_in), offsets = as_contiguous(offsets_in);
  const Bags rows = jagged_rows(values, offsets);
  check_offsets(rows);
  const auto [output, starts] = values.scalar_type() == ScalarType::Long ? lay_over<int64_t>(values, offsets, rows)
                                                                         : lay_over<int32_t>(values, offsets, rows);
  return {output, starts, good_status(offsets)};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(RK_LIBRARY, CPU, m) { m.impl("jagged_overlaps", TORCH_BOX(&jagged_overlaps_cpu)); }

}  // namespace rec_kernels
