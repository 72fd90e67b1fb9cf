// rms_norm without a weight, and with Gemma's gain 1 + weight (ops/rms_norm.h): out [rows,
// hidden_size]. rms_norm_epilogue.cuh has the kernel, its grid and its early reads. The epilogue
// here stores the normalized row unchanged.
#include "ops/rms_norm.h"

#include "cuda/launchers.h"
#include "cuda/norm/rms_norm_epilogue.cuh"

namespace vllm_kernels::cuda {
namespace {

// Epilogue that stores the row in T.
template <Weighting kWeighting_>
struct StoreRow {
  template <typename T>
  using Out = T;
  static constexpr Weighting kWeighting = kWeighting_;
  static constexpr bool kScaleOfRow = false;

  __device__ __forceinline__ void prepare() {}
  template <typename T, int kWidth>
  __device__ __forceinline__ Vec<T, kWidth> done(const Vec<T, kWidth>& x, uint32_t, int,
                                                 bool) const {
    return x;
  }
};

}  // namespace

void launch(const RmsNormGainParams& p, Stream stream) {
  dispatch_float(p.norm.dtype, [&](auto tag) {
    using T = decltype(tag);
    if (p.gain == Gain::kNone) {
      launch_epilogue<T>(p.op, p.norm, StoreRow<Weighting::kNone>{}, stream);
    } else {
      launch_epilogue<T>(p.op, p.norm, StoreRow<Weighting::kOnePlusWeight>{}, stream);
    }
  });
}

}  // namespace vllm_kernels::cuda
