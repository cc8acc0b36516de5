// What the machine can do at best: rows gathered and added up, nothing checked, any order of threads. The yardstick of
// bench_embedding_bag; built by bench/limits.py for the machine it runs on.
#include <cstdint>

extern "C" void gather_sum(const float* weights, const int64_t* rows, int64_t bags, int64_t bag, int64_t dim,
                           float* out) {
  constexpr int64_t kAhead = 16;
  const int64_t last = bags * bag;
#pragma omp parallel for schedule(static)
  for (int64_t b = 0; b < bags; ++b) {
    float* o = out + b * dim;
    for (int64_t c = 0; c < dim; ++c) o[c] = 0.0f;
    for (int64_t i = b * bag; i < (b + 1) * bag; ++i) {
      if (i + kAhead < last)
        for (int64_t c = 0; c < dim; c += 16) __builtin_prefetch(weights + rows[i + kAhead] * dim + c);
      const float* row = weights + rows[i] * dim;
#pragma omp simd
      for (int64_t c = 0; c < dim; ++c) o[c] += row[c];
    }
  }
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
