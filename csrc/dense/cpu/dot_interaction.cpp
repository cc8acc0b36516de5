// dot_interaction and its gradients on the CPU.
#include "dense/cpu/dot_interaction.h"

#include <tuple>

#include "core/boxing.h"
#include "dense/cpu/samples.h"
#include "dense/dot_interaction.h"

namespace rec_kernels {
namespace {

Tensor dot_interaction_cpu(const Tensor& dense_in, const Tensor& sparse_in, bool self_interaction,
                           const std::string& precision) {
  const InteractionSizes sizes = check_dot_interaction(dense_in, sparse_in, self_interaction, precision);
  const InteractionShape shape{sizes.F, sizes.D, self_interaction};
  Tensor out_tensor = new_tensor(dense_in, {sizes.B, sizes.columns()}, dense_in.scalar_type());
  if (sizes.B == 0) return out_tensor;
  const Samples dense_samples = samples_of(dense_in), sparse_samples = samples_of(sparse_in);
  const Floats dense(dense_samples), sparse(sparse_samples), out(samples_of(out_tensor));
  const auto& k = kernels<DotInteractionKernels>();
  const int64_t own = k.forward_scratch(shape), floats = own + dense.memory() + sparse.memory() + out.memory();
  for_samples(sizes.B, kSamplesPerBatch, sizes.pairs * sizes.D, floats,
              [&](int64_t first, int64_t count, float* memory) {
                float *dense_memory = memory + own, *sparse_memory = dense_memory + dense.memory();
                float* to = out.open(first, sparse_memory + sparse.memory());
                const InteractionRows<const float> in{dense.read(first, count, dense_memory), dense.stride(),
                                                      sparse.read(first, count, sparse_memory), sparse.stride(),
                                                      sparse.plain()};
                k.forward(shape, in, to, out.stride(), count, memory);
                out.write(first, count, to);
              });
  return out_tensor;
}

std::tuple<Tensor, Tensor> dot_interaction_backward_cpu(const Tensor& grad_in, const Tensor& dense_in,
                                                        const Tensor& sparse_in, bool self_interaction,
                                                        const std::string& precision) {
  const InteractionSizes sizes =
      check_dot_interaction_backward(grad_in, dense_in, sparse_in, self_interaction, precision);
  const int64_t B = sizes.B, F = sizes.F, D = sizes.D;
  const InteractionShape shape{F, D, self_interaction};
  Tensor dense_tensor = new_tensor(dense_in, {B, D}, dense_in.scalar_type());
  Tensor sparse_tensor = new_tensor(dense_in, {B, F, D}, dense_in.scalar_type());
  if (B == 0) return {dense_tensor, sparse_tensor};
  const Samples grad_samples = samples_of(grad_in), dense_samples = samples_of(dense_in),
                sparse_samples = samples_of(sparse_in);
  const Floats grad(grad_samples), dense(dense_samples), sparse(sparse_samples), to_dense(samples_of(dense_tensor)),
      to_sparse(samples_of(sparse_tensor));
  const auto& k = kernels<DotInteractionKernels>();
  const int64_t own = k.backward_scratch(shape);
  const int64_t floats = own + grad.memory() + 2 * dense.memory() + 2 * sparse.memory();
  for_samples(B, kSamplesPerBatch, 2 * sizes.pairs * D, floats, [&](int64_t first, int64_t count, float* memory) {
    float* grad_memory = memory + own;
    float *dense_memory = grad_memory + grad.memory(), *sparse_memory = dense_memory + dense.memory();
    float *dense_out = sparse_memory + sparse.memory(), *sparse_out = dense_out + to_dense.memory();
    const InteractionRows<const float> in{dense.read(first, count, dense_memory), dense.stride(),
                                          sparse.read(first, count, sparse_memory), sparse.stride()};
    const InteractionRows<float> to{to_dense.open(first, dense_out), to_dense.stride(),
                                    to_sparse.open(first, sparse_out), to_sparse.stride()};
    k.backward(shape, in, grad.read(first, count, grad_memory), grad.stride(), to, count, memory);
    to_dense.write(first, count, to.dense);
    to_sparse.write(first, count, to.sparse);
  });
  return {dense_tensor, sparse_tensor};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(RK_LIBRARY, CPU, m) {
  implement<&dot_interaction_cpu>(m, "dot_interaction");
  implement<&dot_interaction_backward_cpu>(m, "dot_interaction_backward");
}

}  // namespace rec_kernels
