// Tensors that a binding makes: the results of two ops whose Python call must be cheap, indices
// between kernels, and scratch. Every other result belongs to the caller.
#pragma once
#include <span>

#include "torch_ops/base/schema_types.h"

namespace vllm_kernels {

// Contiguous, uninitialised, on the device of `like`.
inline Tensor empty(std::span<const int64_t> sizes, int32_t scalar_type, const Tensor& like) {
  int64_t strides[64] = {};  // torch has no more dimensions
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0; stride *= sizes[d]) strides[d] = stride;
  int32_t type = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &type));
  AtenTensorHandle made = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()),
                                                         sizes.data(), strides, scalar_type, type,
                                                         like.device_index(), &made));
  return Tensor(made);
}

}  // namespace vllm_kernels
