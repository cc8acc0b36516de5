// The machine's limit of a training step with row-wise Adagrad: ids are sorted by row, every occurrence's gradient is
// read in row order, every distinct row and its state are read and written once. Nothing is checked, and the order of a
// sum is the compiler's. bench_embedding_bag compares with it; bench/limits.py compiles this for this machine.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace {

typedef float Line __attribute__((vector_size(64), aligned(4)));
constexpr int64_t kAhead = 16;  // entries between a prefetch and its use

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
    Line squares = {};
    for (int v = 0; v < N; ++v) squares += sum[v] * sum[v];
    float total = 0;
    for (int c = 0; c < 16; ++c) total += squares[c];
    const float moment = state[row] += total / static_cast<float>(dim);
    const float factor = lr / (std::sqrt(moment) + eps);
    float* w = weights + static_cast<int64_t>(row) * dim;
    for (int v = 0; v < N; ++v) *reinterpret_cast<Line*>(w + v * 16) -= factor * sum[v];
  }
}

}  // namespace

// One step of `tables` tables. ids: `batch` bags of bags[t] ids for each table, one after the other; first_rows
// [tables + 1]: where tables begin among the rows of weights [rows, dim] and state [rows]; grad [batch, tables * dim];
// two buffers of as many entries as there are ids, one behind the other. Returns 0 for a `dim` that is not 16, 64 or
// 128.
extern "C" int step_rowwise_adagrad(float* weights, float* state, const int64_t* ids, const int64_t* first_rows,
                                    const int64_t* bags, int64_t tables, int64_t batch, int64_t dim, const float* grad,
                                    uint64_t* entries, float lr, float eps) {
  const auto step = dim == 16 ? step_rows<1> : dim == 64 ? step_rows<4> : dim == 128 ? step_rows<8> : nullptr;
  if (step == nullptr) return 0;
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
