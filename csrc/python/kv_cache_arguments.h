// Converts and checks the manager's arguments from Python: integers, tokens, keys and buffers.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kv_cache/batch_buffers.h"
#include "kv_cache/errors.h"
#include "kv_cache/kv_cache_manager.h"
#include "kv_cache/options.h"
#include "kv_cache/tokens.h"

namespace vllm_kernels::kv_cache {

namespace py = pybind11;

using Int64Array =
    py::array_t<int64_t, int{py::array::c_style} | int{py::detail::npy_api::NPY_ARRAY_ALIGNED_}>;

inline std::string type_name(py::handle object) {
  return py::type::of(object).attr("__name__").cast<std::string>();
}

inline std::string shape_of(const py::array& array) {
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

inline bool holds_integers(const py::array& array) {
  return array.dtype().kind() == 'i' && array.itemsize() >= 4;
}

// `object` as an array of integers. None for an empty list or range: NumPy then chose the dtype.
// `array` is numpy_array(object).
inline std::optional<py::array> checked_integers(py::handle object, const char* name,
                                                 const py::array& array) {
  const bool untyped = array.size() == 0 && !py::hasattr(object, "__array__");
  if (array.ndim() != 1 || !(holds_integers(array) || untyped)) {
    throw InvalidArgument(concat(name, ": expected int64 or int32 values of shape [n], got ",
                                 py::str(array.dtype()).cast<std::string>(), " of shape ",
                                 shape_of(array)));
  }
  if (untyped) return std::nullopt;
  return array;
}

inline py::array numpy_array(py::handle object, const char* name) {
  return as_array(object, name, "a numpy array, a CPU tensor or a list",
                  [&] { return py::module_::import("numpy").attr("asarray")(object); });
}

// Reads a list of ints, five times as fast as NumPy. Returns false if it has any other element.
inline bool read_list(py::handle object, std::vector<int64_t>& values) {
  if (!PyList_Check(object.ptr())) return false;
  const Py_ssize_t size = PyList_GET_SIZE(object.ptr());
  values.resize(size);
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject* item = PyList_GET_ITEM(object.ptr(), i);
    int overflow = 0;
    if (!PyLong_CheckExact(item)) return false;
    values[i] = PyLong_AsLongLongAndOverflow(item, &overflow);
    if (overflow != 0) return false;
  }
  return true;
}

// int32 or int64 values of a numpy array, a CPU tensor or a list of ints. An int64 array is not
// copied.
class Int64Input {
 public:
  Int64Input(py::handle object, const char* name) {
    if (!read_list(object, list_)) read_array(object, name, numpy_array(object, name));
  }
  // `array` is numpy_array(object).
  Int64Input(py::handle object, const char* name, const py::array& array) {
    read_array(object, name, array);
  }

  std::span<const int64_t> values() const {
    return array_ ? std::span(array_->data(), static_cast<size_t>(array_->size()))
                  : std::span(list_);
  }

 private:
  void read_array(py::handle object, const char* name, const py::array& array) {
    list_.clear();
    if (const auto integers = checked_integers(object, name, array)) array_ = Int64Array(*integers);
  }

  std::vector<int64_t> list_;
  std::optional<Int64Array> array_;
};

// A copy of token ids: other threads may write to the caller's memory during the call.
class TokensInput {
 public:
  TokensInput(py::handle object, const char* name) {
    if (py::isinstance<py::array_t<int32_t>>(object)) {
      const auto array = py::reinterpret_borrow<py::array_t<int32_t>>(object);
      const bool aligned = reinterpret_cast<uintptr_t>(array.data()) % alignof(int32_t) == 0;
      if (aligned && array.ndim() == 1 && array.strides(0) == array.itemsize()) {
        tokens_.assign(array.data(), array.data() + array.size());
        return;
      }
    }
    const Int64Input input(object, name);
    const std::span<const int64_t> values = input.values();
    tokens_.resize(values.size());
    if (to_int32(values, tokens_.data())) return;
    const auto same = [](int64_t value) { return static_cast<int32_t>(value) == value; };
    throw InvalidArgument(concat(name, ": expected values of int32, got ",
                                 *std::find_if_not(values.begin(), values.end(), same)));
  }

  std::span<const int32_t> values() const { return tokens_; }

