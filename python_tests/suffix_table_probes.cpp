// Counts probed slots of the table in csrc/jagged/cpu/suffix_table.h, which determine its time.
#include <utility>

#include "jagged/cpu/suffix_table.h"

namespace {

constexpr int64_t kIds = 4;
int64_t looked_at = 0;

template <class T>
class Counted {
 public:
  Counted() = default;
  explicit Counted(int64_t count) : memory_(new T[static_cast<size_t>(count)]) {}
  Counted(const Counted&) = delete;
  Counted& operator=(Counted&& other) noexcept {
    std::swap(memory_, other.memory_);
    return *this;
  }
  ~Counted() { delete[] memory_; }
  T* get() const { return memory_; }
  T& operator[](int64_t i) const {
    ++looked_at;
    return memory_[i];
  }

 private:
  T* memory_ = nullptr;
};

}  // namespace

// Searches and then inserts rows of kIds ids, as jagged_overlaps does.
extern "C" int64_t slots_looked_at(const int64_t* ids, int64_t rows) {
  looked_at = 0;
  rec_kernels::LastIds<Counted> last_ids(rows);
  for (int64_t r = 0; r < rows; ++r) {
    const uint64_t hash = rec_kernels::hash_ids<kIds>(ids + r * kIds);
    if (last_ids.find(hash) < 0) last_ids.put(hash, r);
  }
  return looked_at;
}
