// Each C++ error of the manager has a Python exception below KVCacheError, which is below
// vllm_kernels.Error. A translator raises it with the same message.
#include <exception>
#include <string>

#include "kv_cache/errors.h"
#include "python/kv_cache.h"

namespace py = pybind11;
namespace kv = vllm_kernels::kv_cache;

namespace {

struct Exceptions {
  py::object error, invalid_argument, unknown_sequence, duplicate_sequence, reference_overflow,
      integrity_error, out_of_blocks;
};

PYBIND11_CONSTINIT py::gil_safe_call_once_and_store<Exceptions> exception_storage;

// A new exception type in the module, below `bases`.
py::object new_exception(py::module_& module, const char* name, const char* doc,
                         const py::tuple& bases) {
  const std::string full_name = module.attr("__name__").cast<std::string>() + "." + name;
  PyObject* type = PyErr_NewExceptionWithDoc(full_name.c_str(), doc, bases.ptr(), nullptr);
  if (type == nullptr) throw py::error_already_set();
  auto object = py::reinterpret_steal<py::object>(type);
  module.attr(name) = object;
  return object;
}

Exceptions make_exceptions(py::module_& module) {
  Exceptions types;
  const auto errors = py::module_::import("vllm_kernels.errors");
  types.error = new_exception(module, "KVCacheError", "The base of KVCacheManager's exceptions.",
                              py::make_tuple(errors.attr("Error")));
  const py::tuple below = py::make_tuple(types.error);
  const py::tuple below_invalid = py::make_tuple(types.error, errors.attr("InvalidArgument"));
  const auto add = [&](const char* name, const char* doc, const py::tuple& bases) {
    return new_exception(module, name, doc, bases);
  };
  types.invalid_argument = add(
      "InvalidArgument", "An argument out of range, or buffers that do not fit.", below_invalid);
  types.unknown_sequence =
      add("UnknownSequence", "A sequence id that was never added, or was freed.", below);
  types.duplicate_sequence =
      add("DuplicateSequence", "A sequence id that exists, or occurs twice in a batch.", below);
  types.reference_overflow =
      add("ReferenceOverflow", "One block shared by too many sequences.", below);
  types.integrity_error = add("IntegrityError", "check_integrity() found the state broken.", below);
  types.out_of_blocks =
      add("OutOfBlocks", "Fewer blocks are free (.free) than needed (.needed).", below);
  return types;
}

void set_error(const py::object& type, const std::exception& error) {
  PyErr_SetString(type.ptr(), error.what());
}

void translate(std::exception_ptr pointer) {
  const Exceptions& types = exception_storage.get_stored();
  try {
    std::rethrow_exception(pointer);
  } catch (const kv::OutOfBlocks& error) {
    py::object value = types.out_of_blocks(error.what());
    value.attr("needed") = error.needed();
    value.attr("free") = error.free();
    PyErr_SetObject(types.out_of_blocks.ptr(), value.ptr());
  } catch (const kv::InvalidArgument& error) {
    set_error(types.invalid_argument, error);
  } catch (const kv::UnknownSequence& error) {
    set_error(types.unknown_sequence, error);
  } catch (const kv::DuplicateSequence& error) {
    set_error(types.duplicate_sequence, error);
  } catch (const kv::ReferenceOverflow& error) {
    set_error(types.reference_overflow, error);
  } catch (const kv::IntegrityError& error) {
    set_error(types.integrity_error, error);
  } catch (const kv::Error& error) {
    set_error(types.error, error);
  }
}

}  // namespace

void bind_kv_cache_exceptions(py::module_& module) {
  exception_storage.call_once_and_store_result([&] { return make_exceptions(module); });
  py::register_local_exception_translator(&translate);
}
