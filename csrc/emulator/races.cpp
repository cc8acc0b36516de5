#include "emulator/races.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <memory>
#include <unordered_map>
#include <vector>

#include "emulator/block.h"

namespace rec_kernels::emulator {
namespace {

constexpr unsigned kLanes = 32, kMostThreads = 1024;
constexpr size_t kWord = 8, kPage = 4096, kMostPages = 2048;

// An access to some bytes of a word. `time` is that of the thread's last barrier.
struct Access {
  uint64_t time;
  uint32_t thread;  // kMostThreads * block + thread
  AccessKind kind;
  uint8_t bytes;  // bit mask
  const void* where;
};

// The last accesses to a word. With more than fit, some races are missed.
struct Word {
  Access accesses[4];
};
using Page = std::array<Word, kPage / kWord>;

// A thread's knowledge: the time of its last barrier, and per lane of its warp the time up to which accesses are
// ordered before its own.
struct Clock {
  uint64_t time;
  uint64_t seen[kLanes];
};

struct Write {
  uint8_t* p = nullptr;  // null: none
  size_t bytes;
  uint8_t before[16];
  const void* where;
};

std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages;
std::pair<uintptr_t, Page*> last_pages[64];
uint64_t now = 0, launch_start = 0, block_start = 0, last_barrier = 0;
std::vector<Clock> clocks;
uintptr_t shared_begin, stack_begin;
size_t shared_size, stack_size = 0;
unsigned block_index, thread_index, turn = 0;
Write pending;
const int64_t* excuse;
std::string excused;

Word& word_at(uintptr_t address) {
  const uintptr_t page = address / kPage;
  auto& [known, found] = last_pages[page % 64];
  if (!found || known != page) {
    auto& owned = pages[page];
    if (!owned) owned = std::make_unique<Page>();
    known = page;
    found = owned.get();
  }
  return (*found)[address % kPage / kWord];
}

// True if an earlier access of this launch is ordered before those of the running thread.
bool is_ordered(const Access& before) {
  if (before.thread == kMostThreads * block_index + thread_index) return true;
  if (before.thread / kMostThreads != block_index) return false;
  if (before.time < last_barrier) return true;
  const unsigned other = before.thread % kMostThreads;
  return other / kLanes == thread_index / kLanes && before.time <= clocks[thread_index].seen[other % kLanes];
}

bool conflict(AccessKind a, AccessKind b) { return a == AccessKind::kWrite || b == AccessKind::kWrite; }

const char* name_of(AccessKind kind) {
  return kind == AccessKind::kRead ? "reads" : kind == AccessKind::kWrite ? "writes" : "changes";
}

// Offset in its library of the call that returns to `where`, for addr2line.
size_t offset_of(const void* where) {
  const char* call = static_cast<const char*>(where) - 1;
  Dl_info info{};
  return dladdr(call, &info) ? static_cast<size_t>(call - static_cast<char*>(info.dli_fbase)) : 0;
}

void report(const Access& other, AccessKind kind, const void* where, bool is_shared) {
  char text[200];
  std::snprintf(text, sizeof text,
                "race: %s %s memory at +0x%zx, which thread %u of block %u %s at +0x%zx with no barrier between",
                name_of(kind), is_shared ? "shared" : "global", offset_of(where), other.thread % kMostThreads,
                other.thread / kMostThreads, name_of(other.kind), offset_of(other.where));
  if (!excuse) fail("%s", text);
  if (excused.empty()) excused = text;
}

void note(uintptr_t address, uint8_t bytes, AccessKind kind, const void* where) {
  const bool is_shared = address - shared_begin < shared_size;  // other blocks use the same addresses
  const uint64_t start = is_shared ? block_start : launch_start;
  Word& word = word_at(address);
  Access* place = nullptr;
  const uint32_t thread = kMostThreads * block_index + thread_index;
  for (Access& a : word.accesses) {
    if (a.time > start && a.bytes & bytes && conflict(a.kind, kind) && !is_ordered(a))
      report(a, kind, where, is_shared);
    if (a.time <= start || (a.thread == thread && a.bytes == bytes && a.kind == kind)) place = &a;
  }
  for (int tries = 0; !place; ++tries) {  // a read takes the place of a write only if there are no others
    Access& a = word.accesses[turn++ % 4];
    if (kind == AccessKind::kWrite || a.kind != AccessKind::kWrite || tries == 4) place = &a;
  }
  *place = {clocks[thread_index].time, thread, kind, bytes, where};
}

void note_all(const void* p, size_t bytes, AccessKind kind, const void* where) {
  const auto begin = reinterpret_cast<uintptr_t>(p), end = begin + bytes;
  for (uintptr_t word = begin / kWord * kWord; word < end; word += kWord) {
    const size_t from = std::max(word, begin) - word, to = std::min(word + kWord, end) - word;
    note(word, static_cast<uint8_t>((1u << to) - (1u << from)), kind, where);
  }
}

}  // namespace

void start_race_checks() {
  pending.p = nullptr;
  excuse = nullptr;
  excused.clear();
  launch_start = now;
  if (pages.size() < kMostPages) return;
  pages.clear();
  std::fill(std::begin(last_pages), std::end(last_pages), std::pair<uintptr_t, Page*>{});
}

void excuse_races(const int64_t* status) { excuse = status; }

std::string race_without_excuse() { return excuse && *excuse >= 0 ? excused : std::string(); }

void start_race_checks_of_block(unsigned block, size_t threads, const void* shared, size_t shared_bytes) {
  block_index = block;
  shared_begin = reinterpret_cast<uintptr_t>(shared);
  shared_size = shared_bytes;
  block_start = now++;
  last_barrier = now;
  clocks.assign(threads, Clock{now, {}});
}

void switch_race_checks(unsigned thread, const void* stack, size_t stack_bytes) {
  thread_index = thread;
  stack_begin = reinterpret_cast<uintptr_t>(stack);
  stack_size = stack_bytes;
}

void order_lanes(unsigned warp, unsigned mask) {
  Clock* const lanes = &clocks[warp * kLanes];
  uint64_t seen[kLanes] = {};
  for (unsigned i = 0; i < kLanes; ++i) {
    if (!(mask >> i & 1)) continue;
    for (unsigned j = 0; j < kLanes; ++j) seen[j] = std::max(seen[j], lanes[i].seen[j]);
    seen[i] = std::max(seen[i], lanes[i].time);
  }
  ++now;
  for (unsigned i = 0; i < kLanes; ++i) {
    if (!(mask >> i & 1)) continue;
    lanes[i].time = now;
    std::copy_n(seen, kLanes, lanes[i].seen);
  }
}

void order_block() {
  last_barrier = ++now;
  for (Clock& c : clocks) c.time = now;
}

void finish_write() {
  if (!pending.p) return;
  const Write write = pending;
  pending.p = nullptr;
  if (std::memcmp(write.p, write.before, write.bytes) != 0)
    note_all(write.p, write.bytes, AccessKind::kWrite, write.where);
}

void check_access(const void* p, size_t bytes, AccessKind kind, const void* where) {
  const auto here = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
  if (here - stack_begin >= stack_size) return;  // the host's code
  if (reinterpret_cast<uintptr_t>(p) - stack_begin < stack_size) return;
  finish_write();
  if (kind != AccessKind::kWrite || bytes > sizeof pending.before) return note_all(p, bytes, kind, where);
  pending.p = static_cast<uint8_t*>(const_cast<void*>(p));
  pending.bytes = bytes;
  pending.where = where;
  std::memcpy(pending.before, p, bytes);
}

}  // namespace rec_kernels::emulator

