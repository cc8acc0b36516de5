// Helpers of the CUDA kernels for jagged rows: the status, and copies of rows.
#pragma once

#include <tuple>
#include <vector>

#include "core/cuda/to_gpu.cuh"
#include "core/cuda/words.cuh"
#include "embedding_bag/cuda/input.cuh"
#include "jagged/jagged.h"

namespace rec_kernels {
inline namespace RK_ISA {

// Minimum resident blocks for __launch_bounds__; without it, nvcc spills to fit one more.
constexpr int kResidentBlocks = 4;

// Records bad offsets, with all threads of the grid.
__device__ __forceinline__ void note_offsets(const Bags& rows, int64_t* status) {
  for (int64_t i = Group<1>::first(); i <= rows.num_bags; i += Group<1>::stride()) {
    const int64_t least = i > 0 ? rows.offset(i - 1) : 0, offset = rows.offset(i);
    if (offset < least || offset > rows.num_ids) note_bad(status, kBadLayout + 1 + i);
  }
}

// Values [start, stop) of a row; empty for bad offsets.
__device__ __forceinline__ Range good_range(const Bags& rows, int64_t row) {
  const Range r = {rows.offset(row), rows.offset(row + 1)};
  return r.start < 0 || r.stop < r.start || r.stop > rows.num_ids ? Range{0, 0} : r;
}

// Destination of int32 or int64 values.
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

// Returns a status without errors, initialized on the stream.
Tensor new_jagged_status(const Tensor& like, cudaStream_t stream);

// Rows to copy, each a range of `values`.
struct Selection {
  int64_t count;  // M, number of rows
  Tensor from;    // [M] int32 or int64: start of each row in the input; undefined for empty rows
  Tensor starts;  // [M + 1] int64: start of each row in the output, and the end
  int64_t total;  // size of the output, which may differ from the total length of the rows
  int64_t* status;
};

// Allocates a selection. The caller fills `from`, and `starts` with the rows' lengths followed by 0.
Selection new_selection(int64_t count, const Tensor& from, int64_t* status, const char* name);
// Converts lengths to starts by a prefix sum. Synchronizes with the GPU unless `total` is known. Output offsets must
// fit the dtype of `like`, argument `name`.
void place_rows(Selection& selection, std::optional<int64_t> total, const Tensor& like, const char* name,
                cudaStream_t stream);
// Selects the rows of a jagged tensor given by `index`. Records bad offsets and indices out of range.
Selection select_rows(const Bags& rows, const Tensor& index, const Tensor& offsets, std::optional<int64_t> total,
                      int64_t* status, cudaStream_t stream);
// Copies the values of the rows, `columns` elements each. Values that do not fit are dropped; the rest of the output is
// zeros. Also writes the offsets, unless null, and records a wrong total.
void copy_rows(const Selection& selection, const Tensor& values, int64_t columns, const Tensor& output,
               const OptionalTensor& output_offsets, cudaStream_t stream);
// Copies rows into new tensors: the output, and its offsets of the dtype of `like`.
std::tuple<Tensor, Tensor> copied_rows(const Selection& selection, const Tensor& values, const Tensor& like,
                                       cudaStream_t stream);

}  // namespace rec_kernels
