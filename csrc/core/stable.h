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
#include <utility>

#include "core/text.h"

// The test-only emulated build registers the same kernels in its own namespace.
#ifndef RK_LIBRARY
#define RK_LIBRARY rec_kernels
#endif

// Checks are compiled into the CPU library, with the schemas, and the CUDA library calls them there.
#define RK_EXPORT __attribute__((visibility("default")))

namespace rec_kernels {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Sizes = torch::headeronly::IntHeaderOnlyArrayRef;

// Raises ValueError in Python: throws std::invalid_argument, or the exception registered in csrc/core/errors.cpp. Throw
// std::out_of_range for IndexError.
[[noreturn]] RK_EXPORT void throw_value_error(const std::string& message);

template <class... Parts>
void check_value(bool ok, const Parts&... parts) {
  if (__builtin_expect(!ok, 0)) throw_value_error(join(parts...));
}

inline const char* dtype_name(ScalarType dtype) {
  constexpr std::pair<ScalarType, const char*> kNames[] = {
      {ScalarType::Bool, "bool"},     {ScalarType::Byte, "uint8"},        {ScalarType::Char, "int8"},
      {ScalarType::Short, "int16"},   {ScalarType::Int, "int32"},         {ScalarType::Long, "int64"},
      {ScalarType::Half, "float16"},  {ScalarType::BFloat16, "bfloat16"}, {ScalarType::Float, "float32"},
      {ScalarType::Double, "float64"}};
  for (const auto& [each, name] : kNames)
    if (each == dtype) return name;
  return "another dtype";
}

// Returns true if an option is the second of its two allowed values; throws for any other value.
inline bool parse_choice(const std::string& given, const char* name, const char* first, const char* second) {
  const bool is_second = given == second;
  check_value(is_second || given == first, name, " must be \"", first, "\" or \"", second, "\", got \"", given, "\"");
  return is_second;
}

inline std::string shape_text(Sizes sizes) {
  std::string text;
  for (int64_t n : sizes) text += (text.empty() ? "" : ", ") + std::to_string(n);
  return "[" + text + "]";
}
inline std::string shape_of(const Tensor& t) { return shape_text(t.sizes()); }

// Chained checks of an argument: check(x, "x").rank(2).dtype(ScalarType::Float).on_device_of(y, "y").
struct TensorCheck {
  const Tensor& t;
  const char* name;

  const TensorCheck& dtype(ScalarType want) const {
    const ScalarType d = t.scalar_type();
    if (d != want) check_value(false, name, " must be ", dtype_name(want), ", got ", dtype_name(d));
    return *this;
  }
  const TensorCheck& integer() const {
    const ScalarType d = t.scalar_type();
    const bool good = d == ScalarType::Int || d == ScalarType::Long;
    if (!good) check_value(false, name, " must be int32 or int64, got ", dtype_name(d));
    return *this;
  }
  const TensorCheck& rank(int64_t want) const {
    if (t.dim() != want) check_value(false, name, " must have ", want, " dimension(s), got shape ", shape_of(t));
    return *this;
  }
  const TensorCheck& shape(std::initializer_list<int64_t> want) const {
    bool same = t.dim() == static_cast<int64_t>(want.size());
    int64_t i = 0;
    for (int64_t w : want) same = same && t.size(i++) == w;
    if (!same) check_value(false, name, " must have shape ", shape_text(want), ", got ", shape_of(t));
    return *this;
  }
  // For tensors that are written, or too large to copy implicitly.
  const TensorCheck& contiguous() const {
    check_value(t.is_contiguous(), name, " must be contiguous; call .contiguous() on it");
    return *this;
  }
  const TensorCheck& on_device_of(const Tensor& other, const char* other_name) const {
    const bool same = t.is_cuda() == other.is_cuda() && t.is_cpu() == other.is_cpu() &&
                      t.get_device_index() == other.get_device_index();
    check_value(same, name, " must be on the same device as ", other_name);
    return *this;
  }
};
inline TensorCheck check(const Tensor& t, const char* name) { return {t, name}; }

// The stable ABI drops torch's error message, so this reports the requested allocation.
template <class Allocate>
Tensor allocated(Sizes sizes, ScalarType dtype, const Allocate& allocate) {
  try {
    return allocate();
  } catch (const std::exception&) {
    throw std::runtime_error(
        join("cannot allocate a ", dtype_name(dtype), " tensor of shape ", shape_text(sizes), " (out of memory?)"));
  }
}

// torch::stable::new_empty() without its lookup of the op by name, which doubles the time in torch 2.10.
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
