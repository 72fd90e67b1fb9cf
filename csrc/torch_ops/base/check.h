// Checks of arguments, in the words of the docstring. A failure throws std::runtime_error. Python
// gets a RuntimeError with exactly this text:
//   rms_norm: weight: expected hidden_size = 64 (from input) at dimension 0, got shape [32]
#pragma once
#include <algorithm>
#include <array>
#include <concepts>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "environment.h"
#include "ops/dtype.h"
#include "ops/rows.h"
#include "torch_ops/base/schema_types.h"

namespace vllm_kernels {

// A named size. The first tensor that has it binds it; every later tensor must agree.
struct Size {
  const char* name;
  int64_t value = -1;
  const char* source = nullptr;  // the argument that bound it

  explicit Size(const char* name) : name(name) {}
  Size(const char* name, int64_t value, const char* source)
      : name(name), value(value), source(source) {}
  operator int64_t() const { return value; }
};

inline int64_t product(std::span<const int64_t> sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies());
}

// A tensor argument, its metadata read once. The checks return *this.
class Argument {
 public:
  // --- properties
  const char* name() const { return name_; }
  int64_t dim() const { return dim_; }
  int64_t size(int64_t d) const { return sizes_[d < 0 ? d + dim() : d]; }
  int64_t stride(int64_t d) const { return strides_[d < 0 ? d + dim() : d]; }
  int64_t numel() const { return product(sizes()); }
  std::span<const int64_t> sizes() const { return {sizes_, static_cast<size_t>(dim_)}; }
  std::span<const int64_t> strides() const { return {strides_, static_cast<size_t>(dim_)}; }
  DType dtype() const;                                  // after a dtype check
  int32_t scalar_type() const { return scalar_type_; }  // torch's
  bool is_int64() const { return scalar_type_ == aoti_torch_dtype_int64(); }
  bool is_e4m3() const { return scalar_type_ == aoti_torch_dtype_float8_e4m3fn(); }
  int64_t element_size() const {
    return static_cast<int64_t>(aoti_torch_dtype_element_size(scalar_type_));
  }
  bool is_cpu() const { return device_type_ == aoti_torch_device_type_cpu(); }
  bool is_meta() const { return device_type_ == aoti_torch_device_type_meta(); }
  int32_t device_index() const { return device_index_; }
  const void* data() const { return data_; }
  void* mutable_data() const { return data_; }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }

  // --- checks on the element type
  Argument& floating(bool or_e4m3 = false);  // float32, float16 or bfloat16
  Argument& same_dtype(const Argument& as);
  Argument& float32() { return exactly(aoti_torch_dtype_float32(), "; cast it with .float()"); }
  Argument& int32() { return exactly(aoti_torch_dtype_int32(), "; cast it with .int()"); }
  Argument& int64() { return exactly(aoti_torch_dtype_int64(), "; cast it with .long()"); }
  Argument& int8() { return exactly(aoti_torch_dtype_int8(), ""); }
  Argument& boolean() { return exactly(aoti_torch_dtype_bool(), "; cast it with .bool()"); }
  Argument& uint8() { return exactly(aoti_torch_dtype_uint8(), ""); }
  // `dtype`; an 8-bit one may also be stored as uint8
  Argument& cache_dtype(DType dtype, std::string_view text,
                        std::string_view name = "kv_cache_dtype");
  // the dtype of `model`, or an 8-bit one unless `model` is e4m3
  Argument& cache_of(const Argument& model);
  Argument& one_of(std::initializer_list<DType> dtypes);

  // --- checks on the shape
  Argument& rank(int64_t low, int64_t high);
  Argument& shape(std::initializer_list<Size*> dims);  // exact rank
  Argument& at(int64_t dimension, Size& size);         // negative: counted from the end
  Argument& same_shape(const Argument& as);
  Argument& one_element();

  // --- checks on the memory
  Argument& inner_contiguous();  // last stride 1
  Argument& contiguous();
  // [batch, length, rows, elements] as [batch * length, rows, elements], which needs one stride
  // between all tokens. `folded` keeps its shape and strides, for as long as the argument is used.
  Argument& fold_tokens(std::array<int64_t, 6>& folded);
  Argument& on_cpu();   // or meta
  Argument& written();  // no two elements share an address

  [[noreturn]] void fail(const std::string& expected_and_got) const;
  std::string shape_text() const;

 private:
  friend class Expect;
  Argument& exactly(int32_t scalar_type, const char* hint);
  const char* uint8_hint() const;
  void require_memory(int64_t storage_offset, int64_t storage_bytes) const;
  [[noreturn]] void fail_size(int64_t dimension, const Size& wanted) const;

  // Set by Expect. No default values: an unused Arguments array then costs nothing.
  const char* op_;
  const char* name_;
  void* data_;
  int64_t* sizes_;
  int64_t* strides_;
  int64_t dim_;
  int32_t scalar_type_;  // torch's ScalarType
  int32_t device_type_;
  int32_t device_index_;
};

