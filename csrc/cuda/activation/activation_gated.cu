// Gated activations whose result has the dtype of the inputs: out [rows, width].
// activation_gated.cuh has the kernel, its grid and its early reads. activation_quant.cu has the
// 8-bit results.
#include "cuda/activation/activation_gated.cuh"

namespace vllm_kernels::cuda {
namespace {

// Epilogue that stores the product in T.
template <bool kRounds_>
struct StoreProduct {
  template <typename T>
  using Out = T;
  static constexpr bool kRounds = kRounds_;

  __device__ __forceinline__ void prepare() {}
  template <typename T, int kWidth>
  __device__ __forceinline__ Vec<T, kWidth> done(const float (&values)[kWidth], uint32_t, int64_t,
                                                 bool) const {
    return downcast<T>(values);
  }
};

template <Gated kFunction>
void launch_function(const GatedParams& p, Stream stream) {
  dispatch_float(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    launch_gated<T, kFunction>(p, StoreProduct<kFunction != Gated::kSwigluOai>{}, stream);
  });
}

}  // namespace

void launch(const GatedParams& p, Stream stream) {
  switch (p.function) {
    case Gated::kSilu:
      return launch_function<Gated::kSilu>(p, stream);
    case Gated::kFatRelu:
      return launch_function<Gated::kFatRelu>(p, stream);
    case Gated::kSiluClamp:
      return launch_function<Gated::kSiluClamp>(p, stream);
    case Gated::kSwigluOai:
      return launch_function<Gated::kSwigluOai>(p, stream);
  }
}

}  // namespace vllm_kernels::cuda
