// The only door to torch: the LibTorch stable ABI (torch >= 2.10), and the checks that every op's arguments pass.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>

#include "core/text.h"

// The test-only emulated build registers the same kernels under a namespace of its own.
#ifndef RK_LIBRARY
#define RK_LIBRARY rec_kernels
#endif

// Checks live in the CPU library, where the schemas are; the CUDA library calls them there.
#define RK_EXPORT __attribute__((visibility("default")))

namespace rec_kernels {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;

// Python sees std::out_of_range as IndexError, and what this throws as ValueError: a std::invalid_argument, or what
// csrc/core/errors.cpp was given for it.
[[noreturn]] RK_EXPORT void throw_value_error(const std::string& message);

template <class... Parts>
void check_value(bool ok, const Parts&... parts) {
  if (__builtin_expect(!ok, 0)) throw_value_error(join(parts...));
}

inline const char* dtype_name(ScalarType t) {
  switch (t) {
    case ScalarType::Bool:
      return "bool";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    default:
      return "another dtype";
  }
}

inline std::string shape_text(Sizes sizes) {
  std::string text;
  for (int64_t n : sizes) text += (text.empty() ? "" : ", ") + std::to_string(n);
  return "[" + text + "]";
}
inline std::string shape_of(const Tensor& t) { return shape_text(t.sizes()); }

inline void check_dtype(const Tensor& t, ScalarType want, const char* name) {
  check_value(t.scalar_type() == want, name, " must be ", dtype_name(want), ", got ", dtype_name(t.scalar_type()));
}

inline void check_integer(const Tensor& t, const char* name) {
  const ScalarType d = t.scalar_type();
  check_value(d == ScalarType::Int || d == ScalarType::Long, name, " must be int32 or int64, got ", dtype_name(d));
}

inline void check_rank(const Tensor& t, int64_t rank, const char* name) {
  if (t.dim() != rank) check_value(false, name, " must have ", rank, " dimension(s), got shape ", shape_of(t));
}

inline void check_shape(const Tensor& t, std::initializer_list<int64_t> want, const char* name) {
  bool same = t.dim() == static_cast<int64_t>(want.size());
  int64_t i = 0;
  for (int64_t w : want) same = same && t.size(i++) == w;
  if (!same) check_value(false, name, " must have shape ", shape_text(want), ", got ", shape_of(t));
}

// Tensors that are written, or too large to copy behind the caller's back, must be contiguous.
inline void check_contiguous(const Tensor& t, const char* name) {
  check_value(t.is_contiguous(), name, " must be contiguous; call .contiguous() on it");
}

inline void check_same_device(const Tensor& t, const Tensor& other, const char* name, const char* other_name) {
  const bool same = t.is_cuda() == other.is_cuda() && t.is_cpu() == other.is_cpu() &&
                    t.get_device_index() == other.get_device_index();
  check_value(same, name, " must be on the same device as ", other_name);
}

// The stable ABI drops torch's reason for a failure: what was asked for is said here.
template <class Allocate>
Tensor allocated(Sizes sizes, ScalarType dtype, const Allocate& allocate) {
  try {
    return allocate();
  } catch (const std::exception&) {
    throw std::runtime_error(
        join("cannot allocate a ", dtype_name(dtype), " tensor of shape ", shape_text(sizes), " (out of memory?)"));
  }
}

// torch::stable::new_empty of torch 2.10 without its look-up of the op by name, which doubles its time.
inline Tensor new_tensor(const Tensor& like, Sizes sizes, ScalarType dtype) {
  return allocated(sizes, dtype, [&] {
    auto type = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
    AtenTensorHandle made = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_aten_new_empty(like.get(), sizes.data(), static_cast<int64_t>(sizes.size()),
                                                     &type, nullptr, nullptr, 0, nullptr, &made));
    return Tensor(made);
  });
}

inline Tensor new_zeros(const Tensor& like, Sizes sizes, ScalarType dtype) {
  return allocated(sizes, dtype, [&] { return torch::stable::new_zeros(like, sizes, dtype); });
}

inline Tensor as_contiguous(const Tensor& t) {
  if (t.is_contiguous()) return t;
  return allocated(t.sizes(), t.scalar_type(), [&] { return torch::stable::contiguous(t); });
}
inline OptionalTensor as_contiguous(const OptionalTensor& t) {
  OptionalTensor out;
  if (t) out = as_contiguous(*t);
  return out;
}

}  // namespace rec_kernels
