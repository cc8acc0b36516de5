// Loading librec_kernels_cpu.so, and librec_kernels_cuda.so after it: their ops then belong to torch's dispatcher, in
// this process, as after `import rec_kernels`. There is nothing to link and no header to include.
#pragma once

#include <dlfcn.h>

#include <stdexcept>
#include <string>

inline void load_library(const std::string& path) {
  if (dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) throw std::runtime_error(dlerror());
}
