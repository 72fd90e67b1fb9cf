#include "python/kv_cache.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kv_cache/errors.h"
#include "kv_cache/kv_cache_manager.h"

namespace py = pybind11;

namespace {

using vllm_kernels::kv_cache::BatchBuffers;
using vllm_kernels::kv_cache::BlockCopy;
using vllm_kernels::kv_cache::check_buffers;
using vllm_kernels::kv_cache::concat;
using vllm_kernels::kv_cache::InvalidArgument;
using vllm_kernels::kv_cache::kMaxReferences;
using vllm_kernels::kv_cache::KVCacheManager;
using vllm_kernels::kv_cache::Statistics;
namespace kv = vllm_kernels::kv_cache;

using ReleaseGil = py::call_guard<py::gil_scoped_release>;
using Int64Array =
    py::array_t<int64_t, int{py::array::c_style} | int{py::detail::npy_api::NPY_ARRAY_ALIGNED_}>;

// --- arguments ---

std::string type_name(py::handle object) {
  return py::type::of(object).attr("__name__").cast<std::string>();
}

std::string shape_of(const py::array& array) {
  std::string text = "[";
  for (py::ssize_t i = 0; i < array.ndim(); ++i) {
    text += (i ? ", " : "") + std::to_string(array.shape(i));
  }
  return text + "]";
}

// `object` as a numpy array, by `convert` unless it is one.
template <typename Convert>
py::array as_array(py::handle object, const char* name, const char* expected, Convert convert) {
  if (py::isinstance<py::array>(object)) return py::reinterpret_borrow<py::array>(object);
  try {
    return py::array(convert());
  } catch (py::error_already_set& error) {
    throw InvalidArgument(concat(name, ": expected ", expected, ", got ", type_name(object), ": ",
                                 py::str(error.value()).cast<std::string>()));
  }
}

bool holds_integers(const py::array& array) {
  return array.dtype().kind() == 'i' && array.itemsize() >= 4;
}

// int32 or int64 values of a numpy array, a CPU tensor or a list of ints; int64 arrays are read in
// place.
class Int64Input {
 public:
  Int64Input(py::handle object, const char* name) : Int64Input(object, name, numpy(object, name)) {}

  std::span<const int64_t> values() const {
    return {array_.data(), static_cast<size_t>(array_.size())};
  }

  static py::array numpy(py::handle object, const char* name) {
    return as_array(object, name, "a numpy array, a CPU tensor or a list",
                    [&] { return py::module_::import("numpy").attr("asarray")(object); });
  }

  // `array` is numpy(object).
  Int64Input(py::handle object, const char* name, const py::array& array) {
    // NumPy gives a list or range of nothing a dtype of its own choice.
    const bool untyped = array.size() == 0 && !py::hasattr(object, "__array__");
    if (array.ndim() != 1 || !(holds_integers(array) || untyped)) {
      throw InvalidArgument(concat(name, ": expected int64 or int32 values of shape [n], got ",
                                   py::str(array.dtype()).cast<std::string>(), " of shape ",
                                   shape_of(array)));
    }
    if (!untyped) array_ = Int64Array(array);
  }

 private:
  Int64Array array_;
};

// One value for each of `size` sequences: an int that holds for all of them, or an Int64Input.
class Int64Counts {
 public:
  Int64Counts(py::handle object, const char* name, size_t size) {
    if (PyLong_Check(object.ptr())) {
      int overflow = 0;
      const int64_t value = PyLong_AsLongLongAndOverflow(object.ptr(), &overflow);
      if (overflow != 0) throw InvalidArgument(concat(name, ": expected an int64, got more bits"));
      same_.assign(size, value);
      return;
    }
    const py::array array = Int64Input::numpy(object, name);
    if (array.ndim() == 0 && holds_integers(array)) {  // a NumPy integer
      same_.assign(size, *Int64Array(array).data());
    } else {
      each_.emplace(object, name, array);
    }
  }

  std::span<const int64_t> values() const { return each_ ? each_->values() : same_; }

