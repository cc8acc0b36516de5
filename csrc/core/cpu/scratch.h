// Scratch memory of a call, pooled for later calls: page faults of fresh memory would cost a training step more than
// its sort.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

namespace rec_kernels {

// Maximum bytes of unused blocks in the pool.
constexpr size_t kMaxPooledScratch = size_t{256} << 20;

struct ScratchBlock {
  void* memory = nullptr;
  size_t size = 0;
};
ScratchBlock take_scratch(size_t bytes);
void give_scratch_back(ScratchBlock block);

// An owning buffer of `count` uninitialised elements, or empty.
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
