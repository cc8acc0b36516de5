// One CUDA block at a time, its threads taking turns on one OS thread. Test-only.
//
// What it finds: barriers, shuffles and votes that a named thread does not reach or reaches as something else; vector
// accesses that are not aligned; shared memory read before it is written (it starts as NaN); kernels on another stream
// than torch's, or where no guard has chosen the GPU; and, together with AddressSanitizer, accesses outside of a tensor
// or of the shared memory. Threads that read what others write without a meeting show as results that depend on the
// order of turns (set_order). What it cannot show: updates that get lost or torn because two threads make them at the
// same time (a thread is never interrupted between meetings), memory ordering between blocks, timing, registers,
// occupancy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace rec_kernels::emulator {

struct Index {
  unsigned x = 1, y = 1, z = 1;
};

// Order in which threads of a block, and blocks of a grid, run.
enum class Order { kAscending, kDescending, kRandom };
void set_order(Order order, uint64_t seed);

// Runs body() as every thread of every block. Throws std::runtime_error for what a kernel must not do.
void run_grid(Index grid, Index block, size_t shared_bytes, const std::function<void()>& body);

// Shared memory of the running thread: `shared_bytes` bytes, which AddressSanitizer guards.
void* shared_bytes();

// Waits for the lanes of `mask`, all of this warp and each calling the same `what`; gives the 32 values they brought,
// until the next meeting of the same lanes.
const uint64_t* meet_lanes(const char* what, unsigned mask, uint64_t value);
int lane();
// Waits for every thread of the block.
void meet_block();
// Throws from run_grid, with the thread that was running.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace rec_kernels::emulator
