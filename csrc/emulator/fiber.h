// A stack of its own for each thread of a CUDA block, and the switch between them.
#pragma once

#include <cstddef>

namespace rec_kernels::emulator {

// Runs entry(argument) on its own stack when first switched to; entry never returns.
class Fiber {
 public:
  Fiber();
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Makes the next switch_to call entry(); whatever the fiber was doing before is forgotten.
  void start(void (*entry)());
  // Switches from the scheduler's stack to this one, until it calls leave().
  void switch_to();
  // The first thing that entry() does.
  void entered();
  // Back to the scheduler. `for_good`: this stack is not needed any more.
  void leave(bool for_good = false);

 private:
  char* memory_;
  void* stack_pointer_ = nullptr;
  void* fake_stack_ = nullptr;  // AddressSanitizer's
};

}  // namespace rec_kernels::emulator
