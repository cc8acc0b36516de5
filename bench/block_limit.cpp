// The machine's limit of bringing blocks of a file into memory, from which others leave for a second file: a loop of
// system calls. bench/row_file_blocks.py compares with it; bench/limits.py compiles this for this machine.
#include <unistd.h>

#include <cstdint>

// Block reads[i] of `file`, whose blocks begin at byte `first`, comes into frame frames[i] of `memory`, for i below
// `count`; before, for i below `written`, that frame is written to block writes[i] of `log`. Returns 0 if a call fails.
extern "C" int move_blocks(int file, int log, uint8_t* memory, const int64_t* reads, const int64_t* writes,
                           const int64_t* frames, int64_t count, int64_t written, int64_t first) {
  constexpr int64_t kBlock = 4096;
  for (int64_t i = 0; i < count; ++i) {
    uint8_t* frame = memory + frames[i] * kBlock;
    if (i < written && pwrite(log, frame, kBlock, writes[i] * kBlock) != kBlock) return 0;
    if (pread(file, frame, kBlock, first + reads[i] * kBlock) != kBlock) return 0;
  }
  return 1;
}
