#include "emulator/fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

// rk_switch_stack(void** save, void* to): pushes the callee-saved registers, then switches stacks.
extern "C" void rk_switch_stack(void** save, void* to);
#if defined(__x86_64__)
asm(R"(
.text
.globl rk_switch_stack
.hidden rk_switch_stack
.type rk_switch_stack, @function
rk_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size rk_switch_stack, . - rk_switch_stack
)");
#elif defined(__aarch64__)
asm(R"(
.text
.globl rk_switch_stack
.hidden rk_switch_stack
.type rk_switch_stack, %function
rk_switch_stack:
  sub sp, sp, #160
  stp x19, x20, [sp]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x2, sp
  str x2, [x0]
  mov sp, x1
  ldp x19, x20, [sp]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size rk_switch_stack, . - rk_switch_stack
)");
#else
#error "the emulator switches stacks on x86-64 and aarch64 only"
#endif

namespace rec_kernels::emulator {
namespace {

void* scheduler_stack_pointer;
#if defined(__SANITIZE_ADDRESS__)  // state for its annotations of stack switches
void* scheduler_fake_stack;
const void* scheduler_bottom;
size_t scheduler_size;
#endif

}  // namespace

Fiber::Fiber() {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* memory = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  mprotect(memory, page, PROT_NONE);  // guard page
  memory_ = static_cast<char*>(memory);
}

Fiber::~Fiber() { munmap(memory_, kStack); }

void Fiber::start(void (*entry)()) {
#if defined(__SANITIZE_ADDRESS__)
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  __asan_unpoison_memory_region(memory_ + page, kStack - page);
  fake_stack_ = nullptr;
#endif
  // rk_switch_stack pops these: the saved registers, then the return address, which is the entry.
  auto* top = reinterpret_cast<uintptr_t*>(memory_ + kStack - 64);
#if defined(__x86_64__)
  *--top = 0;  // return address of entry(); the stack is aligned as after a call
  *--top = reinterpret_cast<uintptr_t>(entry);
  for (int i = 0; i < 6; ++i) *--top = 0;
#else
  top -= 20;
  for (int i = 0; i < 20; ++i) top[i] = 0;
  top[11] = reinterpret_cast<uintptr_t>(entry);  // x30
#endif
  stack_pointer_ = top;
}

void Fiber::switch_to() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&scheduler_fake_stack, memory_, kStack);
#endif
  rk_switch_stack(&scheduler_stack_pointer, stack_pointer_);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr);
#endif
}

void Fiber::entered() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake_stack_, &scheduler_bottom, &scheduler_size);
#endif
}

void Fiber::leave([[maybe_unused]] bool for_good) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(for_good ? nullptr : &fake_stack_, scheduler_bottom, scheduler_size);
#endif
  rk_switch_stack(&stack_pointer_, scheduler_stack_pointer);
  entered();
}

}  // namespace rec_kernels::emulator
