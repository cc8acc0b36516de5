// The blocks of a window that have memory, and the order in which they give it up. It has no files and no threads: the
// owner's mutex guards it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace rec_kernels::host {

class BlockTable {
 public:
  // The state of a block: a set of these.
  enum Flag : uint8_t {
    kResident = 1,     // its data is in the window
    kReferenced = 2,   // asked for since the clock's hand came by
    kDirty = 4,        // resident, and neither the log nor the main file has the data
    kPinned = 8,       // of the load that holds
    kPrefetched = 16,  // waits for its load
    kMoving = 32,      // on its way, into the window or (when resident) out of it: threads are at its memory
    kWanted = 64,      // named by the call that is running
  };

  // Takes all the memory that it will ever need: afterwards nothing throws but the lists that calls return.
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

  // A resident or arriving block has a frame, of which there are `capacity`.
  int64_t free_frames() const { return capacity_ - used_; }
  int64_t take_frame(int64_t block);
  void give_frame(int64_t frame);
  // Takes the frames of `count` blocks that are resident, not held, not moving, not wanted: those that were not
  // referenced for a round of the hand. They are moving then. There must be so many.
  std::vector<int64_t> choose_victims(int64_t count);
  // Resident blocks that are dirty.
  std::vector<int64_t> dirty_blocks() const;

 private:
  std::vector<uint8_t> states_;
  std::vector<int64_t> frames_, free_;  // frames_: the block, or -1; longer when first needed
  int64_t capacity_, used_ = 0, hand_ = 0, resident_ = 0, dirty_ = 0, prefetched_ = 0, held_ = 0;
};

}  // namespace rec_kernels::host
