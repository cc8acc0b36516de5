#include "host/row_file.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "host/row_file_batch.h"

namespace rec_kernels::host {
namespace {

using Flag = BlockTable::Flag;

constexpr int64_t kMostThreads = 256;

void check_threads(int64_t threads) {
  check_value(threads >= 1 && threads <= kMostThreads, "threads is ", threads, ", allowed are 1 to ", kMostThreads);
}

int64_t checked_capacity(int64_t memory_budget, int64_t block_bytes) {
  check_value(memory_budget >= block_bytes, "memory_budget is ", memory_budget,
              " bytes, allowed is at least a block: ", block_bytes, " bytes");
  return memory_budget / block_bytes;
}

int64_t distinct_blocks(std::vector<Span> spans) {
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.first < b.first; });
  int64_t count = 0, end = 0;
  for (const Span& s : spans) {
    count += std::max<int64_t>(0, s.last + 1 - std::max(s.first, end));
    end = std::max(end, s.last + 1);
  }
  return count;
}

}  // namespace

RowFile::RowFile(BlockFile main, int64_t memory_budget, int64_t threads)
    : main_(std::move(main)),
      block_bytes_(main_.block_bytes()),
      memory_budget_(memory_budget),
      checksum_of_(block_bytes_),
      window_(std::make_shared<Window>(main_.num_blocks() * block_bytes_)),
      process_(::getpid()),
      table_(main_.num_blocks(), std::min(checked_capacity(memory_budget, block_bytes_), main_.num_blocks())),
      pool_(std::make_unique<IoPool>(threads)),
      log_(main_) {}

std::unique_ptr<RowFile> RowFile::create(const std::string& path, int64_t num_bytes, int64_t block_bytes,
                                         const std::string& layout, int64_t memory_budget, int64_t threads) {
  check_threads(threads);
  BlockFile::check_sizes(num_bytes, block_bytes);
  checked_capacity(memory_budget, block_bytes);
  BlockFile main = BlockFile::create(path, num_bytes, block_bytes, layout);
  try {
    std::unique_ptr<RowFile> file(new RowFile(std::move(main), memory_budget, threads));
    file->log_.discard();  // discard the log of an earlier, deleted file of this name
    file->owns_log_ = true;
    return file;
  } catch (...) {
    ::unlink(path.c_str());
    throw;
  }
}

std::unique_ptr<RowFile> RowFile::open(const std::string& path, const std::string& layout, int64_t memory_budget,
                                       int64_t threads, std::optional<int64_t> generation) {
  check_threads(threads);
  std::unique_ptr<RowFile> file(new RowFile(BlockFile::open(path, layout), memory_budget, threads));
  file->recover(generation);
  return file;
}

// Chooses between the generation of the main file and the next one, in a committed log.
void RowFile::recover(std::optional<int64_t> generation) {
  const int64_t in_main = main_.generation();
  const std::optional<int64_t> in_log = log_.find_commit();
  const bool begun = main_.being_overwritten();
  if (begun && in_log != in_main)
    throw corrupted(join("the log does not have generation ", in_main, ", which was being copied into ", path()),
                    log_.path());
  check_value(begun || !in_log || *in_log <= in_main + 1, log_.path(), " has generation ", in_log.value_or(0), ", but ",
              path(), " has ", in_main, ": they do not belong together; move the log away to continue without it");
  const bool next = !begun && in_log && *in_log == in_main + 1;
  check_value(!generation || *generation == in_main || (next && *generation == in_main + 1), "generation is ",
              generation.value_or(0), ", but ", path(), " has ", in_main,
              next    ? join(" and, in its log, ", in_main + 1)
              : begun ? " only, in its log"
                      : " only");
  const bool newest = next && generation != in_main;
  if (begun || newest) log_.adopt();
  else log_.discard();
  if (newest) check_log();  // not applied yet: the caller may still decide to open the previous generation
  if (begun) {
    Lock lock(mutex_);
    copy_log_to_main(lock);
  }
  generation_ = log_.committed() ? log_.generation() : main_.generation();
  owns_log_ = true;
}

RowFile::~RowFile() { close(); }

bool RowFile::is_owner_process() const { return ::getpid() == process_; }

// In a forked process, a thread that does not exist there may hold the lock forever.
RowFile::Lock RowFile::locked(std::mutex& mutex) const {
  if (!is_owner_process())
    throw std::runtime_error(join("the row file ", path(), " was opened by process ", process_,
                                  ", and this process was forked from it: open the file after forking"));
  return Lock(mutex);
}

RowFile::Lock RowFile::begin_call() {
  Lock turn = locked(turn_);
  check_value(!closed(), "the row file ", path(), " is closed");
  return turn;
}

