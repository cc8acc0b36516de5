// The machine's limit of a training step with row-wise Adagrad: ids are sorted by row, every occurrence's gradient is
// read in row order, every distinct row and its state are read and written once. Nothing is checked, and the order of a
// sum is the compiler's. Also of a step of tables of quotients and remainders, whose lookup multiplies two rows.
// bench_embedding_bag and bench_compression compare with it; bench/limits.py compiles this for this machine.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "limit_rows.h"

namespace {

constexpr int64_t kAhead = 24;  // entries between a prefetch and its use

int bits_of(int64_t numbers) {
  int bits = 0;
  while (bits < 40 && (int64_t{1} << bits) < numbers) ++bits;
  return bits;
}

// Passes of a radix sort: as few as digits of 11 bits allow, or 8 bits where clearing more counters costs more.
struct Digits {
  int passes, width;
};

Digits digits_of(int64_t count, int bits) {
  const int most = count < 1024 ? 8 : 11;
  const int passes = std::max(1, (bits + most - 1) / most);
  return {passes, (bits + passes - 1) / passes};
}

// Sorts entries row << 32 | bag by row, stably; returns the buffer, of two, in which they end up.
uint64_t* sort_rows(uint64_t* from, uint64_t* to, int64_t count, int row_bits, std::vector<uint32_t>* counters) {
  const Digits digits = digits_of(count, row_bits);
  const uint64_t mask = (uint64_t{1} << digits.width) - 1;
  counters->assign(static_cast<size_t>(digits.passes) << digits.width, 0);
  for (int64_t i = 0; i < count; ++i)
    for (int p = 0; p < digits.passes; ++p)
      ++(*counters)[(static_cast<size_t>(p) << digits.width) + (from[i] >> (32 + p * digits.width) & mask)];
  for (int p = 0; p < digits.passes; ++p) {
    uint32_t* at = counters->data() + (static_cast<size_t>(p) << digits.width);
    uint32_t before = 0;
    bool sorted = false;
    for (uint64_t d = 0; d <= mask; ++d) {
      const uint32_t own = at[d];
      sorted = sorted || own == count;
      at[d] = before;
      before += own;
    }
    if (sorted) continue;
    for (int64_t i = 0; i < count; ++i) to[at[from[i] >> (32 + p * digits.width) & mask]++] = from[i];
    std::swap(from, to);
  }
  return from;
}

template <int N>
void update_row(float* weights, float* state, int64_t row, const Line* sum, float lr, float eps) {
  Line squares = {};
  for (int v = 0; v < N; ++v) squares += sum[v] * sum[v];
  float total = 0;
  for (int c = 0; c < 16; ++c) total += squares[c];
  const float moment = state[row] += total / static_cast<float>(N * 16);
  const float factor = lr / (std::sqrt(moment) + eps);
  float* w = weights + row * N * 16;
  for (int v = 0; v < N; ++v) *reinterpret_cast<Line*>(w + v * 16) -= factor * sum[v];
}

template <int N>
void step_rows(float* weights, float* state, const uint64_t* entries, int64_t count, const float* grad, int64_t stride,
               float lr, float eps) {
  constexpr int64_t dim = N * 16;
  for (int64_t i = 0; i < count;) {
    const uint64_t row = entries[i] >> 32;
    Line sum[N] = {};
    for (; i < count && entries[i] >> 32 == row; ++i) {
      const int64_t ahead = std::min(i + kAhead, count - 1);
      const float* next = grad + static_cast<int64_t>(entries[ahead] & 0xffffffff) * stride;
      float* next_row = weights + static_cast<int64_t>(entries[ahead] >> 32) * dim;
      for (int v = 0; v < N; ++v) __builtin_prefetch(next + v * 16);
      for (int v = 0; v < N; ++v) __builtin_prefetch(next_row + v * 16, 1);
      __builtin_prefetch(state + (entries[ahead] >> 32), 1);
      const float* own = grad + static_cast<int64_t>(entries[i] & 0xffffffff) * stride;
      for (int v = 0; v < N; ++v) sum[v] += *reinterpret_cast<const Line*>(own + v * 16);
    }
    update_row<N>(weights, state, static_cast<int64_t>(row), sum, lr, eps);
  }
}

// A table of quotients and remainders: `rows` rows of ids modulo `rows`, and behind them `few` rows of their quotients.
struct Pair {
  float *weights, *state;
  int64_t rows, few, stride;  // of a bag's columns of all tables
};

template <int N>
void multiply_rows(const Pair& p, const int64_t* ids, int64_t batch, int64_t bag, float* out) {
  constexpr int64_t dim = N * 16;
  const auto rows = static_cast<uint32_t>(p.rows);
  for (int64_t b = 0; b < batch; ++b) {
    Line sum[N] = {};
    for (int64_t i = b * bag; i < (b + 1) * bag; ++i) {
      const auto id = static_cast<uint32_t>(ids[i]),
                 ahead = static_cast<uint32_t>(ids[std::min(i + kAhead, batch * bag - 1)]);
      for (int v = 0; v < N; ++v) __builtin_prefetch(p.weights + ahead % rows * dim + v * 16);
      const float *w = p.weights + id % rows * dim, *f = p.weights + (rows + id / rows) * dim;
      for (int v = 0; v < N; ++v)
        sum[v] += *reinterpret_cast<const Line*>(w + v * 16) * *reinterpret_cast<const Line*>(f + v * 16);
    }
    for (int v = 0; v < N; ++v) *reinterpret_cast<Line*>(out + b * p.stride + v * 16) = sum[v];
  }
}

// Entries are row << 32 | bag * few + quotient. Each gradient is read once, for the sums of both of its rows.
template <int N>
void step_pairs(const Pair& p, const uint64_t* entries, int64_t count, const float* grad, float lr, float eps) {
  constexpr int64_t dim = N * 16;
  const auto few = static_cast<uint32_t>(p.few);
  std::vector<float> sums(static_cast<size_t>(p.few * dim));
  for (int64_t i = 0; i < count;) {
    const auto row = static_cast<int64_t>(entries[i] >> 32);
    const float* w = p.weights + row * dim;
    Line sum[N] = {};
    for (; i < count && static_cast<int64_t>(entries[i] >> 32) == row; ++i) {
      const uint64_t ahead = entries[std::min(i + kAhead, count - 1)];
      const float* next = grad + static_cast<uint32_t>(ahead) / few * p.stride;
      for (int v = 0; v < N; ++v) __builtin_prefetch(next + v * 16);
      for (int v = 0; v < N; ++v) __builtin_prefetch(p.weights + (ahead >> 32) * dim + v * 16, 1);
      __builtin_prefetch(p.state + (ahead >> 32), 1);
      const uint32_t bag = static_cast<uint32_t>(entries[i]) / few, quotient = static_cast<uint32_t>(entries[i]) % few;
      const float *own = grad + bag * p.stride, *factor = p.weights + (p.rows + quotient) * dim;
      Line* other = reinterpret_cast<Line*>(sums.data() + quotient * dim);
      for (int v = 0; v < N; ++v) {
        const Line g = *reinterpret_cast<const Line*>(own + v * 16);
        sum[v] += g * *reinterpret_cast<const Line*>(factor + v * 16);
        other[v] += g * *reinterpret_cast<const Line*>(w + v * 16);
      }
    }
    update_row<N>(p.weights, p.state, row, sum, lr, eps);
  }
  for (int64_t q = 0; q < p.few; ++q) {
    const Line* sum = reinterpret_cast<const Line*>(sums.data() + q * dim);
    update_row<N>(p.weights, p.state, p.rows + q, sum, lr, eps);
  }
}

}  // namespace

