// silu_and_mul with an 8-bit result, out [rows, width]: a given scale for the tensor, or one
// computed per group. ops/activation_gated.h and ops/quant.h have the rules. activation_gated.cuh
// has the kernel, its grid and its early reads.
#include "cuda/activation/activation_gated.cuh"
#include "cuda/base/quant.cuh"

namespace vllm_kernels::cuda {
namespace {

// Epilogue with a given scale for the tensor.
struct ProductByTensor {
  template <typename T>
  using Out = Fp8E4M3;
  static constexpr bool kRounds = true;
  QuantParams p;
  MultiplyByInverse<Fp8E4M3> quantizer = {};

  __device__ __forceinline__ void prepare() {
    quantizer = MultiplyByInverse<Fp8E4M3>::of(*p.scale);
  }
  template <typename T, int kWidth>
  __device__ __forceinline__ Vec<Fp8E4M3, kWidth> done(float (&values)[kWidth], uint32_t, int64_t,
                                                       bool) const {
    return quantizer.quantized(values);
  }
};

// Epilogue with one computed scale per group. Each group lies in 8 to 32 neighbouring lanes.
template <typename Q>
struct ProductByGroup {
  template <typename T>
  using Out = Q;
  static constexpr bool kRounds = false;
  QuantParams p;
  float upper_bound = INFINITY;

  __device__ __forceinline__ void prepare() {
    if (p.upper_bound != nullptr) upper_bound = *p.upper_bound;
  }
  template <typename T, int kWidth>
  __device__ __forceinline__ Vec<Q, kWidth> done(float (&values)[kWidth], uint32_t row, int64_t vec,
                                                 bool inside) const {
    constexpr DType kDType = kQuantDType<Q>;
    const auto lanes = static_cast<uint32_t>(p.group_size / kWidth);
    const float magnitude = __uint_as_float(lanes_max(magnitude_bits(values), lanes));
    const float scale = at_least(at_most(__fdiv_rn(magnitude, largest_of(kDType)), upper_bound),
                                 min_scale_of(kDType));
    const auto index = static_cast<uint32_t>(vec);  // a row has fewer than 2^31 Vecs
    if (inside && index % lanes == 0) {
      p.scales[row * p.scale_row_stride + index / lanes * p.scale_group_stride] = scale;
    }
    return DivideByScale<Q>::of(scale, magnitude).quantized(values);
  }
};

}  // namespace

void launch(const GatedQuantParams& p, Stream stream) {
  dispatch_float(p.gated.dtype, [&](auto tag) {
    using T = decltype(tag);
    const auto run = [&](const auto& epilogue) {
      launch_gated<T, Gated::kSilu>(p.gated, epilogue, stream);
    };
    if (p.quant.scale_of == ScaleOf::kTensor) {
      run(ProductByTensor{p.quant});
    } else if (p.quant.dtype == DType::kInt8) {
      run(ProductByGroup<int8_t>{p.quant});
    } else {
      run(ProductByGroup<Fp8E4M3>{p.quant});
    }
  });
}

}  // namespace vllm_kernels::cuda