std::vector<Span> RowFile::spans(const int64_t* starts, const int64_t* sizes, int64_t n, bool one_size) const {
  std::vector<Span> spans;
  spans.reserve(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) {
    const int64_t start = starts[i], size = sizes[one_size ? 0 : i];
    check_value(size >= 0, "sizes", one_size ? "" : join("[", i, "]"), " is ", size, ", allowed is at least 0");
    if (start < 0 || start > num_bytes() || size > num_bytes() - start)
      throw std::out_of_range(
          join("starts[", i, "] = ", start, " with size ", size, " is outside the window of ", num_bytes(), " bytes"));
    if (size == 0) continue;
    const Span span{start / block_bytes_, (start + size - 1) / block_bytes_};
    if (spans.empty() || span.first != spans.back().first || span.last != spans.back().last) spans.push_back(span);
  }
  return spans;
}

// Marks the distinct blocks that a call needs and returns them; stops after one more than the capacity.
std::vector<int64_t> RowFile::mark_wanted(const std::vector<Span>& spans) {
  int64_t most = 0;
  for (const Span& span : spans) most = std::min(most + span.last + 1 - span.first, table_.capacity());
  std::vector<int64_t> wanted;
  wanted.reserve(static_cast<size_t>(most) + 1);
  for (const Span& span : spans)
    for (int64_t b = span.first; b <= span.last; ++b) {
      if (table_.has(b, Flag::kWanted)) continue;
      if (static_cast<int64_t>(wanted.size()) > table_.capacity()) return wanted;
      wanted.push_back(b);
      table_.change(b, Flag::kWanted, 0);
    }
  return wanted;
}

void RowFile::clear_wanted(const std::vector<int64_t>& wanted) {
  for (const int64_t b : wanted) table_.change(b, 0, Flag::kWanted);
}

int64_t RowFile::count(const std::vector<int64_t>& blocks, uint8_t any) const {
  return std::count_if(blocks.begin(), blocks.end(), [&](int64_t b) { return table_.has(b, any); });
}

// Throws BudgetError if the wanted blocks and `others` held ones exceed the capacity.
void RowFile::check_budget(const char* call, const std::vector<Span>& spans, const std::vector<int64_t>& wanted,
                           int64_t others) const {
  if (static_cast<int64_t>(wanted.size()) + others <= table_.capacity()) return;
  const int64_t need = distinct_blocks(spans);
  const std::string held =
      others == 0 ? "" : join(" in addition to ", others * block_bytes_, " bytes held by other calls");
  throw BudgetError(join(call, " needs ", need * block_bytes_, " bytes of memory (", need, " blocks of ", block_bytes_,
                         " bytes)", held, ", but memory_budget is ", memory_budget_, " bytes"));
}

// Dirty blocks can be evicted to the log only after its commit, if any, has been applied.
void RowFile::prepare_log(Lock& lock, const std::vector<int64_t>& wanted) {
  const int64_t arriving = std::count_if(wanted.begin(), wanted.end(), [&](int64_t b) {
    return !table_.has(b, Flag::kResident) || table_.has(b, Flag::kMoving);
  });
  if (arriving <= table_.free_frames() || table_.dirty() == 0) return;
  if (log_.committed()) {
    wait_for_prefetches(lock);
    copy_log_to_main(lock);
  }
  log_.make_writable();
}

void RowFile::load(const std::vector<Span>& spans, bool write) {
  const Lock turn = begin_call();
  Lock lock(mutex_);
  std::vector<int64_t> wanted = mark_wanted(spans);
  try {
    check_budget("load", spans, wanted, table_.prefetched() - count(wanted, Flag::kPrefetched));
    prepare_log(lock, wanted);
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    clear_wanted(wanted);
    throw;
  }
  // The load cannot be refused any more: unpin the blocks of the previous one.
  release_pins();
  ++counts_.loads;
  counts_.hits += count(wanted, Flag::kResident | Flag::kMoving);
  for (const int64_t b : wanted) table_.change(b, Flag::kPinned | Flag::kReferenced, Flag::kWanted | Flag::kPrefetched);
  pinned_ = std::move(wanted);
  const auto used = [&](int64_t b) { return !table_.has(b, Flag::kPrefetched); };
  prefetched_.erase(std::remove_if(prefetched_.begin(), prefetched_.end(), used), prefetched_.end());
  try {
    load_pinned(lock);
  } catch (...) {
    wait_for_prefetches(lock);  // blocks that are being read cannot be evicted, so wait for them
    release_pins();
    throw;
  }
  if (write)
    for (const int64_t b : pinned_) table_.change(b, Flag::kDirty, 0);
}

// Loads pinned blocks that are not resident.
void RowFile::load_pinned(Lock& lock) {
  for (;;) {
    const std::shared_ptr<Batch> batch = plan(pinned_);
    if (batch) {
      lock.unlock();
      pool_->run(batch->num_chunks(), [this, &batch](int64_t chunk) { execute(*batch, chunk); });
      lock.lock();
    }
    // Wait for blocks that a prefetch is moving; the next iteration loads those that it evicted or failed to read.
    for (const int64_t b : pinned_) chunk_finished_.wait(lock, [&] { return !table_.has(b, Flag::kMoving); });
    if (batch && batch->error) std::rethrow_exception(batch->error);
    if (count(pinned_, Flag::kResident) == static_cast<int64_t>(pinned_.size())) return;
  }
}

