// The checks of check.h, and the text of their errors.
#include "torch_ops/base/check.h"

#include <cmath>
#include <cstdio>
#include <limits>
#include <stdexcept>

namespace vllm_kernels {
namespace {

std::string list_text(std::span<const int64_t> values) {
  std::string text = "[";
  for (size_t i = 0; i < values.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(values[i]);
  }
  return text + "]";
}

struct TorchDtype {
  int32_t (*type)();
  const char* name;
  std::optional<DType> known;
};
constexpr TorchDtype kTorchDtypes[] = {
    {aoti_torch_dtype_float32, "float32", DType::kFloat32},
    {aoti_torch_dtype_float16, "float16", DType::kFloat16},
    {aoti_torch_dtype_bfloat16, "bfloat16", DType::kBFloat16},
    {aoti_torch_dtype_float8_e4m3fn, "float8_e4m3fn", DType::kFp8E4M3},
    {aoti_torch_dtype_float8_e5m2, "float8_e5m2", DType::kFp8E5M2},
    {aoti_torch_dtype_int8, "int8", DType::kInt8},
    {aoti_torch_dtype_float64, "float64", {}},
    {aoti_torch_dtype_uint8, "uint8", {}},
    {aoti_torch_dtype_int16, "int16", {}},
    {aoti_torch_dtype_int32, "int32", {}},
    {aoti_torch_dtype_int64, "int64", {}},
    {aoti_torch_dtype_bool, "bool", {}},
};

std::string dtype_text(int32_t scalar_type) {
  for (const TorchDtype& dtype : kTorchDtypes) {
    if (dtype.type() == scalar_type) return dtype.name;
  }
  return "torch scalar type " + std::to_string(scalar_type);
}

std::optional<DType> known_dtype(int32_t scalar_type) {
  for (const TorchDtype& dtype : kTorchDtypes) {
    if (dtype.type() == scalar_type) return dtype.known;
  }
  return std::nullopt;
}

std::string device_text(int32_t type, int32_t index) {
  if (type == aoti_torch_device_type_cpu()) return "cpu";
  if (type == aoti_torch_device_type_meta()) return "meta";
  if (type == aoti_torch_device_type_cuda()) return "cuda:" + std::to_string(index);
  return "device type " + std::to_string(type);
}

int64_t span_elements(const Argument& a) {  // from the first element to past the last
  int64_t last = 0;
  for (int64_t d = 0; d < a.dim(); ++d) {
    if (a.size(d) == 0) return 0;
    last += (a.size(d) - 1) * a.stride(d);
  }
  return last + 1;
}

int64_t span_bytes(const Argument& a) {
  return span_elements(a) * a.element_size();
}

}  // namespace

void Argument::fail(const std::string& expected_and_got) const {
  throw std::runtime_error(std::string(op_) + ": " + name_ + ": " + expected_and_got);
}

std::string Argument::shape_text() const {
  return list_text(sizes());
}

DType Argument::dtype() const {
  const std::optional<DType> dtype = known_dtype(scalar_type_);
  if (!dtype) fail("expected a floating dtype, got " + dtype_text(scalar_type_));
  return *dtype;
}

Argument& Argument::floating(bool or_e4m3) {
  if (or_e4m3 && is_e4m3()) return *this;
  const std::optional<DType> dtype = known_dtype(scalar_type_);
  if (!dtype || size_of(*dtype) == 1) {
    const std::string last = or_e4m3 ? ", bfloat16 or float8_e4m3fn" : " or bfloat16";
    fail("expected float32, float16" + last + ", got " + dtype_text(scalar_type_));
  }
  return *this;
}

Argument& Argument::same_dtype(const Argument& as) {
  if (scalar_type_ != as.scalar_type_) {
    fail("expected " + dtype_text(as.scalar_type_) + " (from " + as.name_ + "), got " +
         dtype_text(scalar_type_) + (as.is_e4m3() ? uint8_hint() : ""));
  }
  return *this;
}

Argument& Argument::exactly(int32_t scalar_type, const char* hint) {
  if (scalar_type_ != scalar_type) {
    fail("expected " + dtype_text(scalar_type) + ", got " + dtype_text(scalar_type_) + hint);
  }
  return *this;
}

const char* Argument::uint8_hint() const {
  return scalar_type_ == aoti_torch_dtype_uint8()
             ? "; say what its bytes are with .view(torch.float8_e4m3fn)"
             : "";
}

Argument& Argument::cache_dtype(DType dtype, std::string_view text, std::string_view name) {
  const std::optional<DType> got = known_dtype(scalar_type_);
  const bool bytes = size_of(dtype) == 1 && scalar_type_ == aoti_torch_dtype_uint8();
  if (!bytes && (!got || *got != dtype)) {
    fail("expected " + std::string(size_of(dtype) == 1 ? "uint8 or " : "") + name_of(dtype) +
         " (from " + std::string(name) + " = \"" + std::string(text) + "\"), got " +
         dtype_text(scalar_type_));
  }
  return *this;
}

Argument& Argument::cache_of(const Argument& model) {
  if (model.is_e4m3()) return same_dtype(model);
  const std::optional<DType> got = known_dtype(scalar_type_);
  if (!got || (scalar_type_ != model.scalar_type_ && size_of(*got) != 1)) {
    fail("expected " + dtype_text(model.scalar_type_) + " (from " + model.name_ +
         "), float8_e4m3fn, float8_e5m2 or int8, got " + dtype_text(scalar_type_) + uint8_hint());
  }
  return *this;
}

Argument& Argument::one_of(std::initializer_list<DType> dtypes) {
  const std::optional<DType> got = known_dtype(scalar_type_);
  std::string expected;
  for (DType dtype : dtypes) {
    if (got == dtype) return *this;
    expected += (expected.empty() ? "" : " or ") + std::string(name_of(dtype));
  }
  fail("expected " + expected + ", got " + dtype_text(scalar_type_) + uint8_hint());
}

Argument& Argument::rank(int64_t low, int64_t high) {
  if (dim() < low || dim() > high) {
    fail("expected " + std::to_string(low) + (high == low ? "" : " to " + std::to_string(high)) +
         " dimensions, got shape " + shape_text());
  }
  return *this;
}

Argument& Argument::shape(std::initializer_list<Size*> dims) {
  if (dim() != static_cast<int64_t>(dims.size())) {
    std::string wanted = "[";
    for (Size* size : dims) wanted += (wanted.size() > 1 ? ", " : "") + std::string(size->name);
    fail("expected shape " + wanted + "], got shape " + shape_text());
  }
  int64_t d = 0;
  for (Size* size : dims) at(d++, *size);
  return *this;
}

void Argument::fail_size(int64_t dimension, const Size& wanted) const {
  const bool bound = dimension >= 0 && dimension < dim();
  fail("expected " + std::string(wanted.name) +
       (bound ? " = " + std::to_string(wanted.value) : std::string()) +
       (bound && wanted.source != nullptr ? std::string(" (from ") + wanted.source + ")"
                                          : std::string()) +
       " at dimension " + std::to_string(dimension) + ", got shape " + shape_text());
}

Argument& Argument::at(int64_t dimension, Size& wanted) {
  const int64_t d = dimension < 0 ? dimension + dim() : dimension;
  if (d < 0 || d >= dim()) fail_size(dimension, wanted);
  if (wanted.value < 0) {
    wanted.value = size(d);
    wanted.source = name_;
  } else if (size(d) != wanted.value) {
    fail_size(d, wanted);
  }
  return *this;
}

Argument& Argument::same_shape(const Argument& as) {
  if (!std::ranges::equal(sizes(), as.sizes())) {
    fail("expected shape " + as.shape_text() + " (from " + as.name_ + "), got shape " +
         shape_text());
  }
  return *this;
}

Argument& Argument::one_element() {
  if (numel() != 1) fail("expected one element, got shape " + shape_text());
  return *this;
}

Argument& Argument::inner_contiguous() {
  if (dim() > 0 && size(-1) > 1 && stride(-1) != 1) {
    fail("expected stride 1 in the last dimension, got strides " + list_text(strides()) +
         " for shape " + shape_text() + "; call .contiguous()");
  }
  return *this;
}

Argument& Argument::contiguous() {
  int64_t expected = 1;
  for (int64_t d = dim() - 1; d >= 0; --d) {
    if (size(d) > 1 && stride(d) != expected && numel() > 0) {
      fail("expected a contiguous tensor, got strides " + list_text(strides()) + " for shape " +
           shape_text() + "; call .contiguous()");
    }
    expected *= size(d);
  }
  return *this;
}

Argument& Argument::fold_tokens(std::array<int64_t, 6>& folded) {
  rank(4, 4);
  const bool one_each = size(1) <= 1;
  if (!one_each && size(0) > 1 && stride(0) != size(1) * stride(1)) {
    fail("expected one stride between all tokens, got strides " + list_text(strides()) +
         " for shape " + shape_text() + "; call .contiguous()");
  }
  folded = {size(0) * size(1), size(2), size(3), stride(one_each ? 0 : 1), stride(2), stride(3)};
  sizes_ = folded.data();
  strides_ = folded.data() + 3;
  dim_ = 3;
  return *this;
}

Argument& Argument::on_cpu() {
  if (!is_cpu() && !is_meta()) {
    fail("expected a tensor on cpu, got " + device_text(device_type_, device_index_));
  }
  return *this;
}

Argument& Argument::written() {
  // Visits the dimensions by ascending stride. Each stride must exceed the extent of the smaller
  // ones.
  if (numel() == 0) return *this;
  int64_t inside = 0;  // extent of the smaller strides: from first to last element
  int64_t below = -1;
  for (int64_t done = 0; done < dim(); ++done) {
    int64_t next = -1;
    for (int64_t d = 0; d < dim(); ++d) {
      if (size(d) <= 1) continue;
      const bool later =
          below < 0 || stride(d) > stride(below) || (stride(d) == stride(below) && d > below);
      if (!later) continue;
      if (next < 0 || stride(d) < stride(next) || (stride(d) == stride(next) && d < next)) next = d;
    }
    if (next < 0) break;
    if (stride(next) <= inside) {
      fail("is written, so its elements must not share memory (expanded?), got strides " +
           list_text(strides()) + " for shape " + shape_text());
    }
    inside += (size(next) - 1) * stride(next);
    below = next;
  }
  return *this;
}

// A storage may be freed, or cut, while tensors still point into it.
void Argument::require_memory(int64_t storage_offset, int64_t storage_bytes) const {
  const int64_t elements = span_elements(*this);
  if (elements == 0) return;
  const int64_t size = element_size();
  const bool null = reinterpret_cast<intptr_t>(data_) == storage_offset * size;
  if (!null && (storage_offset + elements) * size <= storage_bytes) return;
  if (is_meta()) return;
  fail("expected memory for all elements, got shape " + shape_text() + " in a storage of " +
       std::to_string(storage_bytes) + " bytes" + (null ? " at a null pointer" : "") +
       "; was it freed?");
}

void Expect::fail(const std::string& message) const {
  throw std::runtime_error(std::string(op_) + ": " + message);
}

void Expect::not_negative(const char* name, double value) const {
  if (value >= 0) return;
  fail(std::string(name) + ": expected a number >= 0, got " + std::to_string(value));
}

float Expect::finite(const char* name, double value) const {
  if (std::abs(value) <= std::numeric_limits<float>::max()) return static_cast<float>(value);
  fail(std::string(name) + ": expected a number that is finite in float32, got " +
       number_text(value));
}

float Expect::finite_not_negative(const char* name, double value) const {
  not_negative(name, value);
  return finite(name, value);
}

float Expect::finite_positive(const char* name, double value) const {
  const float number = finite(name, value);
  if (number > 0) return number;
  fail(std::string(name) + ": expected a number > 0, got " + number_text(value));
}

std::string number_text(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%g", value);
  return text;
}

Argument Expect::tensor_on_any_device(const char* name, const Tensor& tensor) {
  Argument argument;
  argument.op_ = op_;
  argument.name_ = name;
  const AtenTensorHandle handle = tensor.get();
  bool defined = false;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_is_defined(handle, &defined));
  if (!defined) argument.fail("expected a tensor, got None");
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(handle, &argument.dim_));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(handle, &argument.sizes_));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(handle, &argument.strides_));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(handle, &argument.scalar_type_));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(handle, &argument.device_type_));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(handle, &argument.device_index_));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(handle, &argument.data_));
  int64_t offset = 0, bytes = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_offset(handle, &offset));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(handle, &bytes));
  argument.require_memory(offset, bytes);
  return argument;
}

