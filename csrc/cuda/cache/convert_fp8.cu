// convert_fp8: fp8 = x / scale, or x = fp8 * scale, over `count` contiguous elements.
//
// Grid: a grid-stride loop, at most 32 CTAs an SM. Nothing is read before the PDL wait.
// ops/convert_fp8.h has the contract, cuda/base/fp8.cuh the conversions.
#include "ops/convert_fp8.h"

#include <algorithm>

#include "cuda/base/exact_division.cuh"
#include "cuda/base/fp8.cuh"
#include "cuda/base/launch.cuh"
#include "cuda/base/types.cuh"
#include "cuda/launchers.h"

namespace vllm_kernels::cuda {
namespace {

constexpr int kThreads = 256;

template <typename To, typename From>
__device__ __forceinline__ To converted(From x, float scale, Divisor divisor) {
  if constexpr (kIsFp8<To>) {
    return from_float<To>(divisor.divide(to_float(x)));
  } else {
    return from_float<To>(to_float(x) * scale);
  }
}

// A thread converts kWidth neighbouring elements. kWidth is 16 where both pointers are 16-byte
// aligned: one access of the 8-bit side. Otherwise it is 1. The last count % kWidth elements are
// converted one a thread by CTA 0.
template <typename To, typename From, int kWidth>
__global__ void __launch_bounds__(kThreads)
    convert_fp8_kernel(To* output, const From* input, int64_t count, float scale) {
  launch_dependents();
  wait_for_primary_kernel();
  const Divisor divisor = Divisor::of(scale);
  struct alignas(kWidth * sizeof(From) < 16 ? kWidth * sizeof(From) : 16) Source {
    From data[kWidth];
  };
  struct alignas(kWidth * sizeof(To) < 16 ? kWidth * sizeof(To) : 16) Target {
    To data[kWidth];
  };
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count / kWidth; i += step) {
    const Source source = reinterpret_cast<const Source*>(input)[i];
    Target target;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      target.data[j] = converted<To, From>(source.data[j], scale, divisor);
    }
    reinterpret_cast<Target*>(output)[i] = target;
  }
  if constexpr (kWidth > 1) {
    if (blockIdx.x == 0 && threadIdx.x < count % kWidth) {
      const int64_t i = count / kWidth * kWidth + threadIdx.x;
      output[i] = converted<To, From>(input[i], scale, divisor);
    }
  }
}

template <typename To, typename From>
void launch_as(const ConvertFp8Params& p, Stream stream) {
  const bool vectorized = aligned16(p.output) && aligned16(p.input);
  const int64_t vecs = ceil_div(p.count, vectorized ? 16 : 1);
  const int64_t blocks =
      std::min<int64_t>(ceil_div(vecs, kThreads), int64_t{32} * current_device_model().num_sms);
  launch_kernel("convert_fp8",
                vectorized ? convert_fp8_kernel<To, From, 16> : convert_fp8_kernel<To, From, 1>,
                dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, stream,
                static_cast<To*>(p.output), static_cast<const From*>(p.input), p.count, p.scale);
}

template <typename Body>
void dispatch_fp8(DType dtype, Body&& body) {
  dtype == DType::kFp8E5M2 ? body(Fp8E5M2{}) : body(Fp8E4M3{});
}

}  // namespace

void launch(const ConvertFp8Params& p, Stream stream) {
  const bool quantizes = size_of(p.output_dtype) == 1;
  dispatch_float(quantizes ? p.input_dtype : p.output_dtype, [&](auto model) {
    using T = decltype(model);
    dispatch_fp8(quantizes ? p.output_dtype : p.input_dtype, [&](auto eight) {
      using Fp8 = decltype(eight);
      quantizes ? launch_as<Fp8, T>(p, stream) : launch_as<T, Fp8>(p, stream);
    });
  });
}

}  // namespace vllm_kernels::cuda