// Tensors that a call reads or writes, for overlap checks.
class Arguments {
 public:
  template <std::same_as<Argument>... Some>
  Arguments(const Some&... arguments) {
    add(arguments...);
  }
  template <std::same_as<Argument>... Some>
  void add(const Some&... arguments) {
    ((arguments_.at(count_++) = arguments), ...);
  }
  auto begin() const { return arguments_.begin(); }
  auto end() const { return arguments_.begin() + count_; }

 private:
  std::array<Argument, 20> arguments_;  // the most that an op has: sample
  size_t count_ = 0;
};

// Throws the first finding of earlier CUDA ops' finished scans, without a sync (index_check.h).
// Does nothing without check mode.
void raise_bad_index();

// The checks of one call of an op.
class Expect {
 public:
  // Throws for an environment variable of unknown value, and what earlier calls have found.
  explicit Expect(const char* op) : op_(op) {
    check_environment();
    raise_bad_index();
  }

  // Reads the tensor's metadata. Requires it to be defined, with memory for all its elements, and
  // on the device of the first tensor read.
  Argument tensor(const char* name, const Tensor& tensor);
  // The same, on any device.
  Argument tensor_on_any_device(const char* name, const Tensor& tensor);

  // Folds the leading dimensions of [..., width] to at most two strides.
  Rows rows(const Argument& argument, int64_t keep_dims = 1) const;

  // `out` may be exactly `input`. Otherwise they must not overlap.
  void same_or_apart(const Argument& out, const Argument& input) const;
  // Requires that they do not overlap.
  void apart(const Argument& out, const Argument& input) const;
  // The same for every written tensor and all others. Of two written ones, the message names the
  // later one first.
  void apart(const Arguments& written, const Arguments& read) const;
  // Whether two tensors may share an element. Slices of one packed tensor do not.
  bool overlap(const Argument& out, const Argument& input) const;

  // Throws "<op>: <message>" if the condition is false.
  void that(bool condition, const std::string& message) const {
    if (!condition) fail(message);
  }
  void not_negative(const char* name, double value) const;
  // As float32, in which it must be finite.
  float finite(const char* name, double value) const;
  float finite_not_negative(const char* name, double value) const;
  float finite_positive(const char* name, double value) const;
  [[noreturn]] void fail(const std::string& message) const;
  const char* op() const { return op_; }

 private:
  static void check_environment() {
    static const bool kKnown = (check_mode(), logs_reports(), true);
    (void)kKnown;
  }

  const char* op_;
  const char* first_name_ = nullptr;
  int32_t device_type_ = -1;
  int32_t device_index_ = -1;
};

// --- 64-bit numbers as int32. Kernels count in 32 bits. Only these two functions cast
// (tools/check_house.py).

// Throws where a size of `of` does not fit:
//   paged_attention: key_cache: expected num_kv_heads < 2^31, got shape [4, 16, 4294967297, 32]
inline int32_t int32_size(const Argument& of, const char* what, int64_t value) {
  if (value < 0 || value > INT32_MAX) {
    of.fail(std::string("expected ") + what + " < 2^31, got shape " + of.shape_text());
  }
  return static_cast<int32_t>(value);
}

// The nearest int32, for bounds whose size past 2^31 does not matter.
inline int32_t clamped_int32(int64_t value) {
  return static_cast<int32_t>(std::clamp<int64_t>(value, INT32_MIN, INT32_MAX));
}

// As %g prints it: 1e+308, nan, -1.
std::string number_text(double value);

// `tensor` or null, [size] of the dtype of `as`. `read` gets it where it is given.
const void* read_vector(Expect& expect, const char* name, const Tensor* tensor, const Argument& as,
                        Size& size, Arguments& read);

}  // namespace vllm_kernels