Argument Expect::tensor(const char* name, const Tensor& tensor) {
  Argument argument = tensor_on_any_device(name, tensor);
  if (first_name_ == nullptr) {
    first_name_ = name;
    device_type_ = argument.device_type_;
    device_index_ = argument.device_index_;
  } else if (argument.device_type_ != device_type_ || argument.device_index_ != device_index_) {
    argument.fail("expected a tensor on " + device_text(device_type_, device_index_) + " (from " +
                  first_name_ + "), got " +
                  device_text(argument.device_type_, argument.device_index_));
  }
  return argument;
}

Rows Expect::rows(const Argument& argument, int64_t keep_dims) const {
  // Folds from the innermost dimension out. A dimension of size 1 folds into any stride.
  Rows rows{.count = 1, .inner_count = 1, .outer_stride = 0, .inner_stride = 0};
  int levels = 0;  // strides in use
  int64_t outer_count = 1;
  for (int64_t d = argument.dim() - keep_dims - 1; d >= 0; --d) {
    const int64_t size = argument.size(d);
    const int64_t stride = argument.stride(d);
    rows.count *= size;
    if (size == 1) continue;
    if (levels == 0) {
      levels = 1;
      rows.inner_count = size;
      rows.inner_stride = stride;
    } else if (levels == 1 && stride == rows.inner_stride * rows.inner_count) {
      rows.inner_count *= size;
    } else if (levels == 1) {
      levels = 2;
      outer_count = size;
      rows.outer_stride = stride;
    } else if (stride == rows.outer_stride * outer_count) {
      outer_count *= size;
    } else {
      argument.fail("expected leading dimensions that fold to two strides, got strides " +
                    list_text(argument.strides()) + " for shape " + argument.shape_text() +
                    "; call .contiguous()");
    }
  }
  return rows;
}

