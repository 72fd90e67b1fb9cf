// The element types that the bindings pass to the kernels.
#pragma once
#include <cstdint>

namespace vllm_kernels {

enum class DType : uint8_t { kFloat32, kFloat16, kBFloat16, kFp8E4M3, kFp8E5M2, kInt8 };

constexpr int size_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return 4;
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    default:
      return 1;
  }
}

constexpr const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFp8E4M3:
      return "float8_e4m3fn";
    case DType::kFp8E5M2:
      return "float8_e5m2";
    case DType::kInt8:
      return "int8";
  }
  return "unknown";
}

}  // namespace vllm_kernels
