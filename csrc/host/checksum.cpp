#include "host/checksum.h"

#include <array>
#include <cstring>
#include <vector>

#if defined(__SSE4_2__)
#include <nmmintrin.h>
#endif

namespace rec_kernels::host {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;  // Castagnoli, bits reversed

using Table = std::array<uint32_t, 256>;

// tables[k][b]: contribution of byte b to the remainder when k more bytes follow.
std::array<Table, 8> byte_tables() {
  std::array<Table, 8> tables{};
  for (uint32_t b = 0; b < 256; ++b) {
    uint32_t r = b;
    for (int i = 0; i < 8; ++i) r = r & 1 ? r >> 1 ^ kPolynomial : r >> 1;
    tables[0][b] = r;
  }
  for (size_t k = 1; k < 8; ++k)
    for (size_t b = 0; b < 256; ++b) tables[k][b] = tables[k - 1][b] >> 8 ^ tables[0][tables[k - 1][b] & 255];
  return tables;
}

const std::array<Table, 8> kBytes = byte_tables();

uint64_t word(const uint8_t* p) {
  uint64_t w;
  std::memcpy(&w, p, sizeof w);
  return w;
}

uint32_t remainder_by_table(uint32_t r, const uint8_t* p, size_t bytes) {
  for (; bytes >= 8; p += 8, bytes -= 8) {
    const uint64_t w = word(p) ^ r;
    r = 0;
    for (size_t k = 0; k < 8; ++k) r ^= kBytes[7 - k][w >> 8 * k & 255];
  }
  for (; bytes; ++p, --bytes) r = r >> 8 ^ kBytes[0][(r ^ *p) & 255];
  return r;
}

#if defined(__SSE4_2__)

// The instruction has a latency of 3 cycles and a throughput of 1, so three lanes of a block are interleaved: 3 x 1360
// of 4096 bytes.
constexpr size_t kLane = 1360;

// shift[k][b]: contribution of value b of byte k of a remainder after kLane zero bytes.
std::array<Table, 4> lane_tables() {
  std::array<Table, 4> shift{};
  const std::vector<uint8_t> zeros(kLane);
  for (uint32_t k = 0; k < 4; ++k)
    for (uint32_t b = 0; b < 256; ++b) shift[k][b] = remainder_by_table(b << 8 * k, zeros.data(), kLane);
  return shift;
}

const std::array<Table, 4> kShift = lane_tables();

uint32_t shifted(uint32_t r) {
  return kShift[0][r & 255] ^ kShift[1][r >> 8 & 255] ^ kShift[2][r >> 16 & 255] ^ kShift[3][r >> 24];
}

uint32_t remainder(uint32_t r, const uint8_t* p, size_t bytes) {
  for (; bytes >= 3 * kLane; p += 3 * kLane, bytes -= 3 * kLane) {
    uint64_t a = r, b = 0, c = 0;
    for (size_t i = 0; i < kLane; i += 8) {
      a = _mm_crc32_u64(a, word(p + i));
      b = _mm_crc32_u64(b, word(p + kLane + i));
      c = _mm_crc32_u64(c, word(p + 2 * kLane + i));
    }
    // Remainders are linear over XOR.
    r = shifted(shifted(static_cast<uint32_t>(a)) ^ static_cast<uint32_t>(b)) ^ static_cast<uint32_t>(c);
  }
  uint64_t a = r;
  for (; bytes >= 8; p += 8, bytes -= 8) a = _mm_crc32_u64(a, word(p));
  r = static_cast<uint32_t>(a);
  for (; bytes; ++p, --bytes) r = _mm_crc32_u8(r, *p);
  return r;
}

#else

uint32_t remainder(uint32_t r, const uint8_t* p, size_t bytes) { return remainder_by_table(r, p, bytes); }

#endif

}  // namespace

uint32_t crc32c(const void* data, size_t bytes, uint32_t before) {
  return ~remainder(~before, static_cast<const uint8_t*>(data), bytes);
}

uint32_t crc32c_by_table(const void* data, size_t bytes, uint32_t before) {
  return ~remainder_by_table(~before, static_cast<const uint8_t*>(data), bytes);
}

BlockChecksum::BlockChecksum(int64_t block_bytes) : block_bytes_(static_cast<size_t>(block_bytes)) {
  const std::vector<uint8_t> zeros(block_bytes_);
  zeros_ = crc32c(zeros.data(), block_bytes_);
}

}  // namespace rec_kernels::host
