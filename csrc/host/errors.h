// Exceptions of host code, which host.cpp translates to Python.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "core/text.h"

namespace rec_kernels::host {

// Becomes OSError(code, text, path); Python chooses the subclass by the code.
class SystemError : public std::runtime_error {
 public:
  SystemError(int code, const std::string& text, std::string path)
      : std::runtime_error(text), code_(code), path_(std::move(path)) {}
  int code() const { return code_; }
  const std::string& path() const { return path_; }

 private:
  int code_;
  std::string path_;
};

// Data corruption: an OSError with the code that Linux file systems use for checksum errors.
SystemError corrupted(const std::string& text, const std::string& path);

// The error of a failed system call, with the system's message for `code`.
SystemError failed_call(int code, const std::string& what, const std::string& path);

// Becomes MemoryError: a call needs more memory at once than the budget allows.
class BudgetError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Throws an exception that becomes ValueError, unless `ok`.
template <class... Parts>
void check_value(bool ok, const Parts&... parts) {
  if (__builtin_expect(!ok, 0)) throw std::invalid_argument(join(parts...));
}

}  // namespace rec_kernels::host
