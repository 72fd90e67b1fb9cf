// C++ types of schema arguments, cheaper than the types of torch's stable headers.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#ifndef STABLE_TORCH_ERROR_CODE_CHECK  // torch 2.11 has only the macro that loses torch's message
#define STABLE_TORCH_ERROR_CODE_CHECK(call) TORCH_ERROR_CODE_CHECK(call)
#endif

namespace vllm_kernels {

// A `Tensor` with one owner and no copies; ops take it by const reference. The stable header's
// class shares its handle, which costs an allocation per argument.
class Tensor {
 public:
  explicit Tensor(AtenTensorHandle handle) : handle_(handle) {}
  AtenTensorHandle get() const { return handle_.get(); }
  void* data() const {
    void* data = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(get(), &data));
    return data;
  }
  AtenTensorHandle release() { return handle_.release(); }  // for a result
  int32_t device_index() const {
    int32_t index = -1;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(get(), &index));
    return index;
  }

  // Without memory: only its arguments are checked (torch.ops.vllm_kernels_checks).
  bool is_meta() const {
    static const int32_t kMeta = aoti_torch_device_type_meta();
    int32_t type = -1;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(get(), &type));
    return type == kMeta;
  }

 private:
  struct Delete {
    void operator()(AtenTensorHandle handle) const { aoti_torch_delete_tensor_object(handle); }
  };
  std::unique_ptr<AtenTensorOpaque, Delete> handle_;
};

inline const Tensor* or_null(const std::optional<Tensor>& tensor) {
  return tensor ? &*tensor : nullptr;
}

// A `str`. The stable header's std::string leaks its buffer on every call.
struct Text {
  std::string value;
  operator std::string_view() const { return value; }
};

}  // namespace vllm_kernels

namespace torch::stable::detail {

template <>
struct ToImpl<vllm_kernels::Tensor> {
  static vllm_kernels::Tensor call(StableIValue value, uint64_t, bool) {
    return vllm_kernels::Tensor(to<AtenTensorHandle>(value));
  }
};

// The stable header's version copies the tensor.
template <>
struct ToImpl<std::optional<vllm_kernels::Tensor>> {
  static std::optional<vllm_kernels::Tensor> call(StableIValue value, uint64_t, bool) {
    const std::unique_ptr<StableIValue> inner(to<StableIValue*>(value));  // allocated by torch
    if (inner == nullptr) return std::nullopt;
    return to<vllm_kernels::Tensor>(*inner);
  }
};

template <>
struct ToImpl<vllm_kernels::Text> {
  static vllm_kernels::Text call(StableIValue value, uint64_t, bool) {
    StringHandle handle = to<StringHandle>(value);
    size_t length = 0;
    const char* data = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
    STABLE_TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
    vllm_kernels::Text text{std::string(data, length)};
    STABLE_TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
    return text;
  }
};

}  // namespace torch::stable::detail
