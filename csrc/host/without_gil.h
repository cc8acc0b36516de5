// Releases the GIL during a call.
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

namespace rec_kernels::host {

// Releases the GIL for a scope, like pybind11::gil_scoped_release, but safe for daemon threads at interpreter shutdown.
// Python before 3.14 then ends a thread that acquires the GIL with pthread_exit, which unwinds the stack like an
// exception and calls std::terminate in a destructor. Here the thread blocks until the process ends instead, like in
// Python 3.14. Its C++ objects are not destroyed, since their destructors may need the GIL.
class WithoutGil {
 public:
  WithoutGil() : thread_(PyEval_SaveThread()) {}
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;
  ~WithoutGil() {
    try {
      PyEval_RestoreThread(thread_);
    } catch (...) {  // only the unwinding of pthread_exit; leaving this block would terminate the process
      while (true) pause();
    }
  }

 private:
  PyThreadState* thread_;
};

}  // namespace rec_kernels::host
