// Parallel loops on torch's CPU threads, which respect torch.set_num_threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>

#include "core/stable.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace rec_kernels {

// Disables flushing of denormals for a scope. torch.set_flush_denormal only affects the calling thread, so results
// would otherwise depend on the thread that computes them.
class KeepDenormals {
 public:
#if defined(__SSE2__)
  KeepDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ & ~0x8040u); }
  ~KeepDenormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  KeepDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" ::"r"(saved_ & ~(uint64_t{1} << 24)));
  }
  ~KeepDenormals() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }

 private:
  uint64_t saved_;
#else
  KeepDenormals() {}
#endif
 public:
  KeepDenormals(const KeepDenormals&) = delete;
  KeepDenormals& operator=(const KeepDenormals&) = delete;
};

// Calls body(worker) once for each of `workers` workers, in parallel if threads are available. Rethrows the first
// exception once all are done; torch would replace it by an error of its own.
template <class Body>
void parallel_workers(int64_t workers, const Body& body) {
  if (workers <= 1) {
    KeepDenormals guard;
    body(int64_t{0});
    return;
  }
  std::exception_ptr thrown;
  std::atomic_flag has_thrown = ATOMIC_FLAG_INIT;
  torch::stable::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
    KeepDenormals guard;
    try {
      for (int64_t w = begin; w < end; ++w) body(w);
    } catch (...) {
      if (!has_thrown.test_and_set()) thrown = std::current_exception();
    }
  });
  if (thrown) std::rethrow_exception(thrown);
}

// Minimum items of a few nanoseconds each, and minimum bytes to copy, per thread.
constexpr int64_t kFewItems = 8192, kFewBytes = 1 << 17;

// Number of workers for `items` if each should have at least `grain` of them.
inline int64_t workers_for(int64_t items, int64_t grain) {
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t useful = items / grain;
  return useful < 1 ? 1 : (useful < threads ? useful : threads);
}

// Number of pieces for work of `cost`, each of at least `least`. Few, since every piece starts without prefetched data,
// but more than one per worker, for load balance.
inline int64_t pieces_for(int64_t cost, int64_t least, int64_t workers) {
  constexpr int64_t kPiecesPerWorker = 16;
  const int64_t pieces = 1 + cost / least;
  return pieces < kPiecesPerWorker * workers ? pieces : kPiecesPerWorker * workers;
}

// Calls body(begin, end, worker) over [0, items) in pieces of `piece` with dynamic scheduling, for pieces of unequal
// cost (long bags, cold rows). Results must not depend on the assignment of pieces to workers.
template <class Body>
void parallel_pieces(int64_t items, int64_t piece, int64_t workers, const Body& body) {
  std::atomic<int64_t> next{0};
  parallel_workers(workers, [&](int64_t worker) {
    for (;;) {
      const int64_t begin = next.fetch_add(piece, std::memory_order_relaxed);
      if (begin >= items) return;
      body(begin, begin + piece < items ? begin + piece : items, worker);
    }
  });
}

// Calls body(begin, end, worker) once per worker over an equal, static share of [0, items), so that a core finds data
// of earlier calls in its caches. For items of equal cost. No call without items.
template <class Body>
void parallel_shares(int64_t items, int64_t workers, const Body& body) {
  if (items == 0) return;
  const int64_t each = items / workers, more = items % workers;  // the first `more` workers have an item more
  parallel_workers(workers, [&](int64_t worker) {
    const int64_t begin = each * worker + (worker < more ? worker : more);
    body(begin, begin + each + (worker < more ? 1 : 0), worker);
  });
}

}  // namespace rec_kernels
