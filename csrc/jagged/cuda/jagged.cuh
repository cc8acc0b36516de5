// Shared parts of the CUDA kernels for jagged rows: the status, and copies of rows.
#pragma once

#include <tuple>
#include <vector>

#include "core/cuda/to_gpu.cuh"
#include "core/cuda/words.cuh"
#include "embedding_bag/cuda/input.cuh"
#include "jagged/jagged.h"

namespace rec_kernels {
inline namespace RK_ISA {

// Blocks that a multiprocessor holds at least: told nothing, the compiler spills a little to make room for one more.
constexpr int kResidentBlocks = 4;

// Notes which offsets are bad; by all threads of a grid.
__device__ __forceinline__ void note_offsets(const Bags& rows, int64_t* status) {
  for (int64_t i = Group<1>::first(); i <= rows.num_bags; i += Group<1>::stride()) {
    const int64_t least = i > 0 ? rows.offset(i - 1) : 0, offset = rows.offset(i);
    if (offset < least || offset > rows.num_ids) note_bad(status, kBadLayout + 1 + i);
  }
}

// Values [start, stop) of a row; none of a row whose offsets are bad.
__device__ __forceinline__ Range good_range(const Bags& rows, int64_t row) {
  const Range r = {rows.offset(row), rows.offset(row + 1)};
  return r.start < 0 || r.stop < r.start || r.stop > rows.num_ids ? Range{0, 0} : r;
}

// Writes integers of either width.
struct IntegersOut {
  void* data;
  bool wide;

  __device__ __forceinline__ void put(int64_t i, int64_t x) const {
    if (wide) static_cast<int64_t*>(data)[i] = x;
    else static_cast<int32_t*>(data)[i] = static_cast<int32_t>(x);
  }
};

}  // namespace RK_ISA

inline IntegersOut integers_out(const Tensor& t) { return {t.mutable_data_ptr(), t.scalar_type() == ScalarType::Long}; }

// A status with nothing noted, on the stream.
Tensor new_jagged_status(const Tensor& like, cudaStream_t stream);

// Rows to be copied, each of which is a part of `values`.
struct Selection {
  int64_t count;  // M rows
  Tensor from;    // [M] int32 or int64: where they begin in the input; of an empty one anything
  Tensor starts;  // [M + 1] int64: where they begin in the output, and end
  int64_t total;  // values of the output, which may be fewer or more than these rows have
  int64_t* status;
};

// Makes a selection whose `from` and `starts` the caller fills: `starts` with the rows' lengths first, and a 0 behind
// them.
Selection new_selection(int64_t count, const Tensor& from, int64_t* status, const char* name);
// Turns lengths into starts. Waits for the GPU unless `total` is known. The output's offsets must fit the dtype of
// argument `name`, `like`.
void place_rows(Selection& selection, std::optional<int64_t> total, const Tensor& like, const char* name,
                cudaStream_t stream);
// The rows of a jagged tensor that `index` names. Notes bad offsets and numbers out of range.
Selection select_rows(const Bags& rows, const Tensor& index, const Tensor& offsets, std::optional<int64_t> total,
                      int64_t* status, cudaStream_t stream);
// Copies the values of the rows, `columns` elements each; what does not fit is left out, and the rest is zeros. Writes
// the offsets, too, if there are any to write, and notes a wrong total.
void copy_rows(const Selection& selection, const Tensor& values, int64_t columns, const Tensor& output,
               const OptionalTensor& output_offsets, cudaStream_t stream);
// Copies rows into new tensors: the output, and its offsets of the dtype of `like`.
std::tuple<Tensor, Tensor> copied_rows(const Selection& selection, const Tensor& values, const Tensor& like,
                                       cudaStream_t stream);

}  // namespace rec_kernels
