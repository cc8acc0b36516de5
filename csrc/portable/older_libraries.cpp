// Functions that code of current compilers calls in their C and C++ libraries, for machines with older libraries:
// manylinux_2_28, that is glibc 2.28 and libstdc++ of GCC 8. Each implements the newer library's function by the older
// library's. The linker prefers these hidden definitions. Only builds with REC_KERNELS_PORTABLE have them.
#include <pthread.h>

#include <condition_variable>
#include <exception>
#include <mutex>
#include <new>
#include <sstream>

#pragma GCC visibility push(hidden)

// glibc 2.32. Always false, so that std::shared_ptr counts atomically, as it did before.
extern "C" {
char __libc_single_threaded = 0;
}

// These are plain functions with mangled names: functions of the standard library cannot be redeclared as hidden, and
// its member functions cannot be redeclared at all.
extern "C" {

using std::condition_variable;
using std::exception_ptr;
using std::ostringstream;
using std::stringstream;
using Lock = std::unique_lock<std::mutex>;

// GCC 11.
[[noreturn]] void rk_throw_bad_array_new_length() __asm__("_ZSt28__throw_bad_array_new_lengthv");
void rk_throw_bad_array_new_length() { throw std::bad_array_new_length(); }

// GCC 9: constructors without parameters. Before, the default constructor was one with default arguments.
void rk_ostringstream(ostringstream* self) __asm__("_ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev");
void rk_ostringstream(ostringstream* self) { new (self) ostringstream(std::ios_base::out); }

void rk_stringstream(stringstream* self) __asm__("_ZNSt7__cxx1118basic_stringstreamIcSt11char_traitsIcESaIcEEC1Ev");
void rk_stringstream(stringstream* self) { new (self) stringstream(std::ios_base::in | std::ios_base::out); }

// GCC 12 gave this function a new symbol version; its behaviour is unchanged.
void rk_wait(condition_variable* self, Lock& lock) __asm__("_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE");
void rk_wait(condition_variable* self, Lock& lock) {
  if (pthread_cond_wait(self->native_handle(), lock.mutex()->native_handle()) != 0) std::terminate();
}

// GCC 11: reference counting by exception_ptr's inline copy constructor and destructor, which before were functions of
// the library.
void rk_copy(void* self, const exception_ptr* from) __asm__("_ZNSt15__exception_ptr13exception_ptrC1ERKS0_");
void rk_end(exception_ptr* self) __asm__("_ZNSt15__exception_ptr13exception_ptrD1Ev");

void rk_addref(exception_ptr* self) __asm__("_ZNSt15__exception_ptr13exception_ptr9_M_addrefEv");
void rk_addref(exception_ptr* self) {
  alignas(exception_ptr) unsigned char copy[sizeof(exception_ptr)];  // never destroyed: its reference is that of *self
  rk_copy(copy, self);
}

void rk_release(exception_ptr* self) __asm__("_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv");
void rk_release(exception_ptr* self) { rk_end(self); }

}  // extern "C"

#pragma GCC visibility pop
