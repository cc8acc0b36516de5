// State of the blocks of a window, and clock (second-chance) eviction. It has no files and no threads; the owner's
// mutex guards it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace rec_kernels::host {

class BlockTable {
 public:
  // Bit flags of a block's state.
  enum Flag : uint8_t {
    kResident = 1,     // data is in the window
    kReferenced = 2,   // used since the clock hand passed
    kDirty = 4,        // resident, with changes in neither the log nor the main file
    kPinned = 8,       // pinned by the current load
    kPrefetched = 16,  // prefetched and not yet used by a load
    kMoving = 32,      // being read into the window or, if resident, written out; its memory is in use
    kWanted = 64,      // needed by the running call
  };

  // Allocates all memory, so that later calls allocate only the vectors that they return.
  BlockTable(int64_t num_blocks, int64_t capacity);

  int64_t capacity() const { return capacity_; }  // in blocks
  int64_t resident() const { return resident_; }
  int64_t dirty() const { return dirty_; }
  int64_t prefetched() const { return prefetched_; }
  int64_t held() const { return held_; }  // pinned or prefetched
  int64_t bookkeeping_bytes() const;

  bool has(int64_t block, uint8_t any) const { return states_[static_cast<size_t>(block)] & any; }
  void change(int64_t block, uint8_t on, uint8_t off) {
    uint8_t& state = states_[static_cast<size_t>(block)];
    const uint8_t before = state;
    state = static_cast<uint8_t>((before & ~off) | on);
    const auto difference = [&](uint8_t any) { return int64_t{(state & any) != 0} - int64_t{(before & any) != 0}; };
    resident_ += difference(kResident);
    dirty_ += difference(kDirty);
    prefetched_ += difference(kPrefetched);
    held_ += difference(kPinned | kPrefetched);
  }

  // Every resident or arriving block has one of `capacity` frames.
  int64_t free_frames() const { return capacity_ - used_; }
  int64_t allocate_frame(int64_t block);
  void release_frame(int64_t frame);
  // Selects `count` victims among resident blocks that are not held, moving or wanted, by the clock algorithm, and
  // marks them as moving. That many must exist.
  std::vector<int64_t> choose_victims(int64_t count);
  // Resident dirty blocks.
  std::vector<int64_t> dirty_blocks() const;

 private:
  std::vector<uint8_t> states_;
  std::vector<int64_t> frames_, free_;  // frames_: block per frame, or -1; grown on demand
  int64_t capacity_, used_ = 0, hand_ = 0, resident_ = 0, dirty_ = 0, prefetched_ = 0, held_ = 0;
};

}  // namespace rec_kernels::host
