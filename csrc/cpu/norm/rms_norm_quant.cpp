// rms_norm_static_fp8_quant, rms_norm_dynamic_per_token_quant, rms_norm_per_block_quant: RMS norms
// with an 8-bit result. The scale is given, or computed per row or per group of a row.
//   input, residual, out [rows, hidden_size]; weight [hidden_size]
// A task is a range of rows. A row is read for its mean square, for the magnitude of each computed
// scale, and for the result.
#include "ops/rms_norm_quant.h"

#include "cpu/base/dispatch.h"
#include "cpu/base/quant.h"
#include "cpu/kernels.h"
#include "cpu/norm/rms_norm_rows.h"

namespace vllm_kernels::cpu {
namespace {

// The values that rms_norm would store: normalized, rounded, times the weight, rounded.
template <typename T>
struct Normed {
  const T* row;
  const T* weight;
  Vec inverse;

  template <typename Count>
  Vec operator()(int64_t i, Count count) const {
    const Vec x = round_to<T>(load(row + i, count) * inverse);
    return round_to<T>(x * load(weight + i, count));
  }
};

// Quantizes elements [first, last).
template <typename Q, typename T, typename Quantizer>
void store_range(Q* out, const Normed<T>& normed, const Quantizer& quantizer, int64_t first,
                 int64_t last) {
  for_each_vector(first, last, [&](int64_t i, auto count) {
    store(out + i, quantizer(normed(i, count)), count);
  });
}

// Computes one scale for elements [first, last), stores it in `scale`, and quantizes them.
template <typename Q, typename T>
void store_scaled(Q* out, float* scale, const Normed<T>& normed, float upper_bound, int64_t first,
                  int64_t last) {
  constexpr DType kDType = kQuantDType<Q>;
  const float magnitude = at_most(largest_magnitude(first, last, normed), upper_bound);
  *scale = at_least(magnitude / largest_of(kDType), min_scale_of(kDType));
  if constexpr (kDType == DType::kInt8) {
    store_range(out, normed, MultiplyByInverse(*scale), first, last);
  } else {
    store_range(out, normed, DivideByScale(*scale), first, last);
  }
}

template <typename Q, typename T>
void quant_row(const RmsNormQuantParams& params, int64_t index) {
  const RmsNormParams& p = params.norm;
  const QuantParams& q = params.quant;
  const NormedRow<T> row(p, index);
  const Normed<T> normed{row.data, static_cast<const T*>(p.weight), splat(row.inverse)};
  Q* out = static_cast<Q*>(p.out) + p.out_rows.offset(index);
  if (q.scale_of == ScaleOf::kTensor) {
    return store_range(out, normed, MultiplyByInverse(*q.scale), 0, p.hidden_size);
  }
  const float upper_bound = q.upper_bound == nullptr ? __builtin_inff() : *q.upper_bound;
  const int64_t group = q.scale_of == ScaleOf::kRow ? p.hidden_size : q.group_size;
  float* scale = q.scales + index * q.scale_row_stride;
  for (int64_t first = 0; first < p.hidden_size; first += group) {
    store_scaled(out, scale, normed, upper_bound, first, first + group);
    scale += q.scale_group_stride;
  }
}

Loop loop_of(const RmsNormQuantParams& p) {
  return norm_loop(p.norm);
}

void run(const RmsNormQuantParams& p, int64_t first, int64_t last) {
  dispatch_float(p.norm.dtype, [&](auto tag) {
    using T = decltype(tag);
    dispatch_quant(p.quant.dtype, [&](auto quantized) {
      using Q = decltype(quantized);
      for (int64_t row = first; row < last; ++row) quant_row<Q, T>(p, row);
    });
  });
}

}  // namespace

VLLM_KERNELS_CPU_KERNEL(RmsNormQuantParams, loop_of, run)

}  // namespace vllm_kernels::cpu
