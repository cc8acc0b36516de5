// Copies rows of a jagged tensor, for jagged_index_select and jagged_windows on the CPU.
#pragma once

#include <tuple>

#include "jagged/cpu/jagged.h"

namespace rec_kernels {

// Output rows, with `bytes` bytes per value.
struct Copies {
  const char* from;
  char* to;
  int64_t bytes;
};

// Copies output rows [begin, end). Rows that are adjacent in the input are copied together.
template <class Rows>
void copy_rows(const Copies& c, const Rows& rows, const Integers& places, int64_t begin, int64_t end) {
  int64_t first = begin < end ? rows.start(begin) : 0;
  while (begin < end) {
    int64_t stop = rows.stop(begin), last = begin + 1, next = 0;
    for (; last < end && (next = rows.start(last)) == stop; ++last) stop = rows.stop(last);
    copy_bytes(c.to + places[begin] * c.bytes, c.from + first * c.bytes, (stop - first) * c.bytes);
    begin = last;
    first = next;
  }
}

// Returns the output offsets [count + 1], of the dtype of `like`, and the number of values.
template <class Rows>
std::tuple<Tensor, int64_t> place_rows(const Rows& rows, int64_t count, const Tensor& like) {
  Tensor offsets = new_tensor(like, {count + 1}, like.scalar_type());
  int64_t total = 0;
  with_integers(offsets, [&](auto* offset) {
    using Offset = std::remove_pointer_t<decltype(offset)>;
    total = running_sums(
        count, [rows](int64_t m) { return rows.stop(m) - rows.start(m); },
        [offset](int64_t m, int64_t before) { offset[m] = static_cast<Offset>(before); });
    offset[count] = static_cast<Offset>(total);
  });
  return {offsets, total};
}

// Gathers `count` rows of contiguous `values`: row m is values [rows.start(m), rows.stop(m)), within [0, N]. Offsets
// get the dtype of `like`, argument Rows::kTyped; Rows::kNamed describes the rows in errors. `total`: the number of
// values, if known. Returns the result of the op.
template <class Rows>
std::tuple<Tensor, Tensor, Tensor> copied_rows(const Tensor& values, const Rows& rows, int64_t count,
                                               const Tensor& like, std::optional<int64_t> given_total) {
  // For rows without columns, N and the total are unbounded.
  check_value(count == 0 || values.size(0) <= INT64_MAX / count, Rows::kNamed, ", ", count, " of up to ",
              values.size(0), " values, could have more than 2^63 together");
  const auto [offsets, total] = place_rows(rows, count, like);
  check_value(given_total.value_or(total) == total, "total = ", given_total.value_or(0), ", and ", Rows::kNamed,
              " have ", total, " values");
  check_fits(total, like, Rows::kTyped);
  const int64_t columns = values.dim() == 2 ? values.size(1) : 1;
  Tensor out = new_rows(values, total);
  const Copies copies{static_cast<const char*>(values.const_data_ptr()), static_cast<char*>(out.mutable_data_ptr()),
                      columns * static_cast<int64_t>(values.element_size())};
  const int64_t cost = total * copies.bytes + 16 * count, workers = workers_for(1 + cost / kFewBytes, 1);
  const int64_t piece = 1 + count / pieces_for(cost, kFewBytes, workers);
  const Integers places(offsets);
  parallel_pieces(count, piece, workers,
                  [&](int64_t begin, int64_t end, int64_t) { copy_rows(copies, rows, places, begin, end); });
  return {out, offsets, good_status(like)};
}

}  // namespace rec_kernels
