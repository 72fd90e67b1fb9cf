// The KV-cache manager's classes and exceptions in `_C`, and the ledger.
#pragma once

#include <pybind11/pybind11.h>

void bind_kv_cache(pybind11::module_& module);
void bind_ledger(pybind11::module_& module);  // after bind_kv_cache()

// Parts of bind_kv_cache(), in files of their own.
void bind_kv_cache_exceptions(pybind11::module_& module);
void bind_kv_cache_statistics(pybind11::module_& module);
