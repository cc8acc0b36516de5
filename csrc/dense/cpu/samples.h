// Tensors of any float dtype, sample by sample, for kernels that take float32.
#pragma once

#include <algorithm>

#include "core/cpu/parallel.h"
#include "core/cpu/scratch.h"
#include "core/cpu/simd.h"
#include "rows/cpu/row_formats.h"
#include "rows/row_formats.h"

namespace rec_kernels {

// Samples that are widened together: whole registers of every instruction set, for kernels whose lanes are samples.
constexpr int64_t kSamplesAtOnce = 16;

// The numbers of samples, contiguous within each.
struct Samples {
  Tensor tensor;
  int64_t stride, numbers;  // from one to the next, of each
};

inline Samples samples_of(const Tensor& t) {
  int64_t numbers = 1;
  bool contiguous = true;
  const auto strides = t.strides();
  for (int64_t i = t.dim() - 1; i > 0; numbers *= t.size(i--))
    contiguous &= t.size(i) == 1 || strides[static_cast<size_t>(i)] == numbers;
  if (contiguous) return {t, strides[0], numbers};
  return {as_contiguous(t), numbers, numbers};
}

// Samples of any float dtype as the kernels take them, float32: where they lie, or widened into memory.
class Floats {
 public:
  explicit Floats(const Samples& samples)
      : format_(float_format(samples.tensor.scalar_type())),
        data_(const_cast<char*>(static_cast<const char*>(samples.tensor.const_data_ptr()))),
        stride_(samples.stride),
        numbers_(samples.numbers) {}

  bool plain() const { return format_ == RowFormat::kFp32; }
  int64_t memory() const { return plain() ? 0 : kSamplesAtOnce * numbers_; }
  int64_t stride() const { return plain() ? stride_ : numbers_; }
  // Reads `count` samples from `first` on, at most kSamplesAtOnce.
  const float* read(int64_t first, int64_t count, float* memory) const {
    if (plain()) return reinterpret_cast<const float*>(data_) + first * stride_;
    const auto decode = kernels<RowFormatKernels>().decode[static_cast<int>(format_)];
    for (int64_t s = 0; s < count; ++s) {
      prefetch_bytes(place(first + count + s), numbers_ * 2);  // of the samples that are read next
      decode(place(first + s), 1, numbers_, memory + s * numbers_);
    }
    return memory;
  }
  // Memory to fill; write() with the same arguments stores it.
  float* open(int64_t first, float* memory) const {
    return plain() ? reinterpret_cast<float*>(data_) + first * stride_ : memory;
  }
  void write(int64_t first, int64_t count, const float* memory) const {
    if (plain() || numbers_ == 0) return;
    const RowPlaces places{place(first), 0, nullptr};
    kernels<RowFormatKernels>().nearest[static_cast<int>(format_)](memory, count, numbers_, RowRounding{}, places);
  }

 private:
  uint8_t* place(int64_t sample) const { return reinterpret_cast<uint8_t*>(data_) + sample * stride_ * 2; }

  RowFormat format_;
  char* data_;  // written to by way of open() and write() only, whose callers have made the tensor
  int64_t stride_, numbers_;
};

// body(first, count, memory) for samples [first, first + count), `block` of them but for the last, with so many floats
// of scratch memory. `products` are the multiplications of a sample.
template <class Body>
void for_samples(int64_t B, int64_t block, int64_t products, int64_t floats, const Body& body) {
  constexpr int64_t kLeastProducts = 1 << 18;  // of a worker: some ten microseconds
  const int64_t blocks = ceil_div(B, block),
                workers = workers_for(blocks, 1 + kLeastProducts / (block * (products + 1)));
  // Whole cache lines for each worker.
  const int64_t each = ceil_div(floats, 16) * 16;
  const Scratch<float> memory(workers * each);
  parallel_shares(blocks, workers, [&](int64_t begin, int64_t end, int64_t worker) {
    for (int64_t b = begin; b < end; ++b) body(b * block, std::min(block, B - b * block), memory.get() + worker * each);
  });
}

}  // namespace rec_kernels
