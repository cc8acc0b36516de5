// Other Python threads run while a call works or waits.
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

namespace rec_kernels::host {

// Releases the GIL for a scope, like pybind11::gil_scoped_release, and also lets a daemon thread come back too late.
// While the interpreter ends, Python before 3.14 ends a thread that wants the GIL with pthread_exit, which unwinds the
// stack like an exception: out of a destructor that is std::terminate. Here the thread waits for the end of the process
// instead, as it does in Python 3.14. Its C++ objects live on: their destructors may need the GIL.
class WithoutGil {
 public:
  WithoutGil() : thread_(PyEval_SaveThread()) {}
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;
  ~WithoutGil() {
    try {
      PyEval_RestoreThread(thread_);
    } catch (...) {  // nothing but the unwinding of pthread_exit; leaving this block would end the process
      while (true) pause();
    }
  }

 private:
  PyThreadState* thread_;
};

}  // namespace rec_kernels::host
