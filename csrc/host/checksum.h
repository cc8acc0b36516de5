// CRC32C (Castagnoli), as in iSCSI and ext4, by the CPU's instruction if the compilation target has it, else by tables.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace rec_kernels::host {

// Extends the checksum `before` of the preceding bytes by these bytes.
uint32_t crc32c(const void* data, size_t bytes, uint32_t before = 0);
// crc32c() without the instruction, exposed for tests.
uint32_t crc32c_by_table(const void* data, size_t bytes, uint32_t before = 0);

// Checksum of a record, with its own checksum field as zero, and of the bytes after it.
template <class Record>
uint32_t checksum_of(Record record, const std::string& more = {}) {
  record.checksum = 0;
  return crc32c(more.data(), more.size(), crc32c(&record, sizeof record));
}

// The checksum of a block: CRC32C of its bytes, exclusive-or CRC32C of as many zero bytes. A block of zeros has
// checksum 0, so the checksums of a new file are zeros and take no disk space.
class BlockChecksum {
 public:
  explicit BlockChecksum(int64_t block_bytes);
  uint32_t operator()(const uint8_t* block) const { return crc32c(block, block_bytes_) ^ zeros_; }

 private:
  size_t block_bytes_;
  uint32_t zeros_;
};

}  // namespace rec_kernels::host
