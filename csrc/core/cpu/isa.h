// CPU kernels are compiled once per instruction set; the best one that the machine supports is selected when the
// library is loaded. A kernel table is a struct of function pointers, declared as
//
//     template <CpuIsa> static const MyKernels table;
//
// which each instruction set's object file specialises for `CpuIsa::RK_ISA`. CMakeLists.txt defines RK_NEWER_ISAS where
// it compiles v3 and v4.
#pragma once

namespace rec_kernels {

// x86-64-v2 (or plain aarch64), x86-64-v3 (AVX2, FMA), x86-64-v4 (AVX-512).
enum class CpuIsa { baseline, v3, v4 };

CpuIsa cpu_isa();

template <class Kernels>
const Kernels& kernels() {
#if defined(RK_NEWER_ISAS)
  switch (cpu_isa()) {
    case CpuIsa::v4:
      return Kernels::template table<CpuIsa::v4>;
    case CpuIsa::v3:
      return Kernels::template table<CpuIsa::v3>;
    case CpuIsa::baseline:
      break;
  }
#endif
  return Kernels::template table<CpuIsa::baseline>;
}

}  // namespace rec_kernels
