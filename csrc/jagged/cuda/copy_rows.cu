// Gathers rows of a jagged tensor. Bytes moved: the offsets of all rows and of the selected ones, the start of each
// selected row written and read, and every selected value read and written once. A group of lanes copies a row in the
// widest words that all rows are aligned to.
#include <algorithm>

#include "core/cuda/device_algorithms.h"
#include "jagged/cuda/jagged.cuh"

namespace rec_kernels {
namespace {

__global__ void start_status_kernel(int64_t* status) {
  status[0] = kNoBadPosition;
  status[1] = 0;
}

struct LengthArgs {
  Bags rows;
  Integers index;
  int64_t count;
  int64_t* from;
  int64_t* lengths;  // [count + 1], the last one is 0
  int64_t* status;
};

__global__ void __launch_bounds__(kThreads) lengths_kernel(LengthArgs a) {
  note_offsets(a.rows, a.status);
  for (int64_t m = Group<1>::first(); m <= a.count; m += Group<1>::stride()) {
    Range r{0, 0};
    if (m < a.count) {
      const int64_t row = a.index[m];
      if (row < 0 || row >= a.rows.num_bags) note_left_out(a.status, m);
      else r = good_range(a.rows, row);
      a.from[m] = r.start;
    }
    a.lengths[m] = r.stop - r.start;
  }
}

struct CopyArgs {
  Integers rows;  // start of each row in the input
  int64_t count;
  const int64_t* starts;
  int64_t total;
  int64_t words;  // per value
  const void* from;
  void* to;
  IntegersOut offsets;  // null data: offsets are not written
  int64_t* status;
};

// `lanes` adjacent threads take a row.
template <class Word>
__global__ void __launch_bounds__(kThreads) copy_rows_kernel(CopyArgs a, int lanes) {
  const int64_t thread = Group<1>::first(), threads = Group<1>::stride();
  const int lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  for (int64_t m = thread / lanes; m < a.count; m += threads / lanes) {
    const int64_t start = a.starts[m], stop = a.starts[m + 1];
    if (lane == 0 && a.offsets.data) a.offsets.put(m, start < a.total ? start : a.total);
    if (stop == start) continue;  // also for an index out of range
    const int64_t from = a.rows[m] * a.words, to = start * a.words;
    const int64_t words = ((stop < a.total ? stop : a.total) - start) * a.words;
    for (int64_t w = lane; w < words; w += lanes) store_word(a.to, to + w, load_word<Word>(a.from, from + w));
  }
  const int64_t end = a.starts[a.count];
  for (int64_t w = end * a.words + thread; w < a.total * a.words; w += threads) store_word(a.to, w, Word{});
  if (thread > 0) return;
  if (a.offsets.data) a.offsets.put(a.count, end < a.total ? end : a.total);
  if (end != a.total) note_bad(a.status, a.count);
}

}  // namespace

Tensor new_jagged_status(const Tensor& like, cudaStream_t stream) {
  Tensor status = new_tensor(like, {2}, ScalarType::Long);
  launch_one(stream, start_status_kernel, status.mutable_data_ptr<int64_t>());
  return status;
}

Selection new_selection(int64_t count, const Tensor& from, int64_t* status, const char* name) {
  check_value(count < INT64_C(0xffffffff), name, " has ", count, " numbers; at most 2^32 - 2 fit in a call on a GPU");
  return {count, from, new_tensor(from, {count + 1}, ScalarType::Long), 0, status};
}

void place_rows(Selection& s, std::optional<int64_t> total, const Tensor& like, const char* name, cudaStream_t stream) {
  auto* starts = s.starts.mutable_data_ptr<int64_t>();
  exclusive_sum(starts, starts, s.count + 1, s.starts, stream);
  if (total) s.total = *total;
  else copy_to_host(&s.total, starts + s.count, sizeof(int64_t), stream);
  check_fits(s.total, like, name);
}

Selection select_rows(const Bags& rows, const Tensor& index, const Tensor& offsets, std::optional<int64_t> total,
                      int64_t* status, cudaStream_t stream) {
  const int64_t count = index.size(0);
  Selection out = new_selection(count, new_tensor(index, {count}, ScalarType::Long), status, "index");
  const LengthArgs args{
      rows,  Integers(index), count, out.from.mutable_data_ptr<int64_t>(), out.starts.mutable_data_ptr<int64_t>(),
      status};
  launch_for(std::max(count, rows.num_bags) + 1, 1, stream, lengths_kernel, args);
  place_rows(out, total, offsets, "offsets", stream);
  return out;
}

void copy_rows(const Selection& s, const Tensor& values, int64_t columns, const Tensor& output,
               const OptionalTensor& output_offsets, cudaStream_t stream) {
  const auto bytes = columns * static_cast<int64_t>(values.element_size());
  const int64_t word = word_bytes(bytes, values.const_data_ptr(), output.const_data_ptr());
  const IntegersOut offsets = output_offsets ? integers_out(*output_offsets) : IntegersOut{nullptr, false};
  const CopyArgs args{Integers(s.from),
                      s.count,
                      s.starts.const_data_ptr<int64_t>(),
                      s.total,
                      bytes / word,
                      values.const_data_ptr(),
                      output.mutable_data_ptr(),
                      offsets,
                      s.status};
  // One lane per word of a row of average length.
  const int lanes = lanes_for(4 * ceil_div(s.total * args.words, std::max<int64_t>(s.count, 1)));
  with_word(word, [&](auto unit) {
    launch_for(std::max<int64_t>(s.count, 1), lanes, stream, copy_rows_kernel<decltype(unit)>, args, lanes);
  });
}

std::tuple<Tensor, Tensor> copied_rows(const Selection& s, const Tensor& values, const Tensor& like,
                                       cudaStream_t stream) {
  Tensor output = new_rows(values, s.total);
  Tensor output_offsets = new_tensor(like, {s.count + 1}, like.scalar_type());
  copy_rows(s, values, values.dim() == 2 ? values.size(1) : 1, output, output_offsets, stream);
  return {output, output_offsets};
}

}  // namespace rec_kernels
