#include "ops/jagged_index_select.h"

#include <algorithm>
#include <tuple>

#include "cpu/jagged.h"

namespace rec_kernels {
namespace {

// The output: rows of `bytes` bytes a value.
struct Copies {
  const char* from;
  char* to;
  int64_t bytes;
};

// Rows [begin, end) of the output. Rows that follow each other in the input, too, are one copy.
void copy_rows(const Copies& c, const Bags& rows, const Integers& index, const Integers& places, int64_t begin,
               int64_t end) {
  while (begin < end) {
    const int64_t row = index[begin];
    int64_t last = begin + 1;
    while (last < end && index[last] == row + last - begin) ++last;
    const int64_t first = rows.offset(row), count = rows.offset(row + last - begin) - first;
    copy_bytes(c.to + places[begin] * c.bytes, c.from + first * c.bytes, count * c.bytes);
    begin = last;
  }
}

std::tuple<Tensor, Tensor, Tensor> jagged_index_select_cpu(const Tensor& values_in, const Tensor& offsets_in,
                                                           const Tensor& index_in, std::optional<int64_t> total) {
  check_jagged_index_select(values_in, offsets_in, index_in, total);
  const Tensor values = as_contiguous(values_in), offsets = as_contiguous(offsets_in), given = as_contiguous(index_in);
  const Bags rows = jagged_rows(values, offsets);
  check_offsets(rows);
  check_numbers(given, rows.num_bags, "index", "the rows that offsets describe");
  const Integers index(given);
  const int64_t count = given.size(0), columns = values.dim() == 2 ? values.size(1) : 1;
  // Of rows without columns, N may be anything, and so may the sum.
  check_value(count == 0 || rows.num_ids <= INT64_MAX / count, "index has ", count, " rows of ", rows.num_ids,
              " values, and together they could have more than 2^63");
  Tensor new_offsets = new_tensor(offsets, {count + 1}, offsets.scalar_type());
  int64_t chosen = 0;
  with_integers(new_offsets, [&](auto* offset) {
    using Offset = std::remove_pointer_t<decltype(offset)>;
    chosen = running_sums(
        count, [rows, index](int64_t m) { return rows.offset(index[m] + 1) - rows.offset(index[m]); },
        [offset](int64_t m, int64_t before) { offset[m] = static_cast<Offset>(before); });
    offset[count] = static_cast<Offset>(chosen);
  });
  check_value(total.value_or(chosen) == chosen, "total = ", total.value_or(0), ", and the rows that index names have ",
              chosen, " values");
  check_fits(chosen, offsets);
  Tensor out = values.dim() == 2 ? new_tensor(values, {chosen, columns}, values.scalar_type())
                                 : new_tensor(values, {chosen}, values.scalar_type());
  const Copies copies{static_cast<const char*>(values.const_data_ptr()), static_cast<char*>(out.mutable_data_ptr()),
                      columns * static_cast<int64_t>(values.element_size())};
  const int64_t cost = chosen * copies.bytes + 16 * count, workers = workers_for(1 + cost / kFewBytes, 1);
  const int64_t piece = 1 + count / pieces_for(cost, kFewBytes, workers);
  const Integers places(new_offsets);
  parallel_pieces(count, piece, workers,
                  [&](int64_t begin, int64_t end, int64_t) { copy_rows(copies, rows, index, places, begin, end); });
  return {out, new_offsets, good_status(offsets)};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(RK_LIBRARY, CPU, m) { m.impl("jagged_index_select", TORCH_BOX(&jagged_index_select_cpu)); }

}  // namespace rec_kernels
