// The log of a row file, `<path>.log`: blocks that were changed since the generation in the main file.
//
// All numbers are little-endian; what is between the parts is zeros.
//
//   byte 0,     the commit, 64 bytes, twice: magic "RKROWLOG"; u32 version = 1; u32 CRC32C of these 64 bytes (with
//   byte 2048   zeros in place of this number); u64 identity, that of the main file; i64 generation, one more than the
//               main file's; i64 entries; u32 CRC32C of the index; u32 zero; u64 digest of the main file's checksums
//               once the blocks are there (block_file.h); zeros. It is written when all that follows is on the disk.
//               With zeros in its place nothing of the log counts; anything else without a whole copy is damage.
//   byte 4096   slots, block_bytes each: the blocks, in the order in which they were first logged.
//   then        index, 16 bytes for each slot: i64 block; u32 checksum of the block, as in the main file; u32 zero.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "host/block_file.h"
#include "host/checksum.h"
#include "host/file.h"

namespace rec_kernels::host {

// The owner's mutex guards its entries. Any number of threads read and write slots without it, one thread the rest of
// the file.
class BlockLog {
 public:
  // ValueError for a file of another kind that has the log's name.
  explicit BlockLog(const BlockFile& main);

  const std::string& path() const { return file_.path(); }
  // True if the log has a whole generation that the main file has not.
  bool committed() const { return committed_; }
  int64_t generation() const { return generation_; }
  uint64_t digest() const { return digest_; }
  int64_t num_entries() const { return static_cast<int64_t>(entries_.size()); }
  int64_t bytes() const;
  int64_t bookkeeping_bytes() const;

  // The generation of the commit that the file has, if any; adopt() then takes over its index.
  std::optional<int64_t> find_commit();
  void adopt();

  // Slot of the block, or -1.
  int64_t find(int64_t block) const;
  // Memory for `count` more entries, which assign() needs.
  void reserve(int64_t count);
  // Slot of the block, a new one if it had none.
  int64_t assign(int64_t block);
  uint32_t checksum(int64_t slot) const { return entries_[static_cast<size_t>(slot)].checksum; }
  void set_checksum(int64_t slot, uint32_t checksum) { entries_[static_cast<size_t>(slot)].checksum = checksum; }
  // Entries in the order of the blocks.
  std::vector<LogEntry> sorted_entries() const;

  // Neighbouring slots.
  void read(int64_t first, int64_t count, uint8_t* to) const { file_.read(to, count * block_bytes_, offset(first)); }
  void write(int64_t first, std::vector<iovec> blocks) const { file_.write(std::move(blocks), offset(first)); }
  int64_t offset(int64_t slot) const;

  // Takes back a commit that failed half-way; must be called before slots are written.
  void make_writable();
  // Makes the entries a generation on the disk; when that is done, the owner says so with set_committed.
  void write_commit(int64_t generation, uint64_t digest);
  void set_committed(int64_t generation, uint64_t digest);
  // The main file has it all, or nobody wants it: empties the file; when that is done, forget() empties the rest.
  void truncate();
  void forget();
  // truncate() and forget(), for a log without a commit that counts.
  void discard();
  void close() noexcept { file_.close(); }

 private:
  struct Entry {
    int64_t block;
    uint32_t checksum, zero;
  };
  struct Commit;

  void refuse_another_kind() const;
  std::optional<Commit> read_commit() const;
  std::vector<Entry> read_index(const Commit& commit) const;
  void rewrite();
  size_t place(int64_t block) const;

  File file_;
  BlockChecksum checksum_of_;
  int64_t block_bytes_, num_blocks_;
  uint64_t identity_;
  bool committed_ = false;
  bool commit_uncertain_ = false;  // a commit may be on the disk that was reported as failed
  bool doubtful_ = false;          // the disk has refused data: what it took since may be lost, too
  int64_t generation_ = 0;
  uint64_t digest_ = 0;
  std::vector<Entry> entries_;  // by slot
  std::vector<int64_t> table_;  // open addressing: slots by their block, -1 where there is none; at most half full
};

}  // namespace rec_kernels::host
