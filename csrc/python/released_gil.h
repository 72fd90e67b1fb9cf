// Releases the GIL for the time of a scope.
#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

// Like pybind11's gil_scoped_release, with another behaviour at the end of the interpreter. Python
// before 3.14 then ends a daemon thread that asks for the GIL with pthread_exit. The unwinding must
// not pass a destructor, or the process aborts. Here the thread sleeps until the process is gone,
// as in Python 3.14.
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
