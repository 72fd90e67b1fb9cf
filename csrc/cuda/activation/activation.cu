// silu_and_mul, mul_and_silu, gelu_and_mul, gelu_tanh_and_mul, gelu_new, gelu_fast, gelu_quick:
// out [rows, width], formulas in ops/activation.h. A CTA computes one chunk of one row, one 16-byte
// Vec (or one element, where rows are unaligned) per thread. There are no early reads.
// The functions are in activate.cuh; other gated activations are in activation_gated.cuh.
#include "ops/activation.h"

#include "cuda/activation/activate.cuh"
#include "cuda/base/fast_divmod.cuh"
#include "cuda/base/launch.cuh"
#include "cuda/base/vec.cuh"
#include "cuda/launchers.h"

namespace vllm_kernels::cuda {
namespace {

// A CTA computes one chunk of one row: blockDim.x Vecs. `chunks` divides by chunks_per_row, the
// number of chunks per row.
template <typename T, Activation kActivation, bool kGated, int kWidth>
__global__ void __launch_bounds__(256)
    activation_kernel(ActivationParams p, RowOffsets input_rows, RowOffsets out_rows,
                      FastDivisor chunks, int chunks_per_row) {
  launch_dependents();
  wait_for_primary_kernel();
  const uint32_t row = chunks.divide(blockIdx.x);
  const uint32_t chunk = blockIdx.x - row * chunks_per_row;
  const int64_t i = static_cast<int64_t>(chunk) * blockDim.x + threadIdx.x;
  if (i >= p.width / kWidth) return;
  const int64_t from = input_rows.of(row);
  using Elements = Vec<T, kWidth>;
  const auto* gate = reinterpret_cast<const Elements*>(static_cast<const T*>(p.gate) + from);
  const auto* up = reinterpret_cast<const Elements*>(static_cast<const T*>(p.up) + from);
  auto* out = reinterpret_cast<Elements*>(static_cast<T*>(p.out) + out_rows.of(row));

  const Elements gates = gate[i];
  Elements ups;
  if constexpr (kGated) ups = up[i];
  float values[kWidth];
  upcast(gates, values);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) values[j] = activate<kActivation, T>(values[j]);
  if constexpr (kGated) {
    float factors[kWidth];
    upcast(downcast<T>(values), values);
    upcast(ups, factors);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) values[j] *= factors[j];
  }
  out[i] = downcast<T>(values);
}

template <typename T, Activation kActivation, bool kGated, int kWidth>
void launch_width(const ActivationParams& p, Stream stream) {
  const RowChunks chunks(p.input_rows.count, p.width / kWidth);
  launch_kernel(p.op, activation_kernel<T, kActivation, kGated, kWidth>,
                grid_size(p.op, p.input_rows.count * chunks.per_row), chunks.threads, 0, stream, p,
                RowOffsets(p.input_rows), RowOffsets(p.out_rows), FastDivisor(chunks.per_row),
                static_cast<int>(chunks.per_row));
}

template <Activation kActivation, bool kGated>
void launch_rows(const ActivationParams& p, Stream stream) {
  dispatch_float(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    constexpr int kWidth = kVecWidth<T>;
    const bool aligned = p.width % kWidth == 0 && rows_aligned16(p.out, p.out_rows, p.dtype) &&
                         rows_aligned16(p.gate, p.input_rows, p.dtype) && aligned16(p.up);
    if (aligned) {
      launch_width<T, kActivation, kGated, kWidth>(p, stream);
    } else {
      launch_width<T, kActivation, kGated, 1>(p, stream);
    }
  });
}

}  // namespace

void launch(const ActivationParams& p, Stream stream) {
  const bool gated = p.up != nullptr;
  switch (p.activation) {
    case Activation::kSilu:
      return launch_rows<Activation::kSilu, true>(p, stream);
    case Activation::kGelu:
      return launch_rows<Activation::kGelu, true>(p, stream);
    case Activation::kGeluTanh:
      return gated ? launch_rows<Activation::kGeluTanh, true>(p, stream)
                   : launch_rows<Activation::kGeluTanh, false>(p, stream);
    case Activation::kGeluQuick:
      return launch_rows<Activation::kGeluQuick, false>(p, stream);
  }
}

}  // namespace vllm_kernels::cuda
