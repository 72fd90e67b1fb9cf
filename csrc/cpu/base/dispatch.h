// Dispatch from a DType to a storage type, the scales of a cache, and the size of a task. See vec.h
// for the anonymous namespace.
#pragma once
#include "cpu/base/fp8.h"
#include "cpu/base/int8.h"
#include "cpu/base/vec.h"
#include "ops/paged_kv.h"

namespace vllm_kernels::cpu {
namespace {

// Calls body(T{}) with the storage type of a floating dtype. The bindings refuse other dtypes.
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

// Calls body(C{}) with the storage type of a cache of any dtype.
template <typename Body>
inline void dispatch_cache(DType cache, Body&& body) {
  if (size_of(cache) == 1) return dispatch_8_bit(cache, body);
  dispatch_float(cache, body);
}

// Calls body(C{}) with the storage type of a cache of a model of type T: T or an 8-bit type.
template <typename T, typename Body>
inline void dispatch_cache(DType cache, Body&& body) {
  if (size_of(cache) == 1) return dispatch_8_bit(cache, body);
  body(T{});
}

constexpr int64_t kTaskBytes = 32768;  // read and written by one task

// Rows per task if a row moves `row_bytes` bytes.
inline int64_t rows_per_task(int64_t row_bytes) {
  return row_bytes >= kTaskBytes ? 1
                                 : (kTaskBytes + row_bytes - 1) / (row_bytes > 0 ? row_bytes : 1);
}

inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// The dequantization scale of K or V for a KV head; 1 for caches without scales.
inline float scale_of(const PagedKv& kv, bool is_key, int64_t head) {
  const float* scales = is_key ? kv.k_scale : kv.v_scale;
  return size_of(kv.dtype) == 1 && scales != nullptr ? scales[head * kv.scale_stride] : 1.0f;
}

}  // namespace
}  // namespace vllm_kernels::cpu