 private:
  std::vector<int64_t> same_;
  std::optional<Int64Input> each_;
};

// A numpy array over the caller's memory: `object` itself, or a CPU tensor's numpy().
template <typename T>
py::array output_array(py::handle object, const char* name, const char* type, int rank) {
  const std::string full_name = std::string("buffers: ") + name;
  const py::array array = as_array(object, full_name.c_str(), "a numpy array or a CPU tensor",
                                   [&]() -> py::object { return object.attr("numpy")(); });
  if (!py::isinstance<py::array_t<T>>(array) || array.ndim() != rank) {
    throw InvalidArgument(concat(full_name, ": expected ", type, " of ", rank, " dimensions, got ",
                                 py::str(array.dtype()).cast<std::string>(), " of shape ",
                                 shape_of(array)));
  }
  if (!array.writeable()) {
    throw InvalidArgument(concat(full_name, ": expected writable memory, got read-only"));
  }
  const py::ssize_t last = rank - 1;
  const bool strided = array.shape(last) > 1 && array.strides(last) != array.itemsize();
  if (strided || reinterpret_cast<uintptr_t>(array.data()) % alignof(T) != 0) {
    throw InvalidArgument(concat(full_name,
                                 ": expected a contiguous last dimension, got strides of ",
                                 array.strides(last), " bytes for elements of ", array.itemsize()));
  }
  return array;
}

template <typename T>
std::span<T> span_of(py::array& array) {
  return {static_cast<T*>(array.mutable_data()), static_cast<size_t>(array.size())};
}

// BatchBuffers that keep the memory they point to alive.
struct OwnedBuffers {
  OwnedBuffers(py::handle tables, py::handle lengths, py::handle starts, py::handle slots,
               py::handle token_positions)
      : block_tables(output_array<int32_t>(tables, "block_tables", "int32", 2)),
        seq_lens(output_array<int32_t>(lengths, "seq_lens", "int32", 1)),
        query_start_loc(output_array<int32_t>(starts, "query_start_loc", "int32", 1)),
        slot_mapping(output_array<int64_t>(slots, "slot_mapping", "int64", 1)) {
    const py::ssize_t row_bytes = block_tables.strides(0);
    if (row_bytes % block_tables.itemsize() != 0) {
      throw InvalidArgument("buffers: block_tables: expected rows a multiple of 4 bytes apart");
    }
    view.block_tables = static_cast<int32_t*>(block_tables.mutable_data());
    view.max_sequences = block_tables.shape(0);
    view.max_blocks = block_tables.shape(1);
    view.row_stride =
        view.max_sequences > 1 ? row_bytes / block_tables.itemsize() : view.max_blocks;
    view.seq_lens = span_of<int32_t>(seq_lens);
    view.query_start_loc = span_of<int32_t>(query_start_loc);
    view.slot_mapping = span_of<int64_t>(slot_mapping);
    if (!token_positions.is_none()) {
      positions = output_array<int64_t>(token_positions, "positions", "int64", 1);
      view.positions = span_of<int64_t>(*positions);
      if (view.positions.size() != view.slot_mapping.size()) {
        throw InvalidArgument(concat("buffers: positions: expected ", view.slot_mapping.size(),
                                     " elements (as slot_mapping), got ", view.positions.size()));
      }
    }
    check_buffers(view);
  }

  py::array block_tables;
  py::array seq_lens;
  py::array query_start_loc;
  py::array slot_mapping;
  std::optional<py::array> positions;
  BatchBuffers view;
};

// --- results ---

// Room for `size` copy-on-write pairs, made before the manager changes; afterwards cut to the pairs
// that there were without allocating, so that no pair can be lost to an error.
class CopyPairs {
 public:
  explicit CopyPairs(size_t size) : array_({static_cast<py::ssize_t>(size), py::ssize_t{2}}) {
    static_assert(sizeof(BlockCopy) == 2 * sizeof(int64_t));
    room_ = {reinterpret_cast<BlockCopy*>(array_.mutable_data()), size};
  }

  std::span<BlockCopy> room() const { return room_; }

  // The array has no other owner yet, so its first dimension can be shortened in place.
  py::array keep(int64_t size) && {
    py::detail::array_proxy(array_.ptr())->dimensions[0] = static_cast<py::ssize_t>(size);
    return std::move(array_);
  }

