#include "host/block_table.h"

#include <algorithm>
#include <stdexcept>

namespace rec_kernels::host {

BlockTable::BlockTable(int64_t num_blocks, int64_t capacity)
    : states_(static_cast<size_t>(num_blocks)), capacity_(capacity) {
  frames_.reserve(static_cast<size_t>(capacity));
  free_.reserve(static_cast<size_t>(capacity));
}

int64_t BlockTable::bookkeeping_bytes() const {
  return static_cast<int64_t>(states_.capacity() + (frames_.capacity() + free_.capacity()) * sizeof(int64_t));
}

int64_t BlockTable::allocate_frame(int64_t block) {
  ++used_;
  if (free_.empty()) {
    frames_.push_back(block);
    return static_cast<int64_t>(frames_.size()) - 1;
  }
  const int64_t frame = free_.back();
  free_.pop_back();
  frames_[static_cast<size_t>(frame)] = block;
  return frame;
}

void BlockTable::release_frame(int64_t frame) {
  --used_;
  frames_[static_cast<size_t>(frame)] = -1;
  free_.push_back(frame);
}

std::vector<int64_t> BlockTable::choose_victims(int64_t count) {
  std::vector<int64_t> victims;
  victims.reserve(static_cast<size_t>(count));
  const auto frames = static_cast<int64_t>(frames_.size());
  // Two rounds: the first one clears the referenced bits.
  for (int64_t steps = 2 * frames; static_cast<int64_t>(victims.size()) < count; --steps) {
    if (steps < 0) throw std::logic_error("BlockTable::choose_victims: fewer evictable blocks than requested");
    hand_ = hand_ + 1 < frames ? hand_ + 1 : 0;
    const int64_t block = frames_[static_cast<size_t>(hand_)];
    if (block < 0 || has(block, kPinned | kPrefetched | kMoving | kWanted)) continue;
    const bool spared = has(block, kReferenced);
    change(block, spared ? 0 : kMoving, kReferenced);
    if (spared) continue;
    victims.push_back(block);
    release_frame(hand_);
  }
  std::sort(victims.begin(), victims.end());
  return victims;
}

std::vector<int64_t> BlockTable::dirty_blocks() const {
  std::vector<int64_t> dirty;
  dirty.reserve(static_cast<size_t>(dirty_));
  for (const int64_t block : frames_)
    if (block >= 0 && has(block, kDirty)) dirty.push_back(block);
  std::sort(dirty.begin(), dirty.end());
  return dirty;
}

}  // namespace rec_kernels::host
