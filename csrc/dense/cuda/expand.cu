// expand: out[b, :] = x[inverse[b], :]. Bytes moved: a row read and written per index. Each thread copies one word, 16
// bytes if rows are aligned, so that accesses are coalesced and no lane is idle for any D. The backward is a segment
// sum.
#include <algorithm>

#include "core/boxing.h"
#include "core/division.h"
#include "dense/expand.h"
#include "embedding_bag/cuda/sum_rows.cuh"
#include "jagged/cuda/jagged.cuh"

namespace rec_kernels {
namespace {

struct ExpandArgs {
  const void* x;
  Integers inverse;
  void* out;
  int64_t rows;   // rows of x
  int64_t count;  // rows of out
  int64_t words;  // total words of out
  Divisor row_words;
  int64_t* status;
};

template <class Word>
__global__ void __launch_bounds__(kThreads) expand_kernel(ExpandArgs a) {
  for (int64_t b = Group<1>::first(); b < a.count; b += Group<1>::stride())
    if (static_cast<uint64_t>(a.inverse[b]) >= static_cast<uint64_t>(a.rows)) note_left_out(a.status, b);
  for (int64_t w = Group<1>::first(); w < a.words; w += Group<1>::stride()) {
    const int64_t b = a.row_words.divide(w), row = a.inverse[b];
    const bool good = static_cast<uint64_t>(row) < static_cast<uint64_t>(a.rows);
    const int64_t place = w - b * a.row_words.value;
    store_word(a.out, w, good ? load_word<Word>(a.x, row * a.row_words.value + place) : Word{});
  }
}

std::tuple<Tensor, Tensor> expand_cuda(const Tensor& x_in, const Tensor& inverse_in) {
  check_expand(x_in, inverse_in);
  const OnDeviceOf device(x_in);
  const Tensor x = as_contiguous(x_in), inverse = as_contiguous(inverse_in);
  const int64_t count = inverse.size(0), columns = x.size(1);
  Tensor out = new_tensor(x, {count, columns}, x.scalar_type()), status = new_jagged_status(x, device.stream());
  const auto bytes = columns * static_cast<int64_t>(x.element_size());
  const int64_t word = word_bytes(bytes, x.const_data_ptr(), out.const_data_ptr()), words = count * (bytes / word);
  const ExpandArgs args{x.const_data_ptr(),
                        Integers(inverse),
                        out.mutable_data_ptr(),
                        x.size(0),
                        count,
                        words,
                        Divisor::of(std::max<int64_t>(bytes / word, 1)),
                        status.mutable_data_ptr<int64_t>()};
  with_word(word, [&](auto unit) {
    launch_for(std::max(count, words), 1, device.stream(), expand_kernel<decltype(unit)>, args);
  });
  return {out, status};
}

Tensor expand_backward_cuda(const Tensor& grad, const Tensor& inverse, int64_t rows) {
  check_expand_backward(grad, inverse, rows);
  const OnDeviceOf device(grad);
  const int64_t columns = grad.size(1);
  Tensor out = new_tensor(grad, {rows, columns}, ScalarType::Float);
  const Tensor rows_of_grad = as_contiguous(grad), numbers = as_contiguous(inverse);
  sum_rows({Integers(numbers), 1, grad.size(0), rows, nullptr},
           {rows_of_grad.const_data_ptr<float>(), columns, nullptr, out.mutable_data_ptr<float>()}, grad,
           device.stream());
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(RK_LIBRARY, RK_CUDA_KEY, m) {
  implement<&expand_cuda>(m, "expand");
  implement<&expand_backward_cuda>(m, "expand_backward");
}

}  // namespace rec_kernels
