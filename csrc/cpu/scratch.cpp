#include "cpu/scratch.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>

namespace rec_kernels {
namespace {

constexpr size_t kLine = 64, kHugePage = size_t{2} << 20;

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// Blocks that nobody uses, the one that was used last behind.
class Pool {
 public:
  // The smallest block that is large enough and not far too large; or none.
  ScratchBlock take(size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto best = blocks_.end();
    for (auto b = blocks_.begin(); b != blocks_.end(); ++b)
      if (b->size >= bytes && b->size / 4 <= bytes && (best == blocks_.end() || b->size <= best->size)) best = b;
    if (best == blocks_.end()) return {};
    const ScratchBlock block = *best;
    blocks_.erase(best);
    kept_ -= block.size;
    return block;
  }

  // Keeps the block, and returns those that have to go for it, the longest unused first.
  std::vector<ScratchBlock> keep(ScratchBlock block) {
    const std::lock_guard<std::mutex> lock(mutex_);
    blocks_.push_back(block);
    kept_ += block.size;
    auto first = blocks_.begin();
    for (; kept_ > kMostScratchKept; ++first) kept_ -= first->size;
    std::vector<ScratchBlock> gone(blocks_.begin(), first);
    blocks_.erase(blocks_.begin(), first);
    return gone;
  }

 private:
  std::mutex mutex_;
  std::vector<ScratchBlock> blocks_;
  size_t kept_ = 0;
};

// Never destroyed: threads may outlive what the process destroys at its end.
Pool& pool() {
  static Pool& one = *new Pool;
  return one;
}

}  // namespace

ScratchBlock take_scratch(size_t bytes) {
  const bool huge = bytes >= kHugePage;
  const size_t unit = huge ? kHugePage : kLine, size = std::max(round_up(bytes, unit), unit);
  ScratchBlock block = pool().take(size);
  if (block.memory) return block;
  block = {std::aligned_alloc(unit, size), size};
  if (!block.memory) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
  if (huge) madvise(block.memory, size, MADV_HUGEPAGE);  // advice: nothing is lost where it is not taken
#endif
  return block;
}

void give_scratch_back(ScratchBlock block) {
  for (const ScratchBlock& gone : pool().keep(block)) std::free(gone.memory);
}

}  // namespace rec_kernels
