// The KV-cache manager's exceptions in `_C`.
#pragma once

#include <pybind11/pybind11.h>

void bind_kv_cache_exceptions(pybind11::module_& module);
