// From a DType to the storage type of this level's kernels, by function and lambda.
#pragma once
#include "cpu/base/fp8.h"
#include "cpu/base/int8.h"
#include "cpu/base/vec.h"
#include "ops/dtype.h"

namespace vllm_kernels::cpu {
namespace {

// Calls body(T{}) with the storage type of a floating dtype. The bindings let no other pass.
template <typename Body>
inline void dispatch_float(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::kFloat16:
      return body(Half{});
    case DType::kBFloat16:
      return body(BFloat16{});
    default:
      return body(float{});
  }
}

// Calls body(C{}) with the storage type of a cache for a model of type T: T itself or an 8-bit
// type.
template <typename T, typename Body>
inline void dispatch_cache(DType cache, Body&& body) {
  switch (cache) {
    case DType::kFp8E4M3:
      return body(Fp8E4M3{});
    case DType::kFp8E5M2:
      return body(Fp8E5M2{});
    case DType::kInt8:
      return body(Int8{});
    default:
      return body(T{});
  }
}

// Calls body(C{}) with the storage type of an 8-bit dtype.
template <typename Body>
inline void dispatch_8_bit(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::kFp8E5M2:
      return body(Fp8E5M2{});
    case DType::kInt8:
      return body(Int8{});
    default:
      return body(Fp8E4M3{});
  }
}

constexpr int64_t kTaskBytes = 32768;  // traffic of one task

// Rows per task when a row moves `row_bytes` bytes.
inline int64_t rows_per_task(int64_t row_bytes) {
  return row_bytes >= kTaskBytes ? 1
                                 : (kTaskBytes + row_bytes - 1) / (row_bytes > 0 ? row_bytes : 1);
}

inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

}  // namespace
}  // namespace vllm_kernels::cpu
