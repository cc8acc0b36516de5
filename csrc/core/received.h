// Ownership of the arguments that torch passes to an op.
//
// torch passes each argument as 64 bits: a value, or a handle that the op must free. A Received<T> owns one argument;
// its constructor never throws, but take(), which converts it to a T, may. An op constructs all of them before the
// first take(), so that nothing leaks if a conversion fails. torch's own conversions are not used for handles: those of
// torch 2.10 to 2.13 never free strings, and free lists of tensors only if nothing is thrown.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/stable.h"

namespace rec_kernels {

inline void check_call(AOTITorchError error, const char* function) {
  if (error != AOTI_TORCH_SUCCESS) throw std::runtime_error(join("torch's ", function, " failed"));
}

// A number, bool or dtype, which needs no freeing.
template <class T>
class Received {
 public:
  explicit Received(StableIValue argument) noexcept : argument_(argument) {}
  T take() { return torch::stable::detail::to<T>(argument_); }

 private:
  StableIValue argument_;
};

// A handle that Free frees unless release() is called.
template <class Handle, AOTITorchError (*Free)(Handle)>
class OwnedHandle {
 public:
  explicit OwnedHandle(StableIValue argument) noexcept : handle_(torch::stable::detail::to<Handle>(argument)) {}
  OwnedHandle(const OwnedHandle&) = delete;
  OwnedHandle& operator=(const OwnedHandle&) = delete;
  ~OwnedHandle() {
    if (handle_ != nullptr) Free(handle_);
  }
  Handle get() const { return handle_; }
  Handle release() { return std::exchange(handle_, nullptr); }

 private:
  Handle handle_;
};

template <>
class Received<Tensor> {
 public:
  explicit Received(StableIValue argument) noexcept : handle_(argument) {}
  Tensor take() { return Tensor(handle_.release()); }  // a Tensor that cannot be made frees the handle itself

 private:
  OwnedHandle<AtenTensorHandle, aoti_torch_delete_tensor_object> handle_;
};

template <>
class Received<std::string> {
 public:
  explicit Received(StableIValue argument) noexcept : handle_(argument) {}
  std::string take() {
    size_t length = 0;
    const char* text = nullptr;
    check_call(torch_string_length(handle_.get(), &length), "torch_string_length");
    check_call(torch_string_c_str(handle_.get(), &text), "torch_string_c_str");
    return std::string(text, length);
  }

 private:
  OwnedHandle<StringHandle, torch_delete_string> handle_;
};

// Null, or a pointer to memory that torch allocated with `new`.
template <class T>
class Received<std::optional<T>> {
 public:
  explicit Received(StableIValue argument) noexcept {
    auto* const cell = torch::stable::detail::to<StableIValue*>(argument);
    if (cell == nullptr) return;
    value_.emplace(*cell);
    delete cell;
  }
  std::optional<T> take() {
    if (!value_) return std::nullopt;
    return value_->take();
  }

 private:
  std::optional<Received<T>> value_;
};

// Elements of the list have their own owners: frees only the list.
template <class T>
class Received<std::vector<T>> {
 public:
  explicit Received(StableIValue argument) noexcept : list_(argument) { torch_list_size(list_.get(), &size_); }
  Received(const Received&) = delete;
  Received& operator=(const Received&) = delete;
  ~Received() {
    while (taken_ < size_) Received<T> dropped(next());
  }
  std::vector<T> take() {
    std::vector<T> values;
    values.reserve(size_);
    while (taken_ < size_) values.push_back(Received<T>(next()).take());
    return values;
  }

 private:
  StableIValue next() {
    StableIValue element = 0;
    torch_list_get_item(list_.get(), taken_++, &element);
    return element;
  }

  OwnedHandle<StableListHandle, torch_delete_list> list_;
  size_t size_ = 0, taken_ = 0;
};

}  // namespace rec_kernels
