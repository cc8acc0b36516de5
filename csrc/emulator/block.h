// Runs one CUDA block at a time, with its threads as fibers of one OS thread. Test-only.
//
// It detects: barriers, shuffles and votes that a participating thread never reaches, or where it calls another
// operation; misaligned vector accesses; reads of uninitialized shared memory (it starts as NaN); races (races.h);
// kernels on a stream other than torch's, or without a device guard; and, with AddressSanitizer, which excludes the
// check of races, accesses outside a tensor or shared memory. Missing synchronization also shows as results that depend
// on the order of threads (set_order). It cannot detect: decisions of an atomic on values that another thread changes
// meanwhile (a thread is never interrupted between synchronizations), memory ordering between blocks, timing,
// registers, occupancy.
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

// Runs body() as every thread of every block. Throws std::runtime_error for errors of the kernel.
void run_grid(Index grid, Index block, size_t shared_bytes, const std::function<void()>& body);

// Shared memory of the running thread: `shared_bytes` bytes, which AddressSanitizer guards.
void* shared_bytes();

// Waits until all lanes of `mask` call the same operation; returns the values of the warp's 32 lanes, valid until the
// next operation of the same lanes. `orders`: it also orders memory accesses before it and after it, which shuffles and
// votes do not.
const uint64_t* sync_lanes(const char* what, unsigned mask, uint64_t value, bool orders = false);
int lane();
// Waits for every thread of the block.
void sync_block();
// Throws from run_grid(), naming the running thread.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace rec_kernels::emulator
