// silu_and_mul_split, fatrelu_and_mul, silu_and_mul_with_clamp and swigluoai_and_mul.
//   gate, up, out [rows, width]; swigluoai_and_mul reads gate and up interleaved
// A row is cut into chunks of up to kChunk elements. A task is a range of chunks.
#include "ops/activation_gated.h"

#include "cpu/activation/activation_rows.h"
#include "cpu/kernels.h"

namespace vllm_kernels::cpu {
namespace {

template <Gated kFunction, typename T>
void run_chunk(const GatedParams& p, int64_t row, int64_t first, int64_t n) {
  constexpr bool kRounds = kFunction != Gated::kSwigluOai;  // the store rounds its product
  const int64_t from = kFunction == Gated::kSwigluOai ? 2 * first : first;
  const T* gate = static_cast<const T*>(p.gate) + p.gate_rows.offset(row) + from;
  const T* up = static_cast<const T*>(p.up) + p.up_rows.offset(row) + from;
  T* out = static_cast<T*>(p.out) + p.out_rows.offset(row) + first;
  for_each_vector(0, n, [&](int64_t i, auto count) {
    const GateAndUp x = load_gated<kFunction>(gate, up, i, count);
    store(out + i, gated_product<kFunction, kRounds, T>(p, x), count);
  });
}

Loop loop_of(const GatedParams& p) {
  return chunk_loop(p.gate_rows.count, p.width, p.dtype);
}

void run(const GatedParams& p, int64_t begin, int64_t end) {
  dispatch_float(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    for_each_chunk(p.width, begin, end, [&](int64_t row, int64_t first, int64_t n) {
      switch (p.function) {
        case Gated::kSilu:
          return run_chunk<Gated::kSilu, T>(p, row, first, n);
        case Gated::kFatRelu:
          return run_chunk<Gated::kFatRelu, T>(p, row, first, n);
        case Gated::kSiluClamp:
          return run_chunk<Gated::kSiluClamp, T>(p, row, first, n);
        case Gated::kSwigluOai:
          return run_chunk<Gated::kSwigluOai, T>(p, row, first, n);
      }
    });
  });
}

}  // namespace

VLLM_KERNELS_CPU_KERNEL(GatedParams, loop_of, run)

}  // namespace vllm_kernels::cpu
