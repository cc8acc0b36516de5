// Throws the errors of wrong arguments.
//
// A wrong argument is std::invalid_argument, which Python sees as ValueError, but as RuntimeError with torch 2.15,
// which maps std::out_of_range alone of the standard exceptions. pybind11's own exceptions keep their type with every
// torch, but need Python, which this library does not: a Python process hands it a function that throws one
// (rec_kernels/_library.py, csrc/host/host.cpp), programs without Python catch the standard one.
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

// A function, not an op: an op takes what any caller gives it, and this one calls it.
extern "C" RK_EXPORT void rec_kernels_throw_value_errors_by(void (*function)(const char* message)) {
  rec_kernels::thrower.store(function);
}
