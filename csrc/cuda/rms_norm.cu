#include "ops/rms_norm.h"

#include "cuda/launch.cuh"
#include "cuda/launchers.h"
#include "cuda/reduce.cuh"
#include "cuda/types.cuh"

namespace vllm_kernels::cuda {
namespace {

// One block a row; the row is read once into registers, kVectors 16-byte vectors a thread.
template <typename T, int kVectors>
__global__ void __launch_bounds__(1024) rms_norm_kernel(RmsNormParams p) {
  launch_dependents();
  wait_for_predecessor();
  const int num_vectors = static_cast<int>(p.hidden_size) / kVectorWidth<T>;
  const auto* x = reinterpret_cast<const Vector<T>*>(static_cast<const T*>(p.input) +
                                                     p.input_rows.offset(blockIdx.x));
  const auto* weight = static_cast<const Vector<T>*>(p.weight);
  auto* out = reinterpret_cast<Vector<T>*>(static_cast<T*>(p.out) + p.out_rows.offset(blockIdx.x));

  // Short rows have registers to spare to load the weight before the reduction.
  constexpr bool kEarlyWeight = kVectors <= 2;
  Vector<T> row[kVectors], scale[kEarlyWeight ? kVectors : 1];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int i = v * blockDim.x + threadIdx.x;
    row[v] = i < num_vectors ? x[i] : Vector<T>{};
  }
  if constexpr (kEarlyWeight) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int i = v * blockDim.x + threadIdx.x;
      scale[v] = i < num_vectors ? weight[i] : Vector<T>{};
    }
  }
  float square = 0.0f;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
#pragma unroll
    for (int j = 0; j < kVectorWidth<T>; ++j) {
      const float value = to_float(row[v][j]);
      square += value * value;
    }
  }
  const float inverse =
      rsqrtf(block_sum(square) / static_cast<float>(p.hidden_size) + p.epsilon);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int i = v * blockDim.x + threadIdx.x;
    if (i >= num_vectors) continue;
    const Vector<T> w = kEarlyWeight ? scale[kEarlyWeight ? v : 0] : weight[i];
    Vector<T> result;
#pragma unroll
    for (int j = 0; j < kVectorWidth<T>; ++j) {
      result[j] = from_float<T>(round_to<T>(to_float(row[v][j]) * inverse) * to_float(w[j]));
    }
    out[i] = result;
  }
}

// Any width and alignment: two passes, one element a step.
template <typename T>
__global__ void __launch_bounds__(1024) rms_norm_any_kernel(RmsNormParams p) {
  launch_dependents();
  wait_for_predecessor();
  const T* x = static_cast<const T*>(p.input) + p.input_rows.offset(blockIdx.x);
  const T* weight = static_cast<const T*>(p.weight);
  T* out = static_cast<T*>(p.out) + p.out_rows.offset(blockIdx.x);
  float square = 0.0f;
  for (int64_t i = threadIdx.x; i < p.hidden_size; i += blockDim.x) {
    const float value = to_float(x[i]);
    square += value * value;
  }
  const float inverse =
      rsqrtf(block_sum(square) / static_cast<float>(p.hidden_size) + p.epsilon);
  for (int64_t i = threadIdx.x; i < p.hidden_size; i += blockDim.x) {
    out[i] = from_float<T>(round_to<T>(to_float(x[i]) * inverse) * to_float(weight[i]));
  }
}

bool rows_aligned16(const void* base, const Rows& rows, DType dtype) {
  const int64_t width = 16 / size_of(dtype);
  return aligned16(base) && rows.inner_stride % width == 0 && rows.outer_stride % width == 0;
}

}  // namespace

void launch(const RmsNormParams& p, Stream stream) {
  constexpr const char* kOp = "rms_norm";
  const int64_t width = 16 / size_of(p.dtype);
  const int64_t num_vectors = p.hidden_size / width;
  const bool vectors = p.hidden_size % width == 0 && num_vectors <= 4 * 1024 &&
                       aligned16(p.weight) && rows_aligned16(p.input, p.input_rows, p.dtype) &&
                       rows_aligned16(p.out, p.out_rows, p.dtype);
  const dim3 grid(static_cast<unsigned>(p.input_rows.count));
  dispatch_float(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    if (!vectors) {
      const int threads = p.hidden_size >= 1024 ? 1024 : 256;
      launch_kernel(kOp, rms_norm_any_kernel<T>, grid, threads, 0, stream, p);
      return;
    }
    const auto with = [&](auto kernel, int per_thread) {
      const int64_t threads = (num_vectors + per_thread - 1) / per_thread;
      launch_kernel(kOp, kernel, grid, static_cast<unsigned>((threads + 31) / 32 * 32), 0, stream,
                    p);
    };
    // Few rows: wide blocks, one load a thread. Many rows: two loads in flight a thread.
    const bool many_rows = p.input_rows.count >= 1024;
    if (num_vectors <= (many_rows ? 256 : 1024)) return with(rms_norm_kernel<T, 1>, 1);
    if (num_vectors <= 2 * 1024) return with(rms_norm_kernel<T, 2>, 2);
    with(rms_norm_kernel<T, 4>, 4);
  });
}

}  // namespace vllm_kernels::cuda
