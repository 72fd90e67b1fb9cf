// The element types that the bindings pass to the kernels.
#pragma once
#include <cstdint>

namespace vllm_kernels {

// kInt4x2: two 4-bit numbers in a byte, of KV caches alone (paged_kv.h).
enum class DType : uint8_t { kFloat32, kFloat16, kBFloat16, kFp8E4M3, kFp8E5M2, kInt8, kInt4x2 };

// Values that an element holds.
constexpr int values_of(DType dtype) {
  return dtype == DType::kInt4x2 ? 2 : 1;
}

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
  constexpr const char* kNames[] = {"float32",     "float16", "bfloat16", "float8_e4m3fn",
                                    "float8_e5m2", "int8",    "int4"};
  return kNames[static_cast<int>(dtype)];
}

}  // namespace vllm_kernels