void Expect::same_or_apart(const Argument& out, const Argument& input) const {
  bool same = out.data() == input.data() && out.dim() == input.dim() &&
              out.scalar_type_ == input.scalar_type_;
  for (int64_t d = 0; same && d < out.dim(); ++d) {
    same = out.size(d) == input.size(d) && (out.size(d) <= 1 || out.stride(d) == input.stride(d));
  }
  if (!same) apart(out, input);
}

bool Expect::overlap(const Argument& out, const Argument& input) const {
  if (out.data() == nullptr || input.data() == nullptr) return false;  // no elements, or meta
  const int64_t gap = static_cast<const char*>(input.data()) - static_cast<const char*>(out.data());
  if (gap >= 0 ? gap >= span_bytes(out) : -gap >= span_bytes(input)) return false;
  if (span_bytes(out) == 0 || span_bytes(input) == 0) return false;
  // Slices of one packed tensor interleave without overlapping. Try each stride of `out` as the
  // pitch of such a tensor. All larger strides of both must be multiples of it. Then compare where
  // the two rows lie within one pitch.
  const auto row_bytes = [&](const Argument& a, int64_t pitch) {  // 0: not a pitch of `a`
    int64_t last = 0;
    for (int64_t d = 0; d < a.dim(); ++d) {
      if (a.size(d) <= 1) continue;
      if (a.stride(d) < pitch) last += (a.size(d) - 1) * a.stride(d);
      if (a.stride(d) >= pitch && a.stride(d) % pitch != 0) return int64_t{0};
    }
    return (last + 1) * a.element_size();
  };
  for (int64_t d = 0; d < out.dim(); ++d) {
    const int64_t pitch = out.stride(d);
    if (out.size(d) <= 1 || pitch <= 0 || out.element_size() != input.element_size()) continue;
    const int64_t out_row = row_bytes(out, pitch);
    const int64_t input_row = row_bytes(input, pitch);
    const int64_t pitch_bytes = pitch * out.element_size();
    const int64_t shift =
        ((gap % pitch_bytes) + pitch_bytes) % pitch_bytes;  // of input's row from out's
    if (out_row > 0 && input_row > 0 && shift >= out_row && shift + input_row <= pitch_bytes) {
      return false;
    }
  }
  return true;
}

void Expect::apart(const Argument& out, const Argument& input) const {
  if (overlap(out, input)) {
    fail(std::string(out.name()) + " and " + input.name() + " overlap in memory");
  }
}

void Expect::apart(const Arguments& written, const Arguments& read) const {
  for (const Argument& one : written) {
    for (const Argument& other : read) apart(one, other);
    for (const Argument& other : written) {
      if (&other == &one) break;
      apart(one, other);
    }
  }
}

const void* read_vector(Expect& expect, const char* name, const Tensor* tensor, const Argument& as,
                        Size& size, Arguments& read) {
  if (tensor == nullptr) return nullptr;
  const Argument vector =
      expect.tensor(name, *tensor).same_dtype(as).shape({&size}).inner_contiguous();
  read.add(vector);
  return vector.data();
}

}  // namespace vllm_kernels
