// Memory that a call needs for itself. It is kept for the calls after it: the page faults of fresh memory would cost a
// training step more than its sort does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

namespace rec_kernels {

// The most bytes that are kept while nobody uses them.
constexpr size_t kMostScratchKept = size_t{256} << 20;

struct ScratchBlock {
  void* memory = nullptr;
  size_t size = 0;
};
ScratchBlock take_scratch(size_t bytes);
void give_scratch_back(ScratchBlock block);

// `count` elements, not initialised; or none at all.
template <class T>
class Scratch {
  static_assert(std::is_trivial<T>::value, "nothing is constructed");

 public:
  Scratch() = default;
  explicit Scratch(int64_t count) : block_(take_scratch(static_cast<size_t>(count) * sizeof(T))) {}
  Scratch(Scratch&& other) noexcept : block_(std::exchange(other.block_, ScratchBlock())) {}
  Scratch& operator=(Scratch&& other) noexcept {
    std::swap(block_, other.block_);
    return *this;
  }
  ~Scratch() {
    if (block_.memory) give_scratch_back(block_);
  }

  T* get() const { return static_cast<T*>(block_.memory); }
  T& operator[](int64_t i) const { return get()[i]; }
  explicit operator bool() const { return block_.memory != nullptr; }

 private:
  ScratchBlock block_;
};

}  // namespace rec_kernels
