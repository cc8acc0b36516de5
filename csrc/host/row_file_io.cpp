// I/O of a row file: chunks of a batch, the flush, and copying the log to the main file.
#include <algorithm>

#include "core/host_device.h"
#include "host/row_file.h"
#include "host/row_file_batch.h"

namespace rec_kernels::host {
namespace {

using Flag = BlockTable::Flag;

// Large enough to amortize scheduling a chunk, small enough to stay in a core's cache.
constexpr int64_t kChunkBytes = 256 << 10;

// Appends a range of memory; merges adjacent ranges.
void add_range(std::vector<iovec>& ranges, uint8_t* begin, int64_t bytes) {
  const auto size = static_cast<size_t>(bytes);
  if (!ranges.empty() && static_cast<uint8_t*>(ranges.back().iov_base) + ranges.back().iov_len == begin)
    ranges.back().iov_len += size;
  else ranges.push_back({begin, size});
}

// True if two reads are adjacent both in the window and in their file.
bool are_adjacent(const Move& a, const Move& b) {
  return b.block == a.block + 1 && (a.slot < 0 ? b.slot < 0 : b.slot == a.slot + 1);
}

}  // namespace

// Plans reads and their victims, and marks all of them as moving; null if there is nothing to read.
std::shared_ptr<RowFile::Batch> RowFile::plan(const std::vector<int64_t>& wanted) {
  auto batch = std::make_shared<Batch>();
  std::vector<Move>& reads = batch->reads;
  for (const int64_t b : wanted)
    if (!table_.has(b, Flag::kResident | Flag::kMoving)) reads.push_back({b});
  if (reads.empty()) return nullptr;
  std::sort(reads.begin(), reads.end(), [](const Move& a, const Move& b) { return a.block < b.block; });
  const auto count = static_cast<int64_t>(reads.size()), too_many = std::max<int64_t>(0, count - table_.free_frames());
  batch->victims.reserve(static_cast<size_t>(too_many));
  log_.reserve(too_many);
  for (const int64_t b : table_.choose_victims(too_many)) {  // nothing throws after this point
    batch->victims.push_back({b});
    if (table_.has(b, Flag::kDirty)) batch->victims.back().slot = log_.assign(b);
  }
  for (Move& read : reads) {
    table_.change(read.block, Flag::kMoving, 0);
    read.frame = table_.allocate_frame(read.block);
    read.slot = log_.find(read.block);
    read.checksum = read.slot < 0 ? main_.checksum(read.block) : log_.checksum(read.slot);
  }
  // A few chunks per thread, if there is enough to read.
  const int64_t most = std::max<int64_t>(1, kChunkBytes / block_bytes_);
  batch->reads_per_chunk =
      static_cast<size_t>(std::clamp(count / (2 * pool_->threads()), std::min<int64_t>(8, most), most));
  batch->chunks_left = batch->num_chunks();
  return batch;
}

void RowFile::execute(Batch& batch, int64_t chunk) {
  std::exception_ptr error;
  const bool room = !batch.cancelled && evict_victims(batch, chunk, error);
  const size_t last = batch.first_read_of(chunk + 1);
  for (size_t i = batch.first_read_of(chunk); room && i < last;) {
    size_t end = i + 1;
    const Move* reads = batch.reads.data();
    while (end < last && are_adjacent(reads[end - 1], reads[end])) ++end;
    read_run(batch, i, end, error);
    i = end;
  }
  finish_chunk(batch, chunk, room, error);
}

// Evicts the victims of a chunk and populates the memory of its reads. Returns false on error: all victims stay loaded.
bool RowFile::evict_victims(Batch& batch, int64_t chunk, std::exception_ptr& error) {
  const size_t first = batch.first_victim_of(chunk), last = batch.first_victim_of(chunk + 1);
  try {
    // One block per call: ext4 caches a large write as one folio, in which rewriting a block is slower.
    for (size_t i = first; i < last; ++i)
      if (Move& victim = batch.victims[i]; victim.slot >= 0) write_to_log(&victim, &victim + 1);
    std::vector<iovec> out, in;
    for (size_t i = first; i < last; ++i) add_range(out, address(batch.victims[i].block), block_bytes_);
    for (size_t i = batch.first_read_of(chunk); i < batch.first_read_of(chunk + 1); ++i)
      add_range(in, address(batch.reads[i].block), block_bytes_);
    window_->drop(out);
    window_->populate(in);
  } catch (...) {
    error = std::current_exception();
    return false;
  }
  return true;
}

// Reads blocks that are adjacent in the window and in the main file or the log.
void RowFile::read_run(Batch& batch, size_t first, size_t last, std::exception_ptr& error) {
  const Move& begin = batch.reads[first];
  const auto count = static_cast<int64_t>(last - first);
  try {
    if (begin.slot < 0) main_.read(begin.block, count, address(begin.block));
    else log_.read(begin.slot, count, address(begin.block));
    for (size_t i = first; i < last; ++i) {
      Move& read = batch.reads[i];
      read.done = checksum_of_(address(read.block)) == read.checksum;
      if (read.done) continue;
      window_->drop(read.block * block_bytes_, block_bytes_);
      if (!error) error = std::make_exception_ptr(damaged(read));
    }
  } catch (...) {
    for (size_t i = first; i < last; ++i) batch.reads[i].done = false;
    window_->drop(begin.block * block_bytes_, count * block_bytes_);
    if (!error) error = std::current_exception();
  }
}

SystemError RowFile::damaged(const Move& read) const {
  const int64_t offset = read.slot < 0 ? main_.offset(read.block) : log_.offset(read.slot);
  return corrupted(
      join("block ", read.block, " (bytes ", read.block * block_bytes_, " to ", (read.block + 1) * block_bytes_ - 1,
           " of the window), at byte ", offset, " of the file, is damaged: wrong checksum"),
      read.slot < 0 ? main_.path() : log_.path());
}

void RowFile::finish_chunk(Batch& batch, int64_t chunk, bool room, const std::exception_ptr& error) {
  const Lock lock(mutex_);
  for (size_t i = batch.first_read_of(chunk); i < batch.first_read_of(chunk + 1); ++i) {
    const Move& read = batch.reads[i];
    if (read.done) {
      table_.change(read.block, Flag::kResident, Flag::kMoving);
      ++counts_.blocks_read;
    } else {
      table_.change(read.block, 0, Flag::kMoving | Flag::kPrefetched | Flag::kReferenced);
      table_.release_frame(read.frame);
    }
  }
  for (size_t i = batch.first_victim_of(chunk); i < batch.first_victim_of(chunk + 1); ++i) {
    const Move& victim = batch.victims[i];
    if (victim.done) mark_written(victim);
    table_.change(victim.block, 0, room ? Flag::kMoving | Flag::kResident : Flag::kMoving);
    if (!room) table_.allocate_frame(victim.block);
  }
  if (error && !batch.error) batch.error = error;
  --batch.chunks_left;
  if (batch.in_background) --background_chunks_;
  chunk_finished_.notify_all();
}

// Writes blocks in adjacent slots with one call.
void RowFile::write_to_log(Move* first, Move* last) const {
  while (first < last) {
    std::vector<iovec> blocks;
    Move* end = first;
    do {
      end->checksum = checksum_of_(address(end->block));
      add_range(blocks, address(end->block), block_bytes_);
      ++end;
    } while (end < last && end->slot == end[-1].slot + 1);
    log_.write(first->slot, std::move(blocks));
    for (; first < end; ++first) first->done = true;
  }
}

void RowFile::mark_written(const Move& move) {
  log_.set_checksum(move.slot, move.checksum);
  table_.change(move.block, 0, Flag::kDirty);
  ++counts_.blocks_written;
}

// Calls work(first, last) for chunks of `count` entries on all threads; returns the first exception.
std::exception_ptr RowFile::in_chunks(int64_t count, const std::function<void(int64_t, int64_t)>& work) {
  std::exception_ptr error;
  const int64_t per_chunk = std::max<int64_t>(1, kChunkBytes / block_bytes_);
  pool_->run(ceil_div(count, per_chunk), [&](int64_t chunk) {
    try {
      work(chunk * per_chunk, std::min(count, (chunk + 1) * per_chunk));
    } catch (...) {
      const Lock guard(mutex_);
      if (!error) error = std::current_exception();
    }
  });
  return error;
}

// Writes all dirty blocks to the log; blocks that could not be written stay dirty.
void RowFile::write_dirty(Lock& lock) {
  std::vector<Move> moves;
  moves.reserve(static_cast<size_t>(table_.dirty()));
  log_.reserve(table_.dirty());
  for (const int64_t b : table_.dirty_blocks()) {
    moves.push_back({b});
    moves.back().slot = log_.assign(b);
  }
  // Sort by slot, to write adjacent slots together; blocks may be in another order.
  std::sort(moves.begin(), moves.end(), [](const Move& a, const Move& b) { return a.slot < b.slot; });
  lock.unlock();
  const std::exception_ptr error = in_chunks(static_cast<int64_t>(moves.size()), [&](int64_t first, int64_t last) {
    write_to_log(moves.data() + first, moves.data() + last);
  });
  lock.lock();
  for (const Move& move : moves)
    if (move.done) mark_written(move);
  if (error) std::rethrow_exception(error);
}

int64_t RowFile::flush(bool apply) {
  const Lock turn = begin_call();
  Lock lock(mutex_);
  wait_for_prefetches(lock);
  if (log_.committed()) copy_log_to_main(lock);
  log_.make_writable();
  write_dirty(lock);
  const int64_t generation = generation_ + 1;
  const uint64_t digest = main_.digest_with(log_.sorted_entries());
  lock.unlock();
  log_.write_commit(generation, digest);
  lock.lock();
  log_.set_committed(generation, digest);
  generation_ = generation;
  if (apply) copy_log_to_main(lock);
  return generation;
}

void RowFile::apply() {
  const Lock turn = begin_call();
  Lock lock(mutex_);
  wait_for_prefetches(lock);
  if (log_.committed()) copy_log_to_main(lock);
}

// Returns with the lock held. After an exception the lock is not held, and the log is still complete.
void RowFile::copy_log_to_main(Lock& lock) {
  const std::vector<LogEntry> entries = log_.sorted_entries();
  lock.unlock();
  main_.begin_overwriting(log_.generation());
  const std::exception_ptr error = in_chunks(static_cast<int64_t>(entries.size()), [&](int64_t first, int64_t last) {
    copy_entries(entries.data() + first, last - first);
  });
  if (error) std::rethrow_exception(error);
  main_.end_overwriting(entries, log_.digest());
  log_.truncate();
  lock.lock();
  log_.forget();
}

// Reads blocks into consecutive memory, adjacent slots with one call, and verifies them.
void RowFile::read_entries(const LogEntry* entries, int64_t count, uint8_t* to) const {
  for (int64_t i = 0, end = 0; i < count; i = end) {
    for (++end; end < count && entries[end].slot == entries[end - 1].slot + 1;) ++end;
    log_.read(entries[i].slot, end - i, to + i * block_bytes_);
  }
  for (int64_t i = 0; i < count; ++i)
    if (checksum_of_(to + i * block_bytes_) != entries[i].checksum)
      throw damaged({entries[i].block, -1, entries[i].slot});
}

// Verifies an existing log before using it: if it is damaged, the caller can still open the main file's generation.
void RowFile::check_log() {
  const std::vector<LogEntry> entries = log_.sorted_entries();
  main_.check_digest(entries, log_.digest());
  const std::exception_ptr error = in_chunks(static_cast<int64_t>(entries.size()), [&](int64_t first, int64_t last) {
    const std::unique_ptr<uint8_t[]> blocks(new uint8_t[static_cast<size_t>((last - first) * block_bytes_)]);
    read_entries(entries.data() + first, last - first, blocks.get());
  });
  if (error) std::rethrow_exception(error);
}

// Copies blocks from the log to the main file, adjacent blocks with one write.
void RowFile::copy_entries(const LogEntry* entries, int64_t count) const {
  const std::unique_ptr<uint8_t[]> blocks(new uint8_t[static_cast<size_t>(count * block_bytes_)]);
  read_entries(entries, count, blocks.get());
  for (int64_t i = 0, end = 0; i < count; i = end) {
    for (++end; end < count && entries[end].block == entries[end - 1].block + 1;) ++end;
    main_.write(entries[i].block, end - i, blocks.get() + i * block_bytes_);
  }
}

}  // namespace rec_kernels::host