// Code compiled with -fsanitize=thread calls these functions.
#define RK_BEFORE(name, bytes, kind)                                                       \
  extern "C" void __tsan_##name##bytes(void* p) {                                          \
    rec_kernels::emulator::check_access(p, bytes, rec_kernels::emulator::AccessKind::kind, \
                                        __builtin_return_address(0));                      \
  }
#define RK_BEFORE_ALL(bytes)                \
  RK_BEFORE(read, bytes, kRead)             \
  RK_BEFORE(write, bytes, kWrite)           \
  RK_BEFORE(unaligned_read, bytes, kRead)   \
  RK_BEFORE(unaligned_write, bytes, kWrite) \
  RK_BEFORE(volatile_read, bytes, kAtomic)  \
  RK_BEFORE(volatile_write, bytes, kAtomic)
RK_BEFORE_ALL(1)
RK_BEFORE_ALL(2)
RK_BEFORE_ALL(4)
RK_BEFORE_ALL(8)
RK_BEFORE_ALL(16)

extern "C" {
void __tsan_read_range(void* p, size_t bytes) {
  rec_kernels::emulator::check_access(p, bytes, rec_kernels::emulator::AccessKind::kRead, __builtin_return_address(0));
}
void __tsan_write_range(void* p, size_t bytes) {
  rec_kernels::emulator::check_access(p, bytes, rec_kernels::emulator::AccessKind::kWrite, __builtin_return_address(0));
}
void __tsan_init() {}
void __tsan_vptr_read(void*) {}
void __tsan_vptr_update(void**, void*) {}
// Atomics of the host's code.
#define RK_ATOMICS(bits, T)                                                                                         \
  T __tsan_atomic##bits##_load(const volatile T* p, int) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }           \
  void __tsan_atomic##bits##_store(volatile T* p, T x, int) { __atomic_store_n(p, x, __ATOMIC_SEQ_CST); }           \
  T __tsan_atomic##bits##_fetch_add(volatile T* p, T x, int) { return __atomic_fetch_add(p, x, __ATOMIC_SEQ_CST); } \
  T __tsan_atomic##bits##_fetch_sub(volatile T* p, T x, int) { return __atomic_fetch_sub(p, x, __ATOMIC_SEQ_CST); }
RK_ATOMICS(8, uint8_t)
RK_ATOMICS(32, uint32_t)
RK_ATOMICS(64, uint64_t)
}
