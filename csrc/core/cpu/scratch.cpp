#include "core/cpu/scratch.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>

namespace rec_kernels {
namespace {

constexpr size_t kLine = 64, kHugePage = size_t{2} << 20;

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

#if defined(__SANITIZE_ADDRESS__)
constexpr bool kUsePool = false;  // no reuse: a larger block would hide out-of-bounds accesses from the sanitizer
#else
constexpr bool kUsePool = true;
#endif

// Pool of free blocks, most recently used last. Only try_lock is used: a process forked while another thread held the
// lock works without the pool.
class Pool {
 public:
  Pool() { blocks_.reserve(kMostBlocks); }

  // The smallest block that is large enough but not far too large, or none.
  ScratchBlock take(size_t bytes) {
    const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return {};
    auto best = blocks_.end();
    for (auto b = blocks_.begin(); b != blocks_.end(); ++b)
      if (b->size >= bytes && b->size / 4 <= bytes && (best == blocks_.end() || b->size <= best->size)) best = b;
    if (best == blocks_.end()) return {};
    const ScratchBlock block = *best;
    blocks_.erase(best);
    kept_ -= block.size;
    return block;
  }

  // Adds a block to the pool, evicting the least recently used ones; returns false if it does not fit or another
  // thread has the lock. Allocates nothing.
  bool keep(ScratchBlock block) {
    const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock() || block.size > kMaxPooledScratch) return false;
    auto first = blocks_.begin();
    for (; kept_ + block.size > kMaxPooledScratch || blocks_.end() - first == kMostBlocks; ++first) {
      kept_ -= first->size;
      std::free(first->memory);
    }
    blocks_.erase(blocks_.begin(), first);
    blocks_.push_back(block);
    kept_ += block.size;
    return true;
  }

 private:
  static constexpr std::ptrdiff_t kMostBlocks = 64;
  std::mutex mutex_;
  std::vector<ScratchBlock> blocks_;
  size_t kept_ = 0;
};

// Never destroyed: threads may outlive static destruction.
Pool& pool() {
  static Pool& one = *new Pool;
  return one;
}

// MemoryError in Python, with the requested size.
class ScratchError : public std::bad_alloc {
 public:
  explicit ScratchError(size_t bytes) {
    std::snprintf(text_, sizeof(text_), "cannot allocate %zu bytes of scratch memory", bytes);
  }
  const char* what() const noexcept override { return text_; }

 private:
  char text_[64];
};

}  // namespace

ScratchBlock take_scratch(size_t bytes) {
  const bool huge = kUsePool && bytes >= kHugePage;
  const size_t unit = huge ? kHugePage : kLine, size = std::max(round_up(bytes, unit), unit);
  if (!kUsePool) return {::operator new(bytes), bytes};
  ScratchBlock block = pool().take(size);
  if (block.memory) return block;
  block = {std::aligned_alloc(unit, size), size};
  if (!block.memory) throw ScratchError(size);
#if defined(MADV_HUGEPAGE)
  if (huge) madvise(block.memory, size, MADV_HUGEPAGE);  // a hint, which may be ignored
#endif
  return block;
}

void give_scratch_back(ScratchBlock block) {
  if (!kUsePool) ::operator delete(block.memory);
  else if (!pool().keep(block)) std::free(block.memory);
}

}  // namespace rec_kernels
