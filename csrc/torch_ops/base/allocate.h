// Tensors that a binding makes: the results of three ops whose Python call must be cheap, indices
// between kernels, and scratch. Every other result belongs to the caller.
#pragma once
#include <span>
#include <stdexcept>
#include <string>

#include "torch_ops/base/schema_types.h"

namespace vllm_kernels {

// Contiguous, uninitialised, on the device of `like`. The C ABI keeps the allocator's own message.
inline Tensor empty(std::span<const int64_t> sizes, int32_t scalar_type, const Tensor& like) {
  int64_t strides[64] = {};  // torch has no more dimensions
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0; stride *= sizes[d]) strides[d] = stride;
  int32_t type = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &type));
  AtenTensorHandle made = nullptr;
  if (aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.data(), strides,
                               scalar_type, type, like.device_index(), &made)) {
    std::string shape;
    for (const int64_t size : sizes) shape += (shape.empty() ? "" : ", ") + std::to_string(size);
    throw std::runtime_error("not enough memory for a tensor of shape [" + shape + "]");
  }
  return Tensor(made);
}

}  // namespace vllm_kernels
