// rms_norm and fused_add_rms_norm with an 8-bit result (ops/rms_norm_quant.h): out [rows,
// hidden_size]. The epilogues here have a given scale, one scale per row, or one per group.
// rms_norm_epilogue.cuh has the kernel, its grid and its early reads.
#include "ops/rms_norm_quant.h"

#include <bit>

#include "cuda/launchers.h"
#include "cuda/norm/rms_norm_epilogue.cuh"

namespace vllm_kernels::cuda {
namespace {

template <typename Q>
struct QuantizedRow {
  template <typename T>
  using Out = Q;
  static constexpr Weighting kWeighting = Weighting::kWeight;
  QuantParams p;
};

// Its scales are computed, up to a bound.
template <typename Q>
struct BoundedRow : QuantizedRow<Q> {
  float upper_bound = INFINITY;

  __device__ __forceinline__ void prepare() {
    if (this->p.upper_bound != nullptr) upper_bound = *this->p.upper_bound;
  }
};

// Epilogue with a given scale for the tensor.
template <typename Q>
struct QuantByTensor : QuantizedRow<Q> {
  static constexpr bool kScaleOfRow = false;
  MultiplyByInverse<Q> quantizer = {};

  __device__ __forceinline__ void prepare() {
    quantizer = MultiplyByInverse<Q>::of(*this->p.scale);
  }
  template <typename T, int kWidth>
  __device__ __forceinline__ Vec<Q, kWidth> done(const Vec<T, kWidth>& x, uint32_t, int,
                                                 bool) const {
    float values[kWidth];
    upcast(x, values);
    return quantizer.quantized(values);
  }
};

// Epilogue with one computed scale per row.
template <typename Q>
struct QuantByRow : BoundedRow<Q> {
  static constexpr bool kScaleOfRow = true;
  ComputedScale<Q> computed = {};

  __device__ __forceinline__ void set_scale(uint32_t row, float magnitude, bool writes) {
    computed = ComputedScale<Q>::of(magnitude, this->upper_bound);
    if (writes) this->p.scales[row * this->p.scale_row_stride] = computed.scale;
  }
  template <typename T, int kWidth>
  __device__ __forceinline__ Vec<Q, kWidth> done(const Vec<T, kWidth>& x, uint32_t, int,
                                                 bool) const {
    float values[kWidth];
    upcast(x, values);
    return computed.quantizer.quantized(values);
  }
};

// Epilogue with one computed scale per group. Each group lies in 8 to 32 neighbouring lanes.
template <typename Q>
struct QuantByGroup : BoundedRow<Q> {
  static constexpr bool kScaleOfRow = false;

  template <typename T, int kWidth>
  __device__ __forceinline__ Vec<Q, kWidth> done(const Vec<T, kWidth>& x, uint32_t row, int vec,
                                                 bool inside) const {
    const int lanes = this->p.group_size / kWidth;
    const float magnitude = __uint_as_float(lanes_max(magnitude_bits(x), lanes));
    const auto computed = ComputedScale<Q>::of(magnitude, this->upper_bound);
    if (inside && vec % lanes == 0) {
      this->p.scales[row * this->p.scale_row_stride + vec / lanes * this->p.scale_group_stride] =
          computed.scale;
    }
    float values[kWidth];
    upcast(x, values);
    return computed.quantizer.quantized(values);
  }
};

template <typename Q>
void launch_as(const RmsNormQuantParams& p, Stream stream) {
  dispatch_float(p.norm.dtype, [&](auto tag) {
    using T = decltype(tag);
    switch (p.quant.scale_of) {
      case ScaleOf::kTensor:  // no op uses int8 here
        if constexpr (!std::is_same_v<Q, int8_t>) {
          launch_epilogue<T>(p.op, p.norm, QuantByTensor<Q>{{p.quant}}, stream);
        }
        return;
      case ScaleOf::kRow:
        return launch_epilogue<T>(p.op, p.norm, QuantByRow<Q>{{{p.quant}}}, stream);
      case ScaleOf::kGroup:
        return launch_epilogue<T>(p.op, p.norm, QuantByGroup<Q>{{{p.quant}}}, stream);
    }
  });
}

}  // namespace

void launch(const RmsNormQuantParams& p, Stream stream) {
  if (p.quant.dtype == DType::kInt8) {
    launch_as<int8_t>(p, stream);
  } else {
    launch_as<Fp8E4M3>(p, stream);
  }
}

}  // namespace vllm_kernels::cuda