 private:
  Int64Array array_;
  std::span<BlockCopy> room_;
};

// `call(room)` without the GIL; it writes pairs to the room and returns how many.
template <typename Call>
py::array collect_copies(size_t size, Call call) {
  CopyPairs pairs(size);
  int64_t count = 0;
  {
    py::gil_scoped_release release;
    count = call(pairs.room());
  }
  return std::move(pairs).keep(count);
}

py::array slots_of(const KVCacheManager& manager, int64_t id, int64_t start,
                   std::optional<int64_t> num_tokens) {
  const int64_t tokens = manager.num_tokens(id);
  const int64_t count = num_tokens.value_or(tokens - start);
  // Before memory is asked for; the manager checks again, as the sequence may have changed since.
  if (start < 0 || start > tokens || count < 0 || count > tokens - start) {
    throw InvalidArgument(concat("slot_mapping: start, num_tokens: expected a range within ",
                                 tokens, " tokens, got ", count, " from ", start));
  }
  Int64Array slots(count);
  manager.slot_mapping(id, start, {slots.mutable_data(), static_cast<size_t>(count)});
  return slots;
}

py::array table_of(const KVCacheManager& manager, int64_t id) {
  const std::vector<int32_t> table = manager.block_table(id);
  return py::array_t<int32_t>(static_cast<py::ssize_t>(table.size()), table.data());
}

// --- exceptions ---

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
  const auto builtin = [](PyObject* type) { return py::reinterpret_borrow<py::object>(type); };
  Exceptions types;
  types.error = new_exception(module, "KVCacheError", "What KVCacheManager raises.",
                              py::make_tuple(builtin(PyExc_RuntimeError)));
  const py::tuple below = py::make_tuple(types.error);
  const py::tuple below_value_error = py::make_tuple(types.error, builtin(PyExc_ValueError));
  const auto add = [&](const char* name, const char* doc, const py::tuple& bases) {
    return new_exception(module, name, doc, bases);
  };
  types.invalid_argument =
      add("InvalidArgument", "An argument out of range, or buffers that do not fit.",
          below_value_error);
  types.unknown_sequence =
      add("UnknownSequence", "A sequence id that was never added, or was freed.", below);
  types.duplicate_sequence =
      add("DuplicateSequence", "A sequence id that exists, or stands twice in a batch.", below);
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

// --- classes ---

void bind_statistics(py::module_& module) {
  py::class_<Statistics>(module, "Statistics", "One moment of the cache in numbers.")
      .def_readonly("total_blocks", &Statistics::total_blocks, "Blocks of the pool.")
      .def_readonly("free_blocks", &Statistics::free_blocks, "Blocks that nothing holds.")
      .def_readonly("used_blocks", &Statistics::used_blocks, "total_blocks - free_blocks.")
      .def_readonly("shared_blocks", &Statistics::shared_blocks,
                    "Used blocks that two or more sequences hold.")
      .def_readonly("peak_used_blocks", &Statistics::peak_used_blocks, "The most used at any time.")
      .def_readonly("num_sequences", &Statistics::num_sequences, "Sequences.")
      .def_readonly("num_tokens", &Statistics::num_tokens,
                    "Tokens of all sequences; a shared one counts once a sequence.")
      .def_readonly("table_entries", &Statistics::table_entries,
                    "Blocks of all sequences, shared ones once a sequence: what would be used "
                    "without sharing.")
      .def_readonly("waste_slots", &Statistics::waste_slots,
                    "Slots of used blocks that hold no token of any sequence.")
      .def_readonly("num_copies", &Statistics::num_copies,
                    "Copy-on-write pairs returned since construction or reset().");
}

void bind_buffers(py::module_& module) {
  py::class_<OwnedBuffers>(module, "BatchBuffers")
      .def(py::init<py::handle, py::handle, py::handle, py::handle, py::handle>(),
           py::arg("block_tables"), py::arg("seq_lens"), py::arg("query_start_loc"),
           py::arg("slot_mapping"), py::arg("positions") = py::none());
}

void bind_manager(py::module_& module) {
  py::class_<KVCacheManager>(module, "KVCacheManager")
      .def(py::init<int64_t, int64_t, int64_t>(), py::arg("num_blocks"), py::arg("block_size"),
           py::arg("max_references") = kMaxReferences)
      .def("__reduce__",
           [](const KVCacheManager&) -> py::object {
             throw py::type_error(
                 "KVCacheManager cannot be pickled or copied: its blocks belong to one cache");
           })
      .def_property_readonly("num_blocks", &KVCacheManager::num_blocks)
      .def_property_readonly("block_size", &KVCacheManager::block_size)
      .def_property_readonly("num_free_blocks", &KVCacheManager::num_free_blocks)
      .def_property_readonly("num_sequences", &KVCacheManager::num_sequences)
      .def("can_allocate", &KVCacheManager::can_allocate, py::arg("num_tokens"))
      .def("allocate", py::overload_cast<int64_t, int64_t>(&KVCacheManager::allocate),
           py::arg("sequence_id"), py::arg("num_tokens"))
      .def(
          "append",
          [](KVCacheManager& self, int64_t id, int64_t num_tokens) {
            return collect_copies(1, [&](std::span<BlockCopy> room) {
              return self.append(std::span(&id, 1), std::span(&num_tokens, 1), room);
            });
          },
          py::arg("sequence_id"), py::arg("num_tokens") = 1)
      .def("fork", &KVCacheManager::fork, py::arg("parent_id"), py::arg("child_id"))
      .def("free", py::overload_cast<int64_t>(&KVCacheManager::free), py::arg("sequence_id"))
      .def("truncate", py::overload_cast<int64_t, int64_t>(&KVCacheManager::truncate),
           py::arg("sequence_id"), py::arg("num_tokens"))
      .def("__contains__", &KVCacheManager::contains, py::arg("sequence_id"))
      .def("num_tokens", &KVCacheManager::num_tokens, py::arg("sequence_id"))
      .def("block_table", &table_of, py::arg("sequence_id"))
      .def("slot_mapping", &slots_of, py::arg("sequence_id"), py::arg("start") = 0,
           py::arg("num_tokens") = py::none())
      .def("sequence_ids", &KVCacheManager::sequence_ids)
      .def(
          "allocate_batch",
          [](KVCacheManager& self, py::handle sequence_ids, py::handle num_tokens) {
            const Int64Input ids(sequence_ids, "allocate: sequence_ids");
            const Int64Counts counts(num_tokens, "allocate: num_tokens", ids.values().size());
            py::gil_scoped_release release;
            self.allocate(ids.values(), counts.values());
          },
          py::arg("sequence_ids"), py::arg("num_tokens"))
      .def(
          "append_batch",
          [](KVCacheManager& self, py::handle sequence_ids, py::handle num_tokens) {
            const Int64Input ids(sequence_ids, "append: sequence_ids");
            const Int64Counts counts(num_tokens, "append: num_tokens", ids.values().size());
            return collect_copies(ids.values().size(), [&](std::span<BlockCopy> room) {
              return self.append(ids.values(), counts.values(), room);
            });
          },
          py::arg("sequence_ids"), py::arg("num_tokens") = 1)
      .def(
          "free_batch",
          [](KVCacheManager& self, py::handle sequence_ids) {
            const Int64Input ids(sequence_ids, "free: sequence_ids");
            py::gil_scoped_release release;
            self.free(ids.values());
          },
          py::arg("sequence_ids"))
      .def(
          "truncate_batch",
          [](KVCacheManager& self, py::handle sequence_ids, py::handle num_tokens) {
            const Int64Input ids(sequence_ids, "truncate: sequence_ids");
            const Int64Counts counts(num_tokens, "truncate: num_tokens", ids.values().size());
            py::gil_scoped_release release;
            self.truncate(ids.values(), counts.values());
          },
          py::arg("sequence_ids"), py::arg("num_tokens"))
      .def(
          "reorder",
          [](KVCacheManager& self, py::handle sequence_ids, py::handle parent_ids) {
            const Int64Input ids(sequence_ids, "reorder: sequence_ids");
            const Int64Input parents(parent_ids, "reorder: parent_ids");
            py::gil_scoped_release release;
            self.reorder(ids.values(), parents.values());
          },
          py::arg("sequence_ids"), py::arg("parent_ids"))
      .def(
          "build",
          [](KVCacheManager& self, py::handle sequence_ids, py::handle num_query_tokens,
             const OwnedBuffers& buffers) {
            const Int64Input ids(sequence_ids, "build: sequence_ids");
            const Int64Counts counts(num_query_tokens, "build: num_query_tokens",
                                     ids.values().size());
            py::gil_scoped_release release;
            self.build(ids.values(), counts.values(), buffers.view);
          },
          py::arg("sequence_ids"), py::arg("num_query_tokens"), py::arg("buffers"))
      .def(
          "step",
          [](KVCacheManager& self, py::handle sequence_ids, py::handle num_tokens,
             const OwnedBuffers& buffers) {
            const Int64Input ids(sequence_ids, "step: sequence_ids");
            const Int64Counts counts(num_tokens, "step: num_tokens", ids.values().size());
            return collect_copies(ids.values().size(), [&](std::span<BlockCopy> room) {
              return self.step(ids.values(), counts.values(), buffers.view, room);
            });
          },
          py::arg("sequence_ids"), py::arg("num_tokens"), py::arg("buffers"))
      .def("reset", &KVCacheManager::reset, ReleaseGil())
      .def("statistics", &KVCacheManager::statistics, ReleaseGil())
      .def("check_integrity", &KVCacheManager::check_integrity, ReleaseGil());
}

}  // namespace

void bind_kv_cache(py::module_& module) {
  exception_storage.call_once_and_store_result([&] { return make_exceptions(module); });
  py::register_local_exception_translator(&translate);
  bind_statistics(module);
  bind_buffers(module);
  bind_manager(module);
}
