// gelu_new, silu_and_mul and others: out = f(gate), or out = f(gate) * up.
//   gate, up, out [rows, width]
// A row is cut into chunks of up to kChunk elements. A task is a range of chunks.
#include "ops/activation.h"

#include "cpu/activation/activation_rows.h"
#include "cpu/kernels.h"

namespace vllm_kernels::cpu {
namespace {

template <Activation kActivation>
inline Vec activate(Vec x) {
  const Vec one = splat(1.0f);
  if constexpr (kActivation == Activation::kSilu) {
    return x / (one + exp(-x));
  } else if constexpr (kActivation == Activation::kGelu) {
    return x * normal_cdf(x);
  } else if constexpr (kActivation == Activation::kGeluQuick) {
    return x / (one + exp(x * splat(-1.702f)));
  } else {
    // (1 + tanh(a)) / 2 = 1 / (1 + e^(-2a)), which does not cancel for negative a.
    const Vec minus_2a = x * fma(x * x, splat(-0.0713548163f), splat(-1.59576912f));
    return x / (one + exp(minus_2a));
  }
}

// out = f(gate), or the rounded f(gate) times up.
template <Activation kActivation, typename T>
void activate_row(T* out, const T* gate, const T* up, int64_t n) {
  if (up == nullptr) {
    map_elements(out, n, [](Vec x) { return activate<kActivation>(x); }, gate);
  } else {
    const auto gated = [](Vec x, Vec y) { return round_to<T>(activate<kActivation>(x)) * y; };
    map_elements(out, n, gated, gate, up);
  }
}

Loop loop_of(const ActivationParams& p) {
  return chunk_loop(p.input_rows.count, p.width, p.dtype);
}

template <Activation kActivation, typename T>
void run_chunks(const ActivationParams& p, int64_t begin, int64_t end) {
  for_each_chunk(p.width, begin, end, [&](int64_t row, int64_t first, int64_t n) {
    const int64_t from = p.input_rows.offset(row) + first;
    const T* up = p.up == nullptr ? nullptr : static_cast<const T*>(p.up) + from;
    activate_row<kActivation>(static_cast<T*>(p.out) + p.out_rows.offset(row) + first,
                              static_cast<const T*>(p.gate) + from, up, n);
  });
}

void run(const ActivationParams& p, int64_t begin, int64_t end) {
  dispatch_float(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    switch (p.activation) {
      case Activation::kSilu:
        return run_chunks<Activation::kSilu, T>(p, begin, end);
      case Activation::kGelu:
        return run_chunks<Activation::kGelu, T>(p, begin, end);
      case Activation::kGeluTanh:
        return run_chunks<Activation::kGeluTanh, T>(p, begin, end);
      case Activation::kGeluQuick:
        return run_chunks<Activation::kGeluQuick, T>(p, begin, end);
    }
  });
}

}  // namespace

VLLM_KERNELS_CPU_KERNEL(ActivationParams, loop_of, run)

}  // namespace vllm_kernels::cpu
