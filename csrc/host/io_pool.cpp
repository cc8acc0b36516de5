#include "host/io_pool.h"

#include <algorithm>
#include <new>

namespace rec_kernels::host {

IoPool::IoPool(int64_t threads) {
  threads_.reserve(static_cast<size_t>(threads));
  try {
    for (int64_t i = 0; i < threads; ++i) threads_.emplace_back([this] { serve(); });
  } catch (...) {
    stop();
    throw;
  }
}

IoPool::~IoPool() { stop(); }

void IoPool::stop() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  queued_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void IoPool::enqueue(const std::shared_ptr<Job>& job, bool first, int64_t helpers) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (first) jobs_.push_front(job);
    else jobs_.push_back(job);
  }
  for (int64_t i = std::min(helpers, threads()); i > 0; --i) queued_.notify_one();
}

void IoPool::run(int64_t count, const Work& work) noexcept {
  std::shared_ptr<Job> job;
  try {
    if (count > 1) {
      job = std::make_shared<Job>(work, count);
      enqueue(job, true, count - 1);
    }
  } catch (const std::bad_alloc&) {
    job = nullptr;
  }
  if (!job) {
    for (int64_t i = 0; i < count; ++i) work(i);
    return;
  }
  help(*job);
  std::unique_lock<std::mutex> lock(mutex_);
  remove(job);
  done_.wait(lock, [&] { return job->left.load(std::memory_order_acquire) == 0; });
}

void IoPool::start(int64_t count, Work work) {
  if (count > 0) enqueue(std::make_shared<Job>(std::move(work), count), false, count);
}

void IoPool::help(Job& job) {
  for (int64_t i; (i = job.next.fetch_add(1, std::memory_order_relaxed)) < job.count;) {
    job.work(i);
    if (job.left.fetch_sub(1, std::memory_order_acq_rel) > 1) continue;
    const std::lock_guard<std::mutex> lock(mutex_);  // otherwise run() could miss the notification
    done_.notify_all();
  }
}

void IoPool::serve() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    queued_.wait(lock, [&] { return stopping_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    const std::shared_ptr<Job> job = jobs_.front();
    lock.unlock();
    help(*job);
    lock.lock();
    remove(job);
  }
}

// Removes a job whose items have all started from the queue, unless another thread already has.
void IoPool::remove(const std::shared_ptr<Job>& job) {
  const auto place = std::find(jobs_.begin(), jobs_.end(), job);
  if (place != jobs_.end()) jobs_.erase(place);
}

}  // namespace rec_kernels::host
