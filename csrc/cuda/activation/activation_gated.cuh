// The kernel of the gated activations, out [rows, width]; ops/activation_gated.h has the formulas.
// A CTA computes one chunk of one row, one Vec per thread. There are no early reads.
// An Epilogue (activation_gated.cu, activation_quant.cu) converts the products to the result:
//   Out<T>           element type of the result
//   kRounds          whether the activation and the product are rounded to T before done()
//   prepare()        loads that do not depend on the row
//   done(...)        returns the Vec to store
#pragma once
#include "cuda/activation/activate.cuh"
#include "cuda/base/fast_divmod.cuh"
#include "cuda/base/launch.cuh"
#include "cuda/base/vec.cuh"
#include "cuda/launchers.h"
#include "ops/activation_gated.h"

namespace vllm_kernels::cuda {

struct GatedRows {
  RowOffsets out, gate, up;
  explicit GatedRows(const GatedParams& p) : out(p.out_rows), gate(p.gate_rows), up(p.up_rows) {}
};

// gate_value() returns the activated gate, up_value() its factor.
template <Gated kFunction, typename T>
__device__ __forceinline__ float gate_value(const GatedParams& p, float gate) {
  if constexpr (kFunction == Gated::kFatRelu) return gate <= p.bound ? 0.0f : gate;
  if constexpr (kFunction != Gated::kSilu) gate = at_most(gate, p.bound);
  if constexpr (kFunction == Gated::kSwigluOai) return gate / (1.0f + expf(-p.alpha * gate));
  return activate<Activation::kSilu, T>(gate);
}

template <Gated kFunction>
__device__ __forceinline__ float up_value(const GatedParams& p, float up) {
  if constexpr (kFunction == Gated::kSilu || kFunction == Gated::kFatRelu) return up;
  up = at_least(at_most(up, p.bound), -p.bound);
  return kFunction == Gated::kSwigluOai ? up + 1.0f : up;
}

// Loads gate and up of Vec i. kSwigluOai: gate and up alternate in one row.
template <Gated kFunction, bool kAligned, typename T, int kWidth>
__device__ __forceinline__ void load_gated(const T* gate, const T* up, int64_t i, int64_t width,
                                           float (&gates)[kWidth], float (&ups)[kWidth]) {
  if constexpr (kFunction == Gated::kSwigluOai) {
    float pairs[2][kWidth];
    const auto low = load_vec<kAligned, kWidth>(gate, 2 * i, 2 * width);
    const auto high = load_vec<kAligned, kWidth>(gate, 2 * i + 1, 2 * width);
    upcast(low, pairs[0]);
    upcast(high, pairs[1]);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      gates[j] = pairs[2 * j / kWidth][2 * j % kWidth];
      ups[j] = pairs[2 * j / kWidth][2 * j % kWidth + 1];
    }
  } else {
    const auto g = load_vec<kAligned, kWidth>(gate, i, width);
    const auto u = load_vec<kAligned, kWidth>(up, i, width);
    upcast(g, gates);
    upcast(u, ups);
  }
}

// A CTA computes one chunk of one row, one Vec per thread. `chunks` divides by chunks_per_row, the
// number of chunks per row.
template <typename T, Gated kFunction, typename Epilogue, bool kAligned>
__global__ void __launch_bounds__(256)
    gated_kernel(GatedParams p, GatedRows rows, Epilogue epilogue, FastDivisor chunks,
                 int chunks_per_row) {
  launch_dependents();
  wait_for_primary_kernel();
  using Out = typename Epilogue::template Out<T>;
  constexpr int kWidth = kVecWidth<T>;
  const uint32_t row = chunks.divide(blockIdx.x);
  const uint32_t chunk = blockIdx.x - row * chunks_per_row;
  const int64_t i = static_cast<int64_t>(chunk) * blockDim.x + threadIdx.x;
  const bool inside = i * kWidth < p.width;

  float gates[kWidth] = {}, ups[kWidth] = {};
  if (inside) {
    load_gated<kFunction, kAligned>(static_cast<const T*>(p.gate) + rows.gate.of(row),
                                    static_cast<const T*>(p.up) + rows.up.of(row), i, p.width,
                                    gates, ups);
  }
  epilogue.prepare();
#pragma unroll
  for (int j = 0; j < kWidth; ++j) gates[j] = gate_value<kFunction, T>(p, gates[j]);
  if constexpr (Epilogue::kRounds) upcast(downcast<T>(gates), gates);
#pragma unroll
  for (int j = 0; j < kWidth; ++j) gates[j] *= up_value<kFunction>(p, ups[j]);
  if constexpr (Epilogue::kRounds) upcast(downcast<T>(gates), gates);
  const auto vec = epilogue.template done<T>(gates, row, i, inside);
  if (inside) store_vec<kAligned>(static_cast<Out*>(p.out) + rows.out.of(row), i, p.width, vec);
}

template <typename T, Gated kFunction, typename Epilogue>
void launch_gated(const GatedParams& p, const Epilogue& epilogue, Stream stream) {
  constexpr int kWidth = kVecWidth<T>;
  using Out = typename Epilogue::template Out<T>;
  const bool aligned = p.width % kWidth == 0 && rows_aligned16(p.gate, p.gate_rows, p.dtype) &&
                       rows_aligned16(p.up, p.up_rows, p.dtype) &&
                       rows_aligned(p.out, p.out_rows, sizeof(Out), kWidth);
  const RowChunks chunks(p.gate_rows.count, ceil_div(p.width, kWidth));
  launch_kernel(p.op,
                aligned ? gated_kernel<T, kFunction, Epilogue, true>
                        : gated_kernel<T, kFunction, Epilogue, false>,
                grid_size(p.op, p.gate_rows.count * chunks.per_row), chunks.threads, 0, stream, p,
                GatedRows(p), epilogue, FastDivisor(chunks.per_row),
                static_cast<int>(chunks.per_row));
}

}  // namespace vllm_kernels::cuda
