// Functions that libc and libstdc++ have only since after manylinux_2_28 (glibc 2.28, GCC 8), and
// that headers of a newer GCC call. They are linked into each library, hidden, and so found before
// those of the system. Names are mangled, since the headers declare or define some of them.
#include <new>
#include <sstream>

#define HIDDEN_AS(name) __asm__(name) __attribute__((visibility("hidden"), used))

extern "C" {

#if defined(__GLIBC__)
// glibc 2.32: whether std::shared_ptr may count without atomics. 0: no.
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
#endif

#if defined(__GLIBCXX__)

// GLIBCXX_3.4.29: what operator new[] throws.
[[noreturn]] void throw_bad_array_new_length() HIDDEN_AS("_ZSt28__throw_bad_array_new_lengthv");
void throw_bad_array_new_length() {
  throw std::bad_array_new_length();
}

// GLIBCXX_3.4.26: std::ostringstream::ostringstream().
void construct_ostringstream(void* memory)
    HIDDEN_AS("_ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1Ev");
void construct_ostringstream(void* memory) {
  new (memory) std::ostringstream(std::ios_base::out);
}

// CXXABI_1.3.13: what std::exception_ptr's inline copies and destructors call. The old library has
// whole copies and destructors instead. With a version, the linker takes no inline one of them for
// these, which would call back. An exception_ptr is one pointer.
void copy_exception_ptr(void** memory, void* const* from);
void destroy_exception_ptr(void** pointer);
__asm__(
    ".symver copy_exception_ptr, _ZNSt15__exception_ptr13exception_ptrC1ERKS0_@CXXABI_1.3.3\n"
    ".symver destroy_exception_ptr, _ZNSt15__exception_ptr13exception_ptrD1Ev@CXXABI_1.3.3");

void add_reference(void** pointer) HIDDEN_AS("_ZNSt15__exception_ptr13exception_ptr9_M_addrefEv");
void add_reference(void** pointer) {
  void* copy;  // never destroyed
  copy_exception_ptr(&copy, pointer);
}

void release(void** pointer) HIDDEN_AS("_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv");
void release(void** pointer) {
  void* copy = *pointer;
  *pointer = nullptr;
  destroy_exception_ptr(&copy);
}

#endif
}
