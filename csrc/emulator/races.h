// Finds races: two threads access the same byte, at least one of them writes it, and no barrier orders the two
// accesses. The compiler calls __tsan_read4() and its like before every access to memory (-fsanitize=thread, without
// its library). Test-only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace rec_kernels::emulator {

enum class AccessKind : uint8_t { kRead, kWrite, kAtomic };

// Starts a launch.
void start_race_checks();
// Starts a block of the launch, with `threads` threads and this shared memory.
void start_race_checks_of_block(unsigned block, size_t threads, const void* shared, size_t shared_bytes);
// From now on, races of this launch count only if *status is not negative at its end.
void excuse_races(const int64_t* status);
// Returns the first of those races, at the end of a launch, or an empty string.
std::string race_without_excuse();
// Names the thread that runs, and its stack, whose memory no other thread accesses.
void switch_race_checks(unsigned thread, const void* stack, size_t stack_bytes);
// Orders the accesses of the lanes of `mask` in a warp, or of all threads of the block, before those that follow.
void order_lanes(unsigned warp, unsigned mask);
void order_block();
// Checks the last write of the running thread. A write is checked after it has happened, since one that changes nothing
// is no race.
void finish_write();
// Checks an access, which the code before the return address `where` makes. A plain read may meet an atomic: it sees
// the value before or after.
void check_access(const void* p, size_t bytes, AccessKind kind, const void* where);

}  // namespace rec_kernels::emulator
