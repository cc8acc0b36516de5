// What the machine can do at best: rows gathered and added up, nothing checked, any order of threads. The yardstick of
// bench_embedding_bag; built by bench/limits.py for the machine it runs on.
#include <cstdint>

namespace {

typedef float Line __attribute__((vector_size(64), aligned(4)));
constexpr int64_t kAhead = 16;

template <int N>
void gather_lines(const float* weights, const int64_t* rows, int64_t bags, int64_t bag, float* out) {
  constexpr int64_t dim = N * 16;
  const int64_t last = bags * bag;
#pragma omp parallel for schedule(static)
  for (int64_t b = 0; b < bags; ++b) {
    Line sum[N] = {};
    for (int64_t i = b * bag; i < (b + 1) * bag; ++i) {
      if (i + kAhead < last)
        for (int v = 0; v < N; ++v) __builtin_prefetch(weights + rows[i + kAhead] * dim + v * 16);
      for (int v = 0; v < N; ++v) sum[v] += *reinterpret_cast<const Line*>(weights + rows[i] * dim + v * 16);
    }
    for (int v = 0; v < N; ++v) *reinterpret_cast<Line*>(out + b * dim + v * 16) = sum[v];
  }
}

}  // namespace

// Rows of 16, 64 or 128 floats; returns 0 for another width.
extern "C" int gather_sum(const float* weights, const int64_t* rows, int64_t bags, int64_t bag, int64_t dim,
                          float* out) {
  if (dim == 16) gather_lines<1>(weights, rows, bags, bag, out);
  else if (dim == 64) gather_lines<4>(weights, rows, bags, bag, out);
  else if (dim == 128) gather_lines<8>(weights, rows, bags, bag, out);
  else return 0;
  return 1;
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
