// Functions that today's compilers take from their own C and C++ libraries, for machines with older ones:
// manylinux_2_28, glibc 2.28 and libstdc++ of GCC 8. Each is the newer library's function in terms of the older one;
// the linker prefers it here, hidden, to the library's. Only builds with REC_KERNELS_PORTABLE have this.
#include <pthread.h>

#include <condition_variable>
#include <exception>
#include <mutex>
#include <new>
#include <sstream>

#pragma GCC visibility push(hidden)

// glibc 2.32. Never true, as it was before: std::shared_ptr counts atomically.
extern "C" {
char __libc_single_threaded = 0;
}

// Plain functions under the mangled names: declarations of the standard library cannot be repeated as hidden, and its
// members not at all.
extern "C" {

using std::condition_variable;
using std::exception_ptr;
using std::ostringstream;
using std::stringstream;
using Lock = std::unique_lock<std::mutex>;

// GCC 11.
[[noreturn]] void rk_throw_bad_array_new_length() __asm__("_ZSt28__throw_bad_array_new_lengthv");
void rk_throw_bad_array_new_length() { throw std::bad_array_new_length(); }

// GCC 9: constructors without arguments. They had default arguments before.
void rk_ostringstream(ostringstream* self) __asm__("_ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev");
void rk_ostringstream(ostringstream* self) { new (self) ostringstream(std::ios_base::out); }

void rk_stringstream(stringstream* self) __asm__("_ZNSt7__cxx1118basic_stringstreamIcSt11char_traitsIcESaIcEEC1Ev");
void rk_stringstream(stringstream* self) { new (self) stringstream(std::ios_base::in | std::ios_base::out); }

// GCC 12, with the same effect under an older version of the name.
void rk_wait(condition_variable* self, Lock& lock) __asm__("_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE");
void rk_wait(condition_variable* self, Lock& lock) {
  if (pthread_cond_wait(self->native_handle(), lock.mutex()->native_handle()) != 0) std::terminate();
}

// GCC 11: how an exception_ptr that begins counts itself, and how one that ends does. Before, the whole constructor and
// the whole destructor were functions of the library.
void rk_copy(void* self, const exception_ptr* from) __asm__("_ZNSt15__exception_ptr13exception_ptrC1ERKS0_");
void rk_end(exception_ptr* self) __asm__("_ZNSt15__exception_ptr13exception_ptrD1Ev");

void rk_addref(exception_ptr* self) __asm__("_ZNSt15__exception_ptr13exception_ptr9_M_addrefEv");
void rk_addref(exception_ptr* self) {
  alignas(exception_ptr) unsigned char copy[sizeof(exception_ptr)];  // has no end: it is counted in the place of *self
  rk_copy(copy, self);
}

void rk_release(exception_ptr* self) __asm__("_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv");
void rk_release(exception_ptr* self) { rk_end(self); }

}  // extern "C"

#pragma GCC visibility pop