void RowFile::release_pins() {
  for (const int64_t b : pinned_) table_.change(b, 0, Flag::kPinned);
  pinned_.clear();
}

void RowFile::prefetch(const std::vector<Span>& spans) {
  const Lock turn = begin_call();
  Lock lock(mutex_);
  const std::vector<int64_t> wanted = mark_wanted(spans);
  try {
    check_budget("prefetch", spans, wanted, table_.held() - count(wanted, Flag::kPinned | Flag::kPrefetched));
    prepare_log(lock, wanted);
    prefetched_.reserve(prefetched_.size() + wanted.size());
    in_flight_.reserve(in_flight_.size() + 1);
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    clear_wanted(wanted);
    throw;
  }
  // Wait until victims of an earlier prefetch have been written out; this is rare and takes one write.
  for (const int64_t b : wanted)
    chunk_finished_.wait(lock, [&] { return !table_.has(b, Flag::kResident) || !table_.has(b, Flag::kMoving); });
  for (const int64_t b : wanted) {
    if (!table_.has(b, Flag::kPrefetched)) prefetched_.push_back(b);
    table_.change(b, Flag::kPrefetched | Flag::kReferenced, Flag::kWanted);
  }
  const std::shared_ptr<Batch> batch = plan(wanted);
  if (!batch) return;
  batch->in_background = true;
  counts_.prefetched += static_cast<int64_t>(batch->reads.size());
  const auto ended = [](const std::shared_ptr<Batch>& b) { return b->chunks_left == 0; };
  in_flight_.erase(std::remove_if(in_flight_.begin(), in_flight_.end(), ended), in_flight_.end());
  in_flight_.push_back(batch);
  background_chunks_ += batch->chunks_left;
  try {
    pool_->start(batch->num_chunks(), [this, batch](int64_t chunk) { execute(*batch, chunk); });
  } catch (...) {  // cancel everything that was planned
    batch->cancelled = true;
    lock.unlock();
    for (int64_t chunk = 0; chunk < batch->num_chunks(); ++chunk) execute(*batch, chunk);
    throw;
  }
}

void RowFile::cancel_prefetch() {
  const Lock turn = begin_call();
  Lock lock(mutex_);
  end_prefetch(lock);
}

void RowFile::end_prefetch(Lock& lock) {
  for (const std::shared_ptr<Batch>& batch : in_flight_) batch->cancelled = true;
  wait_for_prefetches(lock);
  for (const int64_t b : prefetched_) table_.change(b, 0, Flag::kPrefetched);
  prefetched_.clear();
}

void RowFile::unpin() {
  const Lock turn = begin_call();
  const Lock lock(mutex_);
  release_pins();
}

void RowFile::mark_dirty(const std::vector<Span>& spans) {
  const Lock turn = begin_call();
  const Lock lock(mutex_);
  const std::vector<int64_t> wanted = mark_wanted(spans);
  clear_wanted(wanted);
  for (const int64_t b : wanted)
    check_value(table_.has(b, Flag::kPinned), "mark_dirty: block ", b, " (bytes ", b * block_bytes_, " to ",
                (b + 1) * block_bytes_ - 1, " of the window) is not loaded; call load for it first");
  for (const int64_t b : wanted) table_.change(b, Flag::kDirty, 0);
}

void RowFile::wait_for_prefetches(Lock& lock) {
  chunk_finished_.wait(lock, [&] { return background_chunks_ == 0; });
  in_flight_.clear();
}

void RowFile::close() {
  const Lock turn = locked(turn_);
  Lock lock(mutex_);
  if (closed_) return;
  end_prefetch(lock);
  counts_.resident_bytes = counts_.dirty_bytes = 0;
  closed_ = true;
  lock.unlock();
  pool_.reset();
  try {
    if (owns_log_ && !log_.committed()) log_.truncate();
  } catch (const std::exception&) {  // a log without a commit is ignored anyway
  }
  window_->drop(0, main_.num_blocks() * block_bytes_);
  log_.close();
  main_.close();
}

bool RowFile::closed() const {
  const Lock lock = locked(mutex_);
  return closed_;
}

int64_t RowFile::generation() const {
  const Lock lock = locked(mutex_);
  return generation_;
}

RowFileStats RowFile::stats() const {
  const Lock lock = locked(mutex_);
  RowFileStats stats = counts_;
  if (closed_) return stats;
  stats.resident_bytes = table_.resident() * block_bytes_;
  stats.dirty_bytes = table_.dirty() * block_bytes_;
  stats.log_bytes = log_.bytes();
  const size_t lists = (pinned_.capacity() + prefetched_.capacity()) * sizeof(int64_t);
  stats.bookkeeping_bytes =
      static_cast<int64_t>(lists) + table_.bookkeeping_bytes() + main_.bookkeeping_bytes() + log_.bookkeeping_bytes();
  return stats;
}

}  // namespace rec_kernels::host
