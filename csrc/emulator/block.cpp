#include "emulator/block.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda_runtime.h"
#include "emulator/fiber.h"
#include "emulator/races.h"

// Built-in variables of the running thread.
Index3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace rec_kernels::emulator {
namespace {

constexpr unsigned kLanes = 32;

// A synchronization point of some lanes of a warp, or of a whole block.
struct SyncPoint {
  unsigned mask = 0;
  const char* what = nullptr;
  unsigned arrived = 0;  // mask of lanes; for a block, number of threads
  // Values of the current and the previous operation: no lane can be two operations ahead.
  uint64_t values[2][kLanes];
  unsigned turn = 0;
};

enum class State { kReady, kWaiting, kDone };

struct Thread {
  Index3 index;
  State state = State::kReady;
  const SyncPoint* waiting_at = nullptr;
};

struct Block {
  const std::function<void()>* body = nullptr;
  std::vector<Thread> threads;
  std::vector<std::vector<SyncPoint>> warps;  // synchronization points of each warp, by mask
  SyncPoint barrier;
  std::unique_ptr<unsigned char[]> shared;
  unsigned running = 0;
  std::string error;
};

Block block;
std::vector<std::unique_ptr<Fiber>> fibers;  // reused: creating a stack costs more than a small kernel
Order order = Order::kAscending;
std::mt19937_64 random_bits;
std::mutex launch_mutex;

Fiber& fiber() { return *fibers[block.running]; }

void run_thread() {
  fiber().entered();
  (*block.body)();
  finish_write();
  block.threads[block.running].state = State::kDone;
  fiber().leave(true);
}

void wait_for(const SyncPoint& point) {
  Thread& thread = block.threads[block.running];
  thread.state = State::kWaiting;
  thread.waiting_at = &point;
  fiber().leave();
}

void wake(const SyncPoint& point) {
  for (Thread& t : block.threads)
    if (t.state == State::kWaiting && t.waiting_at == &point) t.state = State::kReady;
}

std::vector<unsigned> run_order(size_t count) {
  std::vector<unsigned> out(count);
  for (size_t i = 0; i < count; ++i) out[i] = static_cast<unsigned>(order == Order::kDescending ? count - 1 - i : i);
  if (order == Order::kRandom) std::shuffle(out.begin(), out.end(), random_bits);
  return out;
}

// Reports the first thread that is deadlocked.
std::string describe_deadlock() {
  for (size_t i = 0; i < block.threads.size(); ++i) {
    const Thread& t = block.threads[i];
    if (t.state != State::kWaiting) continue;
    const SyncPoint& m = *t.waiting_at;
    char text[160];
    if (&m == &block.barrier)
      std::snprintf(text, sizeof text, "thread %zu waits at __syncthreads, which %u of %zu threads have reached", i,
                    m.arrived, block.threads.size());
    else
      std::snprintf(text, sizeof text, "thread %zu waits at %s for lanes 0x%08x, of which 0x%08x have arrived", i,
                    m.what, m.mask, m.arrived);
    return text;
  }
  return {};
}

void run_threads() {
  for (bool progress = true; progress;) {
    progress = false;
    for (const unsigned i : run_order(block.threads.size())) {
      if (block.threads[i].state != State::kReady) continue;
      progress = true;
      block.running = i;
      threadIdx = block.threads[i].index;
      switch_race_checks(i, fiber().stack(), Fiber::kStack);
      fiber().switch_to();
      switch_race_checks(i, nullptr, 0);
      if (!block.error.empty()) return;
    }
  }
  block.error = describe_deadlock();
}

void start_block(unsigned index, dim3 size, size_t shared_bytes) {
  const size_t count = size_t{size.x} * size.y * size.z;
  while (fibers.size() < count) fibers.push_back(std::make_unique<Fiber>());
  block.threads.assign(count, Thread{});
  for (size_t i = 0; i < count; ++i) {
    const auto n = static_cast<unsigned>(i);
    block.threads[i].index = {n % size.x, n / size.x % size.y, n / size.x / size.y};
    fibers[i]->start(run_thread);
  }
  block.warps.assign((count + kLanes - 1) / kLanes, {});
  block.barrier = {};
  block.error.clear();
  block.shared.reset(new unsigned char[shared_bytes]);
  std::memset(block.shared.get(), 0xff, shared_bytes);  // NaN as a float, -1 as an integer
  start_race_checks_of_block(index, count, block.shared.get(), shared_bytes);
}

SyncPoint& sync_point_of(unsigned mask) {
  auto& points = block.warps[block.running / kLanes];
  for (SyncPoint& m : points)
    if (m.mask == mask) return m;
  // Waiting threads have pointers to elements, so the vector must not reallocate.
  if (points.empty()) points.reserve(64);
  if (points.size() == 64) fail("a warp uses more than 64 different lane masks");
  points.emplace_back();
  points.back().mask = mask;
  return points.back();
}

}  // namespace

void set_order(Order next, uint64_t seed) {
  const std::lock_guard<std::mutex> lock(launch_mutex);
  order = next;
  random_bits.seed(seed);
}

void run_grid(Index grid, Index size, size_t shared_bytes, const std::function<void()>& body) {
  const std::lock_guard<std::mutex> lock(launch_mutex);
  const size_t threads = size_t{size.x} * size.y * size.z, blocks = size_t{grid.x} * grid.y * grid.z;
  if (threads == 0 || threads > 1024 || blocks == 0 || grid.x > 2147483647u || grid.y > 65535u || grid.z > 65535u)
    throw std::runtime_error("invalid configuration argument: grid " + std::to_string(blocks) + " blocks of " +
                             std::to_string(threads) + " threads");
  if (shared_bytes > 48 * 1024)
    throw std::runtime_error("more than 48 KiB of shared memory, which not every GPU has: " +
                             std::to_string(shared_bytes));
  gridDim = dim3(grid.x, grid.y, grid.z);
  blockDim = dim3(size.x, size.y, size.z);
  block.body = &body;
  start_race_checks();
  for (const unsigned b : run_order(blocks)) {
    blockIdx = {b % grid.x, b / grid.x % grid.y, b / grid.x / grid.y};
    start_block(b, blockDim, shared_bytes);
    run_threads();
    if (!block.error.empty()) throw std::runtime_error("block " + std::to_string(b) + ": " + block.error);
  }
  if (const std::string race = race_without_excuse(); !race.empty()) throw std::runtime_error(race);
}

void* shared_bytes() { return block.shared.get(); }

int lane() { return static_cast<int>(block.running % kLanes); }

const uint64_t* sync_lanes(const char* what, unsigned mask, uint64_t value, bool orders) {
  finish_write();
  const unsigned me = 1u << lane();
  const size_t lanes = std::min<size_t>(kLanes, block.threads.size() - block.running / kLanes * kLanes);
  if (!(mask & me)) fail("%s with mask 0x%08x, which excludes the calling lane", what, mask);
  if (lanes < kLanes && mask >> lanes) fail("%s with mask 0x%08x in a warp of %zu lanes", what, mask, lanes);
  SyncPoint& m = sync_point_of(mask);
  if (m.arrived && std::strcmp(m.what, what) != 0) fail("%s while other lanes of the mask are at %s", what, m.what);
  m.what = what;
  uint64_t* values = m.values[m.turn & 1];
  values[lane()] = value;
  m.arrived |= me;
  if (m.arrived != mask) {
    wait_for(m);
  } else {
    m.arrived = 0;
    ++m.turn;
    if (orders) order_lanes(block.running / kLanes, mask);
    wake(m);
  }
  return values;
}

void sync_block() {
  finish_write();
  SyncPoint& m = block.barrier;
  if (++m.arrived != block.threads.size()) {
    wait_for(m);
  } else {
    m.arrived = 0;
    order_block();
    wake(m);
  }
}

void fail(const char* format, ...) {
  char text[256];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  block.error = "thread " + std::to_string(block.running) + ": " + text;
  for (;;) fiber().leave();
}

}  // namespace rec_kernels::emulator
