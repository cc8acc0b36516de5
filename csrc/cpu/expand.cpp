// expand and the sum of its gradients on the CPU.
#include "cpu/expand.h"

#include <algorithm>
#include <tuple>

#include "cpu/embedding_bag_backward.h"
#include "cpu/jagged.h"
#include "cpu/scratch.h"
#include "ops/expand.h"

namespace rec_kernels {
namespace {

std::tuple<Tensor, Tensor> expand_cpu(const Tensor& x_in, const Tensor& inverse_in) {
  check_expand(x_in, inverse_in);
  const Tensor x = as_contiguous(x_in), inverse = as_contiguous(inverse_in);
  const int64_t count = inverse.size(0), columns = x.size(1);
  const int64_t bytes = columns * static_cast<int64_t>(x.element_size());
  check_numbers(inverse, x.size(0), "inverse", "the rows of x");
  Tensor out = new_tensor(x, {count, columns}, x.scalar_type());
  if (count == 0 || bytes == 0) return {out, good_status(x)};
  const auto* from = static_cast<const char*>(x.const_data_ptr());
  auto* to = static_cast<char*>(out.mutable_data_ptr());
  const Integers rows(inverse);
  const auto copy_rows = kernels<ExpandKernels>().copy_rows;
  const int64_t piece = 1 + kFewBytes / bytes;
  parallel_pieces(count, piece, workers_for(count, piece), [&](int64_t begin, int64_t end, int64_t) {
    copy_rows(from, rows.data, rows.wide, bytes, to, begin, end);
  });
  return {out, good_status(x)};
}

// Positions 0, 1, ... of the gradient by the row that they are summed into: those of row u are order[starts[u]] up to
// order[starts[u + 1]]; without an order, they are in it as they are.
struct Occurrences {
  Scratch<int64_t> starts, order;

  const int64_t* of(int64_t place) const { return order ? order.get() + place : nullptr; }
};

// A counting sort, which is stable. Samples of a clustered batch need none.
template <class Integer>
Occurrences sort_by_row(const Integer* inverse, int64_t count, int64_t rows) {
  Occurrences out{Scratch<int64_t>(rows + 2), {}};
  int64_t* starts = out.starts.get();
  std::fill_n(starts, rows + 2, int64_t{0});
  bool rises = true;
  for (int64_t i = 0; i < count; ++i) {
    rises &= i == 0 || inverse[i] >= inverse[i - 1];
    ++starts[int64_t{inverse[i]} + 2];
  }
  for (int64_t u = 2; u < rows + 2; ++u) starts[u] += starts[u - 1];
  if (rises) {
    std::copy(starts + 1, starts + rows + 2, starts);
    return out;
  }
  out.order = Scratch<int64_t>(count);
  for (int64_t i = 0; i < count; ++i) out.order[starts[int64_t{inverse[i]} + 1]++] = i;
  return out;
}

// Chunks of rows that have more than one, numbered through: row longs[k] has those from first[k] on.
struct LongRows {
  std::vector<int64_t> rows, first{0};

  int64_t row_of(int64_t chunk) const {
    return std::upper_bound(first.begin(), first.end(), chunk) - first.begin() - 1;
  }
};

LongRows long_rows(const int64_t* starts, int64_t rows) {
  LongRows out;
  for (int64_t u = 0; u < rows; ++u) {
    const int64_t count = starts[u + 1] - starts[u];
    if (count <= kChunk) continue;
    out.rows.push_back(u);
    out.first.push_back(out.first.back() + ceil_div(count, kChunk));
  }
  return out;
}

// Sums `count` chunk sums by the same rule, in place: a chunk's sum lands on one that has been read.
void sum_sums(float* sums, int64_t count, int64_t columns, float* out) {
  const auto sum_rows = kernels<ExpandKernels>().sum_rows;
  for (; count > kChunk; count = ceil_div(count, kChunk))
    for (int64_t i = 0; i < count; i += kChunk)
      sum_rows(sums + i * columns, nullptr, std::min(kChunk, count - i), columns, sums + i / kChunk * columns);
  sum_rows(sums, nullptr, count, columns, out);
}

void sum_occurrences(const float* grad, const Occurrences& sorted, int64_t rows, int64_t columns, float* out) {
  const int64_t* starts = sorted.starts.get();
  const LongRows longs = long_rows(starts, rows);
  const auto sum_rows = kernels<ExpandKernels>().sum_rows;
  const auto sum = [&](int64_t place, int64_t count, float* to) {
    const int64_t* order = sorted.of(place);
    sum_rows(order ? grad : grad + place * columns, order, count, columns, to);
  };
  const int64_t chunks = longs.first.back(), row_bytes = 4 * columns;
  Scratch<float> sums(chunks * columns);
  const int64_t few = 1 + kFewBytes / (kChunk * row_bytes);
  parallel_pieces(chunks, few, workers_for(chunks, few), [&](int64_t begin, int64_t end, int64_t) {
    for (int64_t c = begin; c < end; ++c) {
      const int64_t k = longs.row_of(c), u = longs.rows[static_cast<size_t>(k)];
      const int64_t place = starts[u] + (c - longs.first[static_cast<size_t>(k)]) * kChunk;
      sum(place, std::min(kChunk, starts[u + 1] - place), sums.get() + c * columns);
    }
  });
  const int64_t bytes = (starts[rows] + rows) * row_bytes, workers = workers_for(1 + bytes / kFewBytes, 1);
  const int64_t piece = 1 + rows / pieces_for(bytes, kFewBytes, workers);
  parallel_pieces(rows, piece, workers, [&](int64_t begin, int64_t end, int64_t) {
    auto next = std::lower_bound(longs.rows.begin(), longs.rows.end(), begin) - longs.rows.begin();
    for (int64_t u = begin; u < end; ++u) {
      const int64_t count = starts[u + 1] - starts[u];
      if (count == 0) {
        std::fill_n(out + u * columns, columns, 0.0f);
      } else if (count <= kChunk) {
        sum(starts[u], count, out + u * columns);
      } else {
        const int64_t first = longs.first[static_cast<size_t>(next)];
        const int64_t last = longs.first[static_cast<size_t>(++next)];
        sum_sums(sums.get() + first * columns, last - first, columns, out + u * columns);
      }
    }
  });
}

Tensor expand_backward_cpu(const Tensor& grad_in, const Tensor& inverse_in, int64_t rows) {
  check_expand_backward(grad_in, inverse_in, rows);
  const Tensor grad = as_contiguous(grad_in), inverse = as_contiguous(inverse_in);
  const int64_t count = inverse.size(0), columns = grad.size(1);
  check_numbers(inverse, rows, "inverse", "the rows");
  Tensor out = new_tensor(grad, {rows, columns}, ScalarType::Float);
  if (rows == 0 || columns == 0) return out;
  const Integers numbers(inverse);
  const Occurrences sorted = numbers.wide ? sort_by_row(static_cast<const int64_t*>(numbers.data), count, rows)
                                          : sort_by_row(static_cast<const int32_t*>(numbers.data), count, rows);
  sum_occurrences(grad.const_data_ptr<float>(), sorted, rows, columns, out.mutable_data_ptr<float>());
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(RK_LIBRARY, CPU, m) {
  m.impl("expand", TORCH_BOX(&expand_cpu));
  m.impl("expand_backward", TORCH_BOX(&expand_backward_cpu));
}

}  // namespace rec_kernels
