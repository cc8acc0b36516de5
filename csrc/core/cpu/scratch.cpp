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
constexpr bool kKeeps = false;  // a block that is larger than what was asked for hides what lies behind its end
#else
constexpr bool kKeeps = true;
#endif

// Blocks that nobody uses, the one that was used last behind. Nobody waits for the lock: a process that was forked
// while another thread held it does without the pool.
class Pool {
 public:
  Pool() { blocks_.reserve(kMostBlocks); }

  // The smallest block that is large enough and not far too large; or none.
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

  // Keeps the block, for which those have to go that were not used for longest; or false. Allocates nothing.
  bool keep(ScratchBlock block) {
    const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock() || block.size > kMostScratchKept) return false;
    auto first = blocks_.begin();
    for (; kept_ + block.size > kMostScratchKept || blocks_.end() - first == kMostBlocks; ++first) {
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

// Never destroyed: threads may outlive what the process destroys at its end.
Pool& pool() {
  static Pool& one = *new Pool;
  return one;
}

// Python's MemoryError, which says how much was asked for.
class NoScratch : public std::bad_alloc {
 public:
  explicit NoScratch(size_t bytes) {
    std::snprintf(text_, sizeof(text_), "cannot allocate %zu bytes of scratch memory", bytes);
  }
  const char* what() const noexcept override { return text_; }

 private:
  char text_[64];
};

}  // namespace

ScratchBlock take_scratch(size_t bytes) {
  const bool huge = kKeeps && bytes >= kHugePage;
  const size_t unit = huge ? kHugePage : kLine, size = std::max(round_up(bytes, unit), unit);
  if (!kKeeps) return {::operator new(bytes), bytes};
  ScratchBlock block = pool().take(size);
  if (block.memory) return block;
  block = {std::aligned_alloc(unit, size), size};
  if (!block.memory) throw NoScratch(size);
#if defined(MADV_HUGEPAGE)
  if (huge) madvise(block.memory, size, MADV_HUGEPAGE);  // advice: nothing is lost where it is not taken
#endif
  return block;
}

void give_scratch_back(ScratchBlock block) {
  if (!kKeeps) ::operator delete(block.memory);
  else if (!pool().keep(block)) std::free(block.memory);
}

}  // namespace rec_kernels
