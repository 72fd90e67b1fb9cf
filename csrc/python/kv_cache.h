// The KV-cache manager's classes and exceptions in `_C`.
#pragma once

#include <pybind11/pybind11.h>

void bind_kv_cache(pybind11::module_& module);
