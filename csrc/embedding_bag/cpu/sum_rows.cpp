#include "embedding_bag/cpu/sum_rows.h"

#include <algorithm>
#include <atomic>
#include <numeric>
#include <vector>

#include "core/cpu/parallel.h"
#include "embedding_bag/cpu/backward.h"
#include "embedding_bag/cpu/numbered_rows.h"

namespace rec_kernels {
namespace {

// Indices per worker: every worker reads all indices, and misses the cache for those of its own rows.
constexpr int64_t kIndicesPerWorker = 1 << 15;

template <class Integer>
bool is_sorted(const Integer* indices, int64_t count, int64_t workers) {
  std::atomic<bool> sorted{true};
  parallel_workers(workers, [&](int64_t w) {
    bool own_sorted = true;
    for (int64_t i = std::max<int64_t>(count * w / workers, 1), end = count * (w + 1) / workers; i < end; ++i)
      own_sorted &= indices[i] >= indices[i - 1];
    if (!own_sorted) sorted.store(false, std::memory_order_relaxed);
  });
  return sorted.load(std::memory_order_relaxed);
}

// Finds the start of each row's run in sorted indices.
template <class Integer>
void starts_of_runs(const Integer* indices, int64_t count, int64_t rows, int64_t workers, int64_t* starts) {
  parallel_workers(workers, [&](int64_t w) {
    const int64_t begin = count * w / workers, end = count * (w + 1) / workers;
    for (int64_t i = begin; i < end; ++i)
      for (int64_t u = i == 0 ? 0 : int64_t{indices[i - 1]} + 1; u <= int64_t{indices[i]}; ++u) starts[u] = i;
  });
  std::fill(starts + (count == 0 ? 0 : int64_t{indices[count - 1]} + 1), starts + rows + 1, count);
}

// Stable counting sort, skipped for sorted indices, as in a clustered batch. Each worker owns a range of rows.
template <class Integer>
RowOrder sort_by_row(const Integer* indices, int64_t count, int64_t rows, int64_t workers) {
  RowOrder out{Scratch<int64_t>(rows + 2), {}};
  int64_t* starts = out.starts.get();
  if (is_sorted(indices, count, workers)) {
    starts_of_runs(indices, count, rows, workers, starts);
    return out;
  }
  out.order = Scratch<int64_t>(count);
  std::vector<int64_t> first_positions(static_cast<size_t>(workers) + 1);  // output position of each worker's range
  const auto first_row = [&](int64_t w) { return rows * w / workers; };
  parallel_workers(workers, [&](int64_t w) {
    const int64_t first = first_row(w), end = first_row(w + 1);
    int64_t own = 0;
    std::fill(starts + first + 2, starts + end + 2, int64_t{0});
    for (int64_t i = 0; i < count; ++i) {
      if (indices[i] < first || indices[i] >= end) continue;
      ++starts[int64_t{indices[i]} + 2];
      ++own;
    }
    first_positions[static_cast<size_t>(w) + 1] = own;
  });
  std::partial_sum(first_positions.begin(), first_positions.end(), first_positions.begin());
  starts[0] = 0;
  // starts[u + 1] is the insertion position of the next index u, and finally the start of row u + 1. starts[u + 2] held
  // the count of u.
  parallel_workers(workers, [&](int64_t w) {
    const int64_t first = first_row(w), end = first_row(w + 1);
    starts[first + 1] = first_positions[static_cast<size_t>(w)];
    for (int64_t u = first + 1; u < end; ++u) starts[u + 1] += starts[u];
    for (int64_t i = 0; i < count; ++i)
      if (indices[i] >= first && indices[i] < end) out.order[starts[int64_t{indices[i]} + 1]++] = i;
  });
  return out;
}

// Rows of more than one chunk, and their chunks in one sequence: those of rows[k] start at first[k].
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

}  // namespace

RowOrder order_by_row(const Integers& indices, int64_t count, int64_t rows, int64_t max_workers) {
  const int64_t workers = std::min({workers_for(count, kIndicesPerWorker), std::max<int64_t>(rows, 1), max_workers});
  return indices.wide ? sort_by_row(static_cast<const int64_t*>(indices.data), count, rows, workers)
                      : sort_by_row(static_cast<const int32_t*>(indices.data), count, rows, workers);
}

void sum_chunks(float* sums, int64_t count, int64_t columns, int64_t stride, float* out) {
  const auto sum = kernels<NumberedRowsKernels>().sum_rows;
  for (; count > kChunk; count = ceil_div(count, kChunk))
    for (int64_t i = 0; i < count; i += kChunk)
      sum(sums + i * stride, nullptr, std::min(kChunk, count - i), columns, stride, sums + i / kChunk * stride);
  sum(sums, nullptr, count, columns, stride, out);
}

void sum_rows(const float* grad, int64_t grad_stride, const RowOrder& sorted, int64_t rows, int64_t columns, float* out,
              int64_t out_stride) {
  const int64_t* starts = sorted.starts.get();
  const LongRows longs = long_rows(starts, rows);
  const auto kernel = kernels<NumberedRowsKernels>().sum_rows;
  const auto sum = [&](int64_t position, int64_t count, float* to) {
    const int64_t* order = sorted.from(position);
    kernel(order ? grad : grad + position * grad_stride, order, count, columns, grad_stride, to);
  };
  const int64_t chunks = longs.first.back(), row_bytes = 4 * columns;
  Scratch<float> sums(chunks * columns);
  const int64_t few = 1 + kFewBytes / (kChunk * row_bytes);
  parallel_pieces(chunks, few, workers_for(chunks, few), [&](int64_t begin, int64_t end, int64_t) {
    for (int64_t c = begin; c < end; ++c) {
      const int64_t k = longs.row_of(c), u = longs.rows[static_cast<size_t>(k)];
      const int64_t position = starts[u] + (c - longs.first[static_cast<size_t>(k)]) * kChunk;
      sum(position, std::min(kChunk, starts[u + 1] - position), sums.get() + c * columns);
    }
  });
  const int64_t bytes = (starts[rows] + rows) * row_bytes, workers = workers_for(1 + bytes / kFewBytes, 1);
  const int64_t piece = 1 + rows / pieces_for(bytes, kFewBytes, workers);
  parallel_pieces(rows, piece, workers, [&](int64_t begin, int64_t end, int64_t) {
    auto next = std::lower_bound(longs.rows.begin(), longs.rows.end(), begin) - longs.rows.begin();
    for (int64_t u = begin; u < end; ++u) {
      float* to = out + u * out_stride;
      const int64_t count = starts[u + 1] - starts[u];
      if (count == 0) {
        std::fill_n(to, columns, 0.0f);
      } else if (count <= kChunk) {
        sum(starts[u], count, to);
      } else {
        const int64_t first = longs.first[static_cast<size_t>(next)];
        const int64_t last = longs.first[static_cast<size_t>(++next)];
        sum_chunks(sums.get() + first * columns, last - first, columns, columns, to);
      }
    }
  });
}

}  // namespace rec_kernels
