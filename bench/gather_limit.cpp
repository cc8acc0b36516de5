// The machine's limits: rows are gathered and added up, unchecked, in any order of threads; numbers are multiplied.
// bench_embedding_bag and bench_grouped_projection compare with them; bench/limits.py compiles this for the machine it
// runs on.
#include "limit_rows.h"

namespace {

constexpr int64_t kAhead = 16, kLinesAhead = 128;

// Where a lookup's columns go: bag b of table t to `data` + t * table + b * row, in floats.
struct Columns {
  float* data;
  int64_t tables, batch, table, row;
};

template <int N>
void gather_lines(const float* weights, const int64_t* rows, int64_t bag, const Columns& out) {
  constexpr int64_t dim = N * 16;
  const int64_t last = out.tables * out.batch * bag;
#pragma omp parallel for collapse(2) schedule(static)
  for (int64_t t = 0; t < out.tables; ++t)
    for (int64_t b = 0; b < out.batch; ++b) {
      const int64_t first = (t * out.batch + b) * bag;
      Line sum[N] = {};
      for (int64_t i = first; i < first + bag; ++i) {
        if (i + kAhead < last)
          for (int v = 0; v < N; ++v) __builtin_prefetch(weights + rows[i + kAhead] * dim + v * 16);
        for (int v = 0; v < N; ++v) sum[v] += *reinterpret_cast<const Line*>(weights + rows[i] * dim + v * 16);
      }
      float* columns = out.data + t * out.table + b * out.row;
      for (int v = 0; v < N; ++v) *reinterpret_cast<Line*>(columns + v * 16) = sum[v];
    }
}

// The cache lines that hold `bytes` bytes at p.
struct Lines {
  const char *begin, *end;
};

Lines lines_of(const char* p, int64_t bytes) {
  return {reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(p) & ~uintptr_t{63}), p + bytes};
}

}  // namespace

// A word of every cache line of the rows, and `dim` floats written for each bag: what rows of any format must fetch.
// `sizes` and `out` as gather_sum has them.
extern "C" void touch_rows(const char* weights, const int64_t* rows, int64_t bag, int64_t row_bytes, int64_t dim,
                           float* out, const int64_t* sizes) {
  const Columns to{out, sizes[0], sizes[1], sizes[2], sizes[3]};
  const int64_t last = to.tables * to.batch * bag, ahead = kLinesAhead / ((row_bytes + 63) / 64);
#pragma omp parallel for collapse(2) schedule(static)
  for (int64_t t = 0; t < to.tables; ++t)
    for (int64_t b = 0; b < to.batch; ++b) {
      const int64_t first = (t * to.batch + b) * bag;
      int64_t sum = 0;
      for (int64_t i = first; i < first + bag; ++i) {
        if (i + ahead < last) {
          const Lines next = lines_of(weights + rows[i + ahead] * row_bytes, row_bytes);
          for (const char* p = next.begin; p < next.end; p += 64) __builtin_prefetch(p);
        }
        const Lines own = lines_of(weights + rows[i] * row_bytes, row_bytes);
        for (const char* p = own.begin; p < own.end; p += 64) sum += *reinterpret_cast<const int64_t*>(p);
      }
      float* columns = to.data + t * to.table + b * to.row;
      for (int64_t c = 0; c < dim; ++c) columns[c] = static_cast<float>(sum);
    }
}

// A byte of every cache line of the rows read and written back as it was.
extern "C" void rewrite_rows(char* weights, const int64_t* rows, int64_t n, int64_t row_bytes) {
  const int64_t ahead = kLinesAhead / 2 / ((row_bytes + 63) / 64);
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < n; ++i) {
    if (i + ahead < n) {
      const Lines next = lines_of(weights + rows[i + ahead] * row_bytes, row_bytes);
      for (const char* p = next.begin; p < next.end; p += 64) __builtin_prefetch(p);
    }
    const char* row = weights + rows[i] * row_bytes;
    const Lines own = lines_of(row, row_bytes);
    for (const char* p = own.begin; p < own.end; p += 64) {
      auto* byte = const_cast<volatile char*>(p < row ? row : p);
      *byte = *byte;
    }
  }
}

// Sums of `bag` rows; returns 0 for a width that with_lines lacks. `sizes`: tables, bags of each, and floats of
// `out` between tables and between bags.
extern "C" int gather_sum(const float* weights, const int64_t* rows, int64_t bag, int64_t dim, float* out,
                          const int64_t* sizes) {
  const Columns to{out, sizes[0], sizes[1], sizes[2], sizes[3]};
  return with_lines(dim, [&](auto lines) { gather_lines<lines>(weights, rows, bag, to); });
}

// Rows read, changed and written back: the least that any update of touched rows must do.
extern "C" void update_rows(float* weights, const int64_t* rows, int64_t n, int64_t dim, float by) {
  constexpr int64_t kAhead = 8;
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n)
      for (int64_t c = 0; c < dim; c += 16) __builtin_prefetch(weights + rows[i + kAhead] * dim + c);
    float* row = weights + rows[i] * dim;
#pragma omp simd
    for (int64_t c = 0; c < dim; ++c) row[c] += by;
  }
}

// `count` multiplications and additions of numbers in registers, as many at once as it takes to keep the units busy.
extern "C" float multiply_add(int64_t count) {
  constexpr int64_t kLanes = 16, kChains = 16;
  float total = 0;
#pragma omp parallel for schedule(static) reduction(+ : total)
  for (int64_t block = 0; block < 64; ++block) {
    Line sum[kChains] = {}, factor = Line{} + 1.0f / static_cast<float>(block + 2);
    for (int64_t i = 0; i < count / (64 * kLanes * kChains); ++i) {
      for (int64_t c = 0; c < kChains; ++c) sum[c] = sum[c] * factor + factor;
    }
    for (int64_t c = 0; c < kChains; ++c) total += sum[c][c];
  }
  return total;
}
