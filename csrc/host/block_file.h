// The main file of a row file: a header, the state, the layout, a checksum for every block, the blocks.
//
// All integers are little-endian; gaps between the parts are zeros.
//
//   byte 0      header, 64 bytes: magic "RKROWFIL"; u32 version = 1; u32 CRC32C of the header (with this field zero)
//               followed by the layout; i64 num_bytes; i64 block_bytes; i64 layout_bytes; u64 identity, a random
//               number that the log repeats; zeros. Written once, last of all, when the file is created.
//   byte 4096,  two states of 48 bytes; the one with the larger sequence number is valid: magic "RKROWSTA"; u32 phase
//   byte 8192   (0: the blocks are those of the generation; 1: they are being overwritten from the log, which has the
//               generation and is required); u32 CRC32C of the state (with this field zero);
//               i64 sequence, even in the first place and odd in the second; i64 generation; u64 digest; u64 identity.
//   byte 12288  layout: layout_bytes of UTF-8.
//   then, at the next multiple of 4096, a u32 checksum for each of the ceil(num_bytes / block_bytes) blocks:
//               CRC32C of the block exclusive-or CRC32C of block_bytes zeros;
//   then, at the next multiple of max(4096, block_bytes), the blocks; the last one is filled up with zeros. The file
//   ends there.
//
// The digest guards the checksums: the sum modulo 2^64, over the blocks with a checksum c that is not 0, of
// mix(block * 0x9e3779b97f4a7c15 + c), where mix is the finalizer of SplitMix64 (digest_term() in the .cpp). It does
// not depend on the order in which checksums reach the disk, so a torn write can be repeated.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "host/file.h"

namespace rec_kernels::host {

// A block of the log: block index, slot in the log, checksum.
struct LogEntry {
  int64_t block, slot;
  uint32_t checksum;
};

class BlockFile {
 public:
  // Throws ValueError for invalid sizes.
  static void check_sizes(int64_t num_bytes, int64_t block_bytes);
  // Creates a durable file of zeros; removes it after an exception. Call check_sizes() first.
  static BlockFile create(const std::string& path, int64_t num_bytes, int64_t block_bytes, const std::string& layout);
  // Throws ValueError if the file has another layout.
  static BlockFile open(const std::string& path, const std::string& layout);

  const std::string& path() const { return file_.path(); }
  int64_t num_bytes() const { return num_bytes_; }
  int64_t block_bytes() const { return block_bytes_; }
  int64_t num_blocks() const { return num_blocks_; }
  uint64_t identity() const { return identity_; }
  // Generation of the blocks, or of the log while the file is being overwritten.
  int64_t generation() const { return generation_; }
  bool being_overwritten() const { return being_overwritten_; }
  uint32_t checksum(int64_t block) const { return checksums_[static_cast<size_t>(block)]; }
  int64_t bookkeeping_bytes() const { return static_cast<int64_t>(checksums_.capacity() * sizeof(uint32_t)); }
  // The digest of the checksums after replacing those of the log's blocks.
  uint64_t digest_with(const std::vector<LogEntry>& entries) const;
  // Throws if `digest` is not digest_with(entries).
  void check_digest(const std::vector<LogEntry>& entries, uint64_t digest) const;

  // Read or write adjacent blocks. Thread-safe. The caller compares checksums.
  void read(int64_t first, int64_t count, uint8_t* to) const;
  void write(int64_t first, int64_t count, const uint8_t* from) const;
  int64_t offset(int64_t block) const { return data_offset_ + block * block_bytes_; }
  // Call begin_overwriting() before writing the first block and end_overwriting(), with sorted entries, after the last.
  // After an exception, the whole sequence can be repeated.
  void begin_overwriting(int64_t generation);
  void end_overwriting(const std::vector<LogEntry>& entries, uint64_t digest);

  void close() noexcept { file_.close(); }

 private:
  explicit BlockFile(File file) : file_(std::move(file)) {}
  void place(int64_t num_bytes, int64_t block_bytes, int64_t layout_bytes);
  void write_state(bool being_overwritten, int64_t generation, uint64_t digest);
  void read_header(const std::string& layout);
  void read_state();
  void read_checksums(uint64_t digest);
  void write_checksums(const std::vector<LogEntry>& entries) const;

  File file_;
  int64_t num_bytes_ = 0, block_bytes_ = 0, num_blocks_ = 0, checksum_offset_ = 0, data_offset_ = 0, file_bytes_ = 0;
  uint64_t identity_ = 0, digest_ = 0;
  int64_t generation_ = 0, sequence_ = 0;
  bool being_overwritten_ = false;
  std::vector<uint32_t> checksums_;  // in the file, or to be written to it
};

}  // namespace rec_kernels::host