// One step of `tables` tables. ids: `batch` bags of bags[t] ids for each table, one after the other; first_rows
// [tables + 1]: where tables begin among the rows of weights [rows, dim] and state [rows]; grad [batch, tables * dim];
// two buffers of as many entries as there are ids, one behind the other. Returns 0 for a `dim` that
// with_lines lacks.
extern "C" int step_rowwise_adagrad(float* weights, float* state, const int64_t* ids, const int64_t* first_rows,
                                    const int64_t* bags, int64_t tables, int64_t batch, int64_t dim, const float* grad,
                                    uint64_t* entries, float lr, float eps) {
  decltype(&step_rows<1>) step = nullptr;
  if (!with_lines(dim, [&](auto lines) { step = step_rows<lines>; })) return 0;
  std::vector<int64_t> first_ids(static_cast<size_t>(tables) + 1);
  for (int64_t t = 0; t < tables; ++t)
    first_ids[static_cast<size_t>(t) + 1] = first_ids[static_cast<size_t>(t)] + batch * bags[t];
  uint64_t* other = entries + first_ids.back();
#pragma omp parallel
  {
    std::vector<uint32_t> counters;
#pragma omp for schedule(dynamic)
    for (int64_t t = 0; t < tables; ++t) {
      const int64_t first = first_ids[static_cast<size_t>(t)], count = batch * bags[t];
      for (int64_t b = 0, i = first; b < batch; ++b)
        for (int64_t l = 0; l < bags[t]; ++l, ++i)
          entries[i] = static_cast<uint64_t>(ids[i]) << 32 | static_cast<uint64_t>(b);
      const int row_bits = bits_of(first_rows[t + 1] - first_rows[t]);
      const uint64_t* sorted = sort_rows(entries + first, other + first, count, row_bits, &counters);
      step(weights + first_rows[t] * dim, state + first_rows[t], sorted, count, grad + t * dim, tables * dim, lr, eps);
    }
  }
  return 1;
}

