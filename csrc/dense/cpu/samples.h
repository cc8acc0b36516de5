// Converts tensors of any float dtype to float32 per batch of samples, for kernels that take float32.
#pragma once

#include <algorithm>

#include "core/cpu/parallel.h"
#include "core/cpu/scratch.h"
#include "core/cpu/simd.h"
#include "rows/cpu/row_formats.h"
#include "rows/row_formats.h"

namespace rec_kernels {

// Samples per conversion batch: a multiple of the lanes of every instruction set, for kernels whose lanes are samples.
constexpr int64_t kSamplesPerBatch = 16;

// Float data of samples, each contiguous.
struct Samples {
  Tensor tensor;
  int64_t stride, elements;  // elements between samples, elements per sample
};

inline Samples samples_of(const Tensor& t) {
  int64_t elements = 1;
  bool contiguous = true;
  const auto strides = t.strides();
  for (int64_t i = t.dim() - 1; i > 0; elements *= t.size(i--))
    contiguous &= t.size(i) == 1 || strides[static_cast<size_t>(i)] == elements;
  if (contiguous) return {t, strides[0], elements};
  return {as_contiguous(t), elements, elements};
}

// Samples of any float dtype as float32: in place, or converted into a buffer.
class Floats {
 public:
  explicit Floats(const Samples& samples)
      : format_(float_format(samples.tensor.scalar_type())),
        data_(const_cast<char*>(static_cast<const char*>(samples.tensor.const_data_ptr()))),
        stride_(samples.stride),
        elements_(samples.elements) {}

  bool plain() const { return format_ == RowFormat::kFp32; }
  int64_t memory() const { return plain() ? 0 : kSamplesPerBatch * elements_; }
  int64_t stride() const { return plain() ? stride_ : elements_; }
  // Reads `count` samples starting at `first`, at most kSamplesPerBatch.
  const float* read(int64_t first, int64_t count, float* memory) const {
    if (plain()) return reinterpret_cast<const float*>(data_) + first * stride_;
    const auto decode = kernels<RowFormatKernels>().decode[static_cast<int>(format_)];
    for (int64_t s = 0; s < count; ++s) {
      prefetch_bytes(place(first + count + s), elements_ * 2);  // prefetch the next batch
      decode(place(first + s), 1, elements_, memory + s * elements_);
    }
    return memory;
  }
  // Returns memory to fill; write() with the same arguments stores it.
  float* open(int64_t first, float* memory) const {
    return plain() ? reinterpret_cast<float*>(data_) + first * stride_ : memory;
  }
  void write(int64_t first, int64_t count, const float* memory) const {
    if (plain() || elements_ == 0) return;
    const RowPlaces places{place(first), 0, nullptr};
    kernels<RowFormatKernels>().nearest[static_cast<int>(format_)](memory, count, elements_, RowRounding{}, places);
  }

 private:
  uint8_t* place(int64_t sample) const { return reinterpret_cast<uint8_t*>(data_) + sample * stride_ * 2; }

  RowFormat format_;
  char* data_;  // written only through open() and write(), for tensors that the caller created
  int64_t stride_, elements_;
};

// Calls body(first, count, memory) in parallel for blocks of `block` samples, the last one possibly smaller, with
// scratch memory of this many floats. `products`: multiplications per sample.
template <class Body>
void for_samples(int64_t B, int64_t block, int64_t products, int64_t floats, const Body& body) {
  constexpr int64_t kLeastProducts = 1 << 18;  // per worker: about ten microseconds
  const int64_t blocks = ceil_div(B, block),
                workers = workers_for(blocks, 1 + kLeastProducts / (block * (products + 1)));
  // Round up to whole cache lines per worker.
  const int64_t each = ceil_div(floats, 16) * 16;
  const Scratch<float> memory(workers * each);
  parallel_shares(blocks, workers, [&](int64_t begin, int64_t end, int64_t worker) {
    for (int64_t b = begin; b < end; ++b) body(b * block, std::min(block, B - b * block), memory.get() + worker * each);
  });
}

}  // namespace rec_kernels
