// Helpers of the CPU drivers of the ops on jagged rows.
#pragma once

#include <cstring>
#include <type_traits>
#include <vector>

#include "core/cpu/parallel.h"
#include "embedding_bag/cpu/first_bad.h"
#include "jagged/jagged.h"

namespace rec_kernels {

// A status without errors: the CPU has already raised any.
inline Tensor good_status(const Tensor& like) {
  Tensor status = new_tensor(like, {2}, ScalarType::Long);
  int64_t* report = status.mutable_data_ptr<int64_t>();
  report[0] = kNoBadPosition;
  report[1] = 0;
  return status;
}

// Throws std::invalid_argument unless every value is in a row.
inline void check_cover(const Bags& rows) {
  check_offsets(rows);
  check_value(rows.offset(0) == 0 && rows.offset(rows.num_bags) == rows.num_ids, "offsets must start at 0 and end at ",
              rows.num_ids, ", the number of values, got ", rows.offset(0), " and ", rows.offset(rows.num_bags));
}

// Calls body with a pointer to the elements of an int32 or int64 tensor, for writing.
template <class Body>
void with_integers(Tensor& t, const Body& body) {
  if (t.scalar_type() == ScalarType::Long) body(t.mutable_data_ptr<int64_t>());
  else body(t.mutable_data_ptr<int32_t>());
}

// Copies a few bytes in a loop, where calling memcpy would cost more than the copy.
inline void copy_bytes(char* to, const char* from, int64_t bytes) {
  constexpr int64_t kFew = 128, kWord = 8;
  if (bytes > kFew) {
    std::memcpy(to, from, static_cast<size_t>(bytes));
    return;
  }
  int64_t i = 0;
  for (; i + kWord <= bytes; i += kWord) std::memcpy(to + i, from + i, kWord);
  for (; i < bytes; ++i) to[i] = from[i];
}

// Parallel prefix sum of the items' lengths in two passes: calls sums(i, sum of the lengths before item i) for every
// item, after the last call of its length. Returns the total. Both functors are called for every item and should
// capture by value, which lets compilers keep captures in registers.
template <class Length, class Sums>
int64_t running_sums(int64_t items, const Length& length, const Sums& sums) {
  const int64_t workers = workers_for(items, kFewItems), piece = ceil_div(items, workers);
  std::vector<int64_t> before(static_cast<size_t>(workers) + 1, 0);
  const auto for_piece = [&](int64_t w, int64_t sum, bool last_pass) {
    const int64_t begin = w * piece, end = items - begin < piece ? items : begin + piece;
    const Length length_of = length;
    const Sums write = sums;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t here = length_of(i);
      if (last_pass) write(i, sum);
      sum += here;
    }
    return sum;
  };
  if (workers > 1)
    parallel_workers(workers, [&](int64_t w) { before[static_cast<size_t>(w) + 1] = for_piece(w, 0, false); });
  for (size_t w = 1; w < before.size(); ++w) before[w] += before[w - 1];
  parallel_workers(workers, [&](int64_t w) {
    const int64_t sum = for_piece(w, before[static_cast<size_t>(w)], true);
    if (w == workers - 1) before.back() = sum;
  });
  return before.back();
}

// Calls body with a pointer to int32 or int64 values, for reading.
template <class Body>
auto with_numbers(const Integers& numbers, const Body& body) {
  return numbers.wide ? body(static_cast<const int64_t*>(numbers.data))
                      : body(static_cast<const int32_t*>(numbers.data));
}

// Throws std::out_of_range for the first element of `t` that is not in [0, limit).
inline void check_indices(const Tensor& t, int64_t limit, const char* name, const char* of) {
  const Integers numbers(t);
  const int64_t i = with_numbers(numbers, [&](const auto* number) {
    return first_bad(t.size(0), [number, limit](int64_t at) { return is_outside(number[at], limit); });
  });
  if (i == kNoBadPosition) return;
  throw std::out_of_range(join(name, "[", i, "] = ", numbers[i], " must be in [0, ", limit, "), ", of));
}

}  // namespace rec_kernels
