// factorization_machine and its gradients on the CPU.
#include "dense/cpu/factorization_machine.h"

#include <algorithm>
#include <tuple>

#include "core/boxing.h"
#include "core/cpu/parallel.h"
#include "core/cpu/scratch.h"
#include "dense/cpu/grouped_projection.h"
#include "dense/cpu/samples.h"
#include "dense/factorization_machine.h"
#include "embedding_bag/cpu/sum_rows.h"

namespace rec_kernels {
namespace {

// Minimum elements to round per thread.
constexpr int64_t kFewNumbers = 1 << 15;

// y as float32: per sample, or converted once if shared.
class Factors {
 public:
  Factors(const Tensor& y, bool shared)
      : shared_(shared), samples_(shared ? one_sample(y) : samples_of(y)), floats_(samples_) {
    if (!shared) return;
    memory_ = Scratch<float>(floats_.memory());
    all_ = floats_.read(0, 1, memory_.get());
  }
  int64_t memory() const { return shared_ ? 0 : floats_.memory(); }
  SampleRows<const float> read(int64_t first, int64_t count, float* memory) const {
    if (shared_) return {all_, 0};
    return {floats_.read(first, count, memory), floats_.stride()};
  }

 private:
  static Samples one_sample(const Tensor& y) {
    const int64_t elements = y.size(0) * y.size(1);
    return {as_contiguous(y), elements, elements};
  }
  bool shared_;
  Samples samples_;
  Floats floats_;
  Scratch<float> memory_;
  const float* all_ = nullptr;
};

Tensor factorization_machine_cpu(const Tensor& x_in, const Tensor& y_in, const std::string& precision) {
  const FactorizationSizes sizes = check_factorization_machine(x_in, y_in, precision);
  const FactorizationShape shape{sizes.F, sizes.D, sizes.K};
  Tensor out_tensor = new_tensor(x_in, {sizes.B, sizes.F, sizes.K}, x_in.scalar_type());
  if (sizes.B == 0 || sizes.F == 0) return out_tensor;
  const Samples x_samples = samples_of(x_in);
  const Floats x(x_samples), out(samples_of(out_tensor));
  const Factors y(y_in, sizes.shared);
  const auto& k = kernels<FactorizationMachineKernels>();
  const int64_t own = k.forward_scratch(shape), floats = own + x.memory() + y.memory() + out.memory();
  const int64_t products = 2 * sizes.F * sizes.D * sizes.K;
  for_samples(sizes.B, kSamplesPerBatch, products, floats, [&](int64_t first, int64_t count, float* memory) {
    float *x_memory = memory + own, *y_memory = x_memory + x.memory();
    float* to = out.open(first, y_memory + y.memory());
    const SampleRows<const float> from{x.read(first, count, x_memory), x.stride()};
    k.forward(shape, from, y.read(first, count, y_memory), {to, out.stride()}, count, memory);
    out.write(first, count, to);
  });
  return out_tensor;
}

// Gradients of y as float32: one per sample, or `count` sums over kSampleChunk samples each.
struct FactorGradients {
  Scratch<float> elements;
  int64_t count, stride;

  FactorGradients(const FactorizationSizes& s)
      : count(s.shared ? ceil_div(s.B, kSampleChunk) : s.B), stride(ceil_div(s.F * s.K, 16) * 16) {
    elements = Scratch<float>(count * stride);
    if (s.shared) std::fill_n(elements.get(), count * stride, 0.0f);
  }
  // Destination of sample b's gradient: the accumulator of its chunk of samples, or its own.
  SampleRows<float> at(int64_t b, bool shared) const {
    return shared ? SampleRows<float>{elements.get() + b / kSampleChunk * stride, 0}
                  : SampleRows<float>{elements.get() + b * stride, stride};
  }
};

std::tuple<Tensor, Tensor> factorization_machine_backward_cpu(const Tensor& grad_in, const Tensor& x_in,
                                                              const Tensor& y_in, const std::string& precision) {
  const FactorizationSizes sizes = check_factorization_machine_backward(grad_in, x_in, y_in, precision);
  const int64_t B = sizes.B, F = sizes.F, elements = F * sizes.K;
  const FactorizationShape shape{F, sizes.D, sizes.K};
  Tensor x_tensor = new_tensor(x_in, {B, F, sizes.D}, x_in.scalar_type());
  if (B == 0 || F == 0) return {x_tensor, new_zeros(y_in, y_in.sizes(), y_in.scalar_type())};
  const Samples grad_samples = samples_of(grad_in), x_samples = samples_of(x_in);
  const Floats grad(grad_samples), x(x_samples), to_x(samples_of(x_tensor));
  const Factors y(y_in, sizes.shared);
  const FactorGradients to_y(sizes);
  const auto& k = kernels<FactorizationMachineKernels>();
  const int64_t own = k.backward_scratch(shape), floats = own + grad.memory() + 2 * x.memory() + y.memory();
  const int64_t products = 6 * elements * sizes.D;
  for_samples(B, kSampleChunk, products, floats, [&](int64_t begin, int64_t samples, float* memory) {
    float *grad_memory = memory + own, *x_memory = grad_memory + grad.memory();
    float *y_memory = x_memory + x.memory(), *out_memory = y_memory + y.memory();
    for (int64_t b = begin; b < begin + samples; b += kSamplesPerBatch) {
      const int64_t count = std::min(kSamplesPerBatch, begin + samples - b);
      float* to = to_x.open(b, out_memory);
      k.backward(shape, {grad.read(b, count, grad_memory), grad.stride()}, {x.read(b, count, x_memory), x.stride()},
                 y.read(b, count, y_memory), {to, to_x.stride()}, to_y.at(b, sizes.shared), count, memory);
      to_x.write(b, count, to);
    }
  });
  const KeepDenormals guard;  // for the part that the calling thread computes
  if (sizes.shared) sum_chunks(to_y.elements.get(), to_y.count, to_y.stride, to_y.stride, to_y.elements.get());
  Tensor y_tensor = sizes.shared ? new_tensor(x_in, {F, sizes.K}, x_in.scalar_type())
                                 : new_tensor(x_in, {B, F, sizes.K}, x_in.scalar_type());
  const RowRounding nearest{};
  const auto encode = kernels<RowFormatKernels>().nearest[static_cast<int>(float_format(x_in.scalar_type()))];
  auto* to = static_cast<uint8_t*>(y_tensor.mutable_data_ptr());
  const int64_t bytes = elements * static_cast<int64_t>(y_tensor.element_size());
  const int64_t few = 1 + kFewNumbers / elements, all = sizes.shared ? 1 : B;
  parallel_pieces(all, few, workers_for(all, few), [&](int64_t begin, int64_t end, int64_t) {
    for (int64_t i = begin; i < end; ++i)
      encode(to_y.elements.get() + i * to_y.stride, 1, elements, nearest, {to + i * bytes, 0, nullptr});
  });
  return {x_tensor, y_tensor};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(RK_LIBRARY, CPU, m) {
  implement<&factorization_machine_cpu>(m, "factorization_machine");
  implement<&factorization_machine_backward_cpu>(m, "factorization_machine_backward");
}

}  // namespace rec_kernels
