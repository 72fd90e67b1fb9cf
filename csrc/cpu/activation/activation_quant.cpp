// silu_and_mul_quant and silu_and_mul_per_block_quant: silu_and_mul with an 8-bit result. The scale
// is given, or computed per group of a row.
//   gate, up, out [rows, width]
// A row is cut into chunks of up to kChunk elements. A task is a range of chunks.
#include "cpu/activation/activation_rows.h"
#include "cpu/base/quant.h"
#include "cpu/kernels.h"
#include "ops/activation_gated.h"

namespace vllm_kernels::cpu {
namespace {

// Quantizes the values that silu_and_mul would store, with the given scale.
template <typename T>
void quant_chunk(Fp8E4M3* out, const GatedParams& p, const T* gate, const T* up, float scale,
                 int64_t n) {
  const MultiplyByInverse quantizer(scale);
  for_each_vector(0, n, [&](int64_t i, auto count) {
    const GateAndUp x = load_gated<Gated::kSilu>(gate, up, i, count);
    store(out + i, quantizer(gated_product<Gated::kSilu, true, T>(p, x)), count);
  });
}

// A group has 64 or 128 elements and its own scale. `scale` is the first group's.
template <typename Q, typename T>
void quant_groups(Q* out, const GatedParams& p, const QuantParams& q, const T* gate, const T* up,
                  float* scale, int64_t n) {
  constexpr DType kDType = kQuantDType<Q>;
  const float upper_bound = q.upper_bound == nullptr ? __builtin_inff() : *q.upper_bound;
  const int vectors = q.group_size / kLanes;
  Vec values[128 / kLanes];
  for (int64_t first = 0; first < n; first += q.group_size) {
    VecUint largest = {};
    for (int v = 0; v < vectors; ++v) {
      const GateAndUp x = load_gated<Gated::kSilu>(gate, up, first + v * kLanes, WholeVector{});
      values[v] = gated_product<Gated::kSilu, false, T>(p, x);
      largest = larger_bits(largest, magnitude_bits(values[v]));
    }
    const float full = largest_magnitude(largest) / largest_of(kDType);
    *scale = at_least(at_most(full, upper_bound), min_scale_of(kDType));
    const DivideByScale quantizer(*scale);
    for (int v = 0; v < vectors; ++v) store(out + first + v * kLanes, quantizer(values[v]));
    scale += q.scale_group_stride;
  }
}

Loop loop_of(const GatedQuantParams& p) {
  return chunk_loop(p.gated.gate_rows.count, p.gated.width, p.gated.dtype);
}

void run(const GatedQuantParams& params, int64_t begin, int64_t end) {
  const GatedParams& p = params.gated;
  const QuantParams& q = params.quant;
  dispatch_float(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    for_each_chunk(p.width, begin, end, [&](int64_t row, int64_t first, int64_t n) {
      const T* gate = static_cast<const T*>(p.gate) + p.gate_rows.offset(row) + first;
      const T* up = static_cast<const T*>(p.up) + p.up_rows.offset(row) + first;
      const int64_t to = p.out_rows.offset(row) + first;
      if (q.scale_of == ScaleOf::kTensor) {
        return quant_chunk(static_cast<Fp8E4M3*>(p.out) + to, p, gate, up, *q.scale, n);
      }
      float* scale =
          q.scales + row * q.scale_row_stride + first / q.group_size * q.scale_group_stride;
      dispatch_quant(q.dtype, [&](auto quantized) {
        using Q = decltype(quantized);
        quant_groups(static_cast<Q*>(p.out) + to, p, q, gate, up, scale, n);
      });
    });
  });
}

}  // namespace

VLLM_KERNELS_CPU_KERNEL(GatedQuantParams, loop_of, run)

}  // namespace vllm_kernels::cpu
