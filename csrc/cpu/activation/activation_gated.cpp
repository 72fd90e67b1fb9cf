#include "ops/activation_gated.h"

#include "cpu/activation/activation_gated.h"
#include "cpu/kernels.h"

namespace vllm_kernels::cpu {
namespace {

template <Gated kFunction, typename T>
void run_piece(const GatedParams& p, int64_t row, int64_t first, int64_t n) {
  constexpr bool kRounds = kFunction != Gated::kSwigluOai;  // the store rounds its product
  const int64_t from = kFunction == Gated::kSwigluOai ? 2 * first : first;
  const T* gate = static_cast<const T*>(p.gate) + p.gate_rows.offset(row) + from;
  const T* up = static_cast<const T*>(p.up) + p.up_rows.offset(row) + from;
  T* out = static_cast<T*>(p.out) + p.out_rows.offset(row) + first;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    store(out + i, gated_product<kFunction, kRounds, T>(p, load_gated<kFunction>(gate, up, i)));
  }
  if (i < n) {
    const GateAndUp x = load_gated_partial<kFunction>(gate, up, i, n - i);
    store_partial(out + i, gated_product<kFunction, kRounds, T>(p, x), n - i);
  }
}

int64_t num_tasks(const GatedParams& p) {
  return GatedPieces(p).num_tasks();
}

void run(const GatedParams& p, int64_t begin, int64_t end) {
  dispatch_float(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    GatedPieces(p).for_each(p, begin, end, [&](int64_t row, int64_t first, int64_t n) {
      switch (p.function) {
        case Gated::kSilu:
          return run_piece<Gated::kSilu, T>(p, row, first, n);
        case Gated::kFatRelu:
          return run_piece<Gated::kFatRelu, T>(p, row, first, n);
        case Gated::kSiluClamp:
          return run_piece<Gated::kSiluClamp, T>(p, row, first, n);
        case Gated::kSwigluOai:
          return run_piece<Gated::kSwigluOai, T>(p, row, first, n);
      }
    });
  });
}

}  // namespace
}  // namespace vllm_kernels::cpu

VLLM_KERNELS_CPU_KERNEL(vllm_kernels::GatedParams, vllm_kernels::cpu::num_tasks,
                        vllm_kernels::cpu::run)
