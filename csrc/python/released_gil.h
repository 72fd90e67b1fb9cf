// The GIL given up for the time of a scope.
#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

// As pybind11's gil_scoped_release, but for the end of the interpreter: there, Python before 3.14
// ends a daemon thread that asks for the GIL by an unwinding (pthread_exit) that may not pass a
// destructor, so the process would abort. The thread sleeps instead until the process is gone, as
// Python 3.14 has it.
class ReleasedGil {
 public:
  ReleasedGil() : state_(PyEval_SaveThread()) {}
  ~ReleasedGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (abi::__forced_unwind&) {
      for (;;) pause();
    }
  }
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;

 private:
  PyThreadState* state_;
};
