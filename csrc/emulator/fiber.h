// Fibers: a stack for each thread of a CUDA block, and switching between them.
#pragma once

#include <cstddef>

namespace rec_kernels::emulator {

// Runs entry() on its own stack when first switched to; entry() never returns.
class Fiber {
 public:
  Fiber();
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Makes the next switch_to call entry(); discards the fiber's previous state.
  void start(void (*entry)());
  // Switches from the scheduler's stack to this one, until it calls leave().
  void switch_to();
  // Must be called first in entry().
  void entered();
  // Switches back to the scheduler. `for_good`: the stack is no longer needed.
  void leave(bool for_good = false);

  static constexpr size_t kStack = 256 << 10;  // AddressSanitizer makes frames several times larger
  const void* stack() const { return memory_; }

 private:
  char* memory_;
  void* stack_pointer_ = nullptr;
  void* fake_stack_ = nullptr;  // AddressSanitizer's
};

}  // namespace rec_kernels::emulator
