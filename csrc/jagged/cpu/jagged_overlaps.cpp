// jagged_overlaps on the CPU. A row is searched from its end: if few of its ids are new, the end of the row that it
// continues is found after a few steps.
#include "jagged/jagged_overlaps.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "core/boxing.h"
#include "core/cpu/scratch.h"
#include "jagged/cpu/jagged.h"
#include "jagged/cpu/suffix_table.h"

namespace rec_kernels {
namespace {

// Location of a row: a chain of rows that continue one another, and the row's start in it.
struct Place {
  int64_t chain;
  int64_t start;
  int64_t overlap;  // number of its ids that the chain already has
  bool continued;   // another row continues it
};

template <class Id>
struct Search {
  const Bags& rows;
  const Id* ids;
  Place* places;
  int64_t* chain_ends;  // length of each chain
  int64_t chains = 0;

  int64_t length(int64_t r) const { return rows.offset(r + 1) - rows.offset(r); }

  // True if the last `overlap` ids of an earlier row equal the first ids of this row, which can then share them.
  bool fits(int64_t earlier, int64_t row, int64_t overlap) const {
    if (overlap > length(earlier) || (places[earlier].continued && overlap < length(row))) return false;
    const Id* end = ids + rows.offset(earlier + 1);
    return std::equal(end - overlap, end, ids + rows.offset(row));
  }
  // Finds the row that this one continues with the longest overlap, and that overlap.
  std::tuple<int64_t, int64_t> earlier_of(int64_t row, const LastIds<>& last_ids) const {
    const int64_t count = length(row);
    if (count < kAnchor) return {-1, 0};
    const Id* first = ids + rows.offset(row);
    uint64_t hash = hash_ids<kAnchor>(first + count - kAnchor);
    for (int64_t overlap = count, tries = 0; tries < kTries; --overlap) {
      const int64_t earlier = last_ids.find(hash);
      if (earlier >= 0 && fits(earlier, row, overlap)) return {earlier, overlap};
      tries += earlier >= 0;
      if (overlap == kAnchor) break;
      hash = hash_before<kAnchor>(hash, first + overlap - kAnchor);
    }
    return {-1, 0};
  }
  void place(int64_t row, LastIds<>* last_ids) {
    const auto [earlier, overlap] = earlier_of(row, *last_ids);
    const int64_t count = length(row);
    if (earlier < 0) {
      places[row] = {chains, 0, 0, false};
      chain_ends[chains++] = count;
    } else {
      Place& before = places[earlier];
      places[row] = {before.chain, before.start + length(earlier) - overlap, overlap, false};
      if (overlap == count) return;  // the row is a suffix of the other one, which represents both
      before.continued = true;
      chain_ends[before.chain] += count - overlap;
    }
    if (count >= kAnchor) last_ids->put(hash_ids<kAnchor>(ids + rows.offset(row + 1) - kAnchor), row);
  }
};

// Concatenates the chains in the output.
template <class Id>
std::tuple<Tensor, Tensor> lay_over(const Tensor& values, const Tensor& offsets, const Bags& rows) {
  const int64_t count = rows.num_bags;
  const Scratch<Place> places(count);
  const Scratch<int64_t> chain_ends(count);
  Search<Id> search{rows, static_cast<const Id*>(values.const_data_ptr()), places.get(), chain_ends.get()};
  LastIds<> last_ids(count);
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

STABLE_TORCH_LIBRARY_IMPL(RK_LIBRARY, CPU, m) { implement<&jagged_overlaps_cpu>(m, "jagged_overlaps"); }

}  // namespace rec_kernels