 private:
  std::vector<int32_t> tokens_;
};

// An int or a NumPy integer.
inline int64_t integer_of(py::handle object, const char* name) {
  const auto index = py::reinterpret_steal<py::object>(PyNumber_Index(object.ptr()));
  if (!index) throw py::error_already_set();
  int overflow = 0;
  const int64_t value = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  if (overflow != 0) throw InvalidArgument(concat(name, ": expected an int64, got more bits"));
  return value;
}

// Bools are refused: they are no token counts.
inline bool is_integer(py::handle object) {
  if (PyBool_Check(object.ptr())) return false;
  return PyLong_Check(object.ptr()) != 0 ||
         (PyIndex_Check(object.ptr()) != 0 && py::hasattr(object, "ndim") &&
          object.attr("ndim").cast<int>() == 0);
}

inline int64_t id_of(py::handle object, const char* name) {
  if (!is_integer(object)) {
    throw InvalidArgument(
        concat(name, ": expected an integer of yours, got ", py::repr(object).cast<std::string>()));
  }
  return integer_of(object, name);
}

// One value for each of `size` sequences: an int for all of them, or an Int64Input.
class Int64Counts {
 public:
  Int64Counts(py::handle object, const char* name, size_t size) {
    if (PyLong_Check(object.ptr()) && !PyBool_Check(object.ptr())) {
      same_.assign(size, integer_of(object, name));
      return;
    }
    if (PyList_Check(object.ptr())) {
      each_.emplace(object, name);
      return;
    }
    const py::array array = numpy_array(object, name);
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

// Counts, or None.
inline std::optional<Int64Counts> optional_counts(py::handle object, const char* name,
                                                  size_t size) {
  if (object.is_none()) return std::nullopt;
  return std::optional<Int64Counts>(std::in_place, object, name, size);
}

inline std::span<const int64_t> values_of(const std::optional<Int64Counts>& counts) {
  return counts ? counts->values() : std::span<const int64_t>();
}

// Owns the tokens of a batch while the manager works without the GIL.
class AppendInput {
 public:
  AppendInput(py::handle tokens, const char* name, int64_t lookahead) {
    options_.lookahead = lookahead;
    if (tokens.is_none()) return;
    tokens_.emplace(tokens, name);
    options_.tokens = tokens_->values();
  }
  AppendInput(const AppendInput&) = delete;

  const AppendOptions& options() const { return options_; }

 private:
  std::optional<TokensInput> tokens_;
  AppendOptions options_;
};

// A numpy array over the caller's memory: `object` itself, or numpy() of a CPU tensor.
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

// BatchBuffers, and references to the arrays that own their memory.
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

  py::array_t<int32_t> changed_rows() const {
    const std::vector<int32_t>& rows = view.written.changed_rows;
    return py::array_t<int32_t>(static_cast<py::ssize_t>(rows.size()), rows.data());
  }

  py::array block_tables;
  py::array seq_lens;
  py::array query_start_loc;
  py::array slot_mapping;
  std::optional<py::array> positions;
  BatchBuffers view;
};

using Buffers = std::vector<OwnedBuffers*>;

inline std::vector<BatchBuffers*> views(const Buffers& buffers) {
  std::vector<BatchBuffers*> result;
  for (OwnedBuffers* group : buffers) {
    if (group == nullptr) throw InvalidArgument("buffers: expected BatchBuffers, got None");
    result.push_back(&group->view);
  }
  return result;
}

// Bytes, or text as UTF-8.
inline std::string bytes_of(py::handle object, const char* name, const char* expected) {
  if (py::isinstance<py::bytes>(object)) return object.cast<std::string>();
  if (!py::isinstance<py::str>(object)) {
    throw InvalidArgument(concat(name, ": expected ", expected, ", got ", type_name(object)));
  }
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(object.ptr(), &size);
  if (text == nullptr) {
    const py::error_already_set error;
    if (!error.matches(PyExc_UnicodeEncodeError)) throw error;
    throw InvalidArgument(concat(name, ": expected text that UTF-8 has, got a lone surrogate"));
  }
  return {text, static_cast<size_t>(size)};
}

inline std::optional<std::string> optional_bytes(py::handle object, const char* name) {
  if (object.is_none()) return std::nullopt;
  return bytes_of(object, name, "bytes, str or None");
}

inline PrefixKeys prefix_keys(py::handle salt, py::handle adapter, py::handle cache_dtype,
                              const py::sequence& multimodal) {
  PrefixKeys keys{.salt = optional_bytes(salt, "salt"),
                  .adapter = optional_bytes(adapter, "adapter"),
                  .cache_dtype = optional_bytes(cache_dtype, "cache_dtype"),
                  .multimodal = {}};
  for (const py::object item : multimodal) {
    try {
      const auto [start, num_tokens, digest] =
          item.cast<std::tuple<int64_t, int64_t, py::object>>();
      keys.multimodal.push_back(
          {start, num_tokens, bytes_of(digest, "multimodal: digest", "bytes or str")});
    } catch (const py::cast_error&) {
      throw InvalidArgument(
          "multimodal: expected items of (start, num_tokens, digest), got something else");
    }
  }
  return keys;
}

}  // namespace vllm_kernels::kv_cache
