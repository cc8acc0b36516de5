// Work on torch's own CPU threads (torch.set_num_threads is obeyed).
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>

#include "core/stable.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace rec_kernels {

// Denormals count as what they are while this lives: torch.set_flush_denormal sets the calling thread only, so a
// result would otherwise depend on which thread computed it.
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

// body(worker) once for each of `workers` workers, at the same time where threads allow. What one of them throws, the
// first of all, is thrown once all are done: torch would say that some call of its own has failed.
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

// Items that are worth a thread's start, of a few nanoseconds each, and bytes to copy.
constexpr int64_t kFewItems = 8192, kFewBytes = 1 << 17;

// Number of workers for `items` if each should have at least `grain` of them.
inline int64_t workers_for(int64_t items, int64_t grain) {
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t useful = items / grain;
  return useful < 1 ? 1 : (useful < threads ? useful : threads);
}

// Number of pieces for work of `cost`, each of at least `least`. Few, because a piece starts with nothing prefetched;
// more than one per worker, so that a slow one does not keep the others waiting.
inline int64_t pieces_for(int64_t cost, int64_t least, int64_t workers) {
  constexpr int64_t kPiecesPerWorker = 16;
  const int64_t pieces = 1 + cost / least;
  return pieces < kPiecesPerWorker * workers ? pieces : kPiecesPerWorker * workers;
}

// body(begin, end, worker) over [0, items) in pieces of `piece`, handed out as workers come free: pieces cost unequal
// time (long bags, cold rows). What is computed must not depend on who computes it.
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

// body(begin, end, worker) once for each worker over an equal share of [0, items), the same in every call: a core finds
// in its caches what it wrote there before. Not at all if there are no items. For items that cost the same.
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