// Lookup and, with `grad`, step of `tables` tables of quotients and remainders, each of rows + few rows behind the one
// before; the other arguments are those of step_rowwise_adagrad. out [batch, tables * dim] gets the lookup. `batch`
// times `few` is below 2^32, as are ids. Returns 0 for a `dim` that with_lines lacks.
extern "C" int step_quotient_remainder(float* weights, float* state, const int64_t* ids, const float* grad, float* out,
                                       uint64_t* entries, const int64_t* sizes, float lr, float eps) {
  const int64_t tables = sizes[0], batch = sizes[1], bag = sizes[2], dim = sizes[3], rows = sizes[4], few = sizes[5];
  decltype(&multiply_rows<1>) look_up = nullptr;
  decltype(&step_pairs<1>) step = nullptr;
  if (!with_lines(dim, [&](auto lines) { look_up = multiply_rows<lines>, step = step_pairs<lines>; })) return 0;
  const int64_t count = batch * bag;
#pragma omp parallel
  {
    std::vector<uint32_t> counters;
    const auto pair_of = [&](int64_t t) {
      return Pair{weights + t * (rows + few) * dim, state + t * (rows + few), rows, few, tables * dim};
    };
#pragma omp for schedule(dynamic)
    for (int64_t t = 0; t < tables; ++t) look_up(pair_of(t), ids + t * count, batch, bag, out + t * dim);
#pragma omp for schedule(dynamic)
    for (int64_t t = 0; t < (grad ? tables : 0); ++t) {
      uint64_t *own = entries + t * count, *other = entries + (tables + t) * count;
      for (int64_t i = 0; i < count; ++i) {
        const auto id = static_cast<uint32_t>(ids[t * count + i]), m = static_cast<uint32_t>(rows);
        own[i] = uint64_t{id % m} << 32 | static_cast<uint64_t>(i / bag * few + id / m);
      }
      const uint64_t* sorted = sort_rows(own, other, count, bits_of(rows), &counters);
      step(pair_of(t), sorted, count, grad + t * dim, lr, eps);
    }
  }
  return 1;
}
