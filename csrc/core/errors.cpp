// Throws errors for invalid arguments.
//
// An invalid argument throws std::invalid_argument, which is ValueError in Python, but RuntimeError with torch 2.15,
// which translates only std::out_of_range of the standard exceptions. pybind11's own exceptions keep their type with
// every torch, but depend on Python, which this library must not: a Python process registers a function that throws one
// (rec_kernels/_library.py, csrc/host/host.cpp); programs without Python catch the standard exception.
#include <atomic>

#include "core/stable.h"

namespace rec_kernels {
namespace {

using Throw = void (*)(const char* message);
std::atomic<Throw> thrower{nullptr};

}  // namespace

void throw_value_error(const std::string& message) {
  if (const Throw function = thrower.load()) function(message.c_str());
  throw std::invalid_argument(message);
}

}  // namespace rec_kernels

// A function instead of an op, because any caller of an op could pass an address, which is called here.
extern "C" RK_EXPORT void rec_kernels_throw_value_errors_by(void (*function)(const char* message)) {
  rec_kernels::thrower.store(function);
}
