// Thread pool for blocking I/O.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace rec_kernels::host {

class IoPool {
 public:
  // Called with 0, 1, ... count - 1, once each, on several threads. It must not throw.
  using Work = std::function<void(int64_t)>;

  explicit IoPool(int64_t threads);
  ~IoPool();  // waits for started work
  IoPool(const IoPool&) = delete;
  IoPool& operator=(const IoPool&) = delete;

  int64_t threads() const { return static_cast<int64_t>(threads_.size()); }
  // Runs a job ahead of the queue, also on the calling thread, and returns when it is done. Never throws: if it cannot
  // allocate the job, the caller does all the work.
  void run(int64_t count, const Work& work) noexcept;
  // Appends a job to the queue and returns at once. If it throws, no part of the job has started.
  void start(int64_t count, Work work);

 private:
  struct Job {
    Work work;
    int64_t count;
    std::atomic<int64_t> next{0}, left;
    Job(Work w, int64_t n) : work(std::move(w)), count(n), left(n) {}
  };

  void enqueue(const std::shared_ptr<Job>& job, bool first, int64_t helpers);
  void help(Job& job);
  void serve();
  void remove(const std::shared_ptr<Job>& job);
  void stop();

  std::mutex mutex_;
  std::condition_variable queued_, done_;
  std::deque<std::shared_ptr<Job>> jobs_;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace rec_kernels::host
