#include "ops/convert_fp8.h"

#include "cpu/base/dispatch.h"
#include "cpu/kernels.h"

namespace vllm_kernels::cpu {
namespace {

constexpr int64_t kElements = 8192;  // of a task

template <typename T, typename Fp8>
void narrow_all(Fp8* to, const T* from, int64_t n, float scale) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(to + i, load(from + i) / splat(scale));
  if (i < n) store_partial(to + i, load_partial(from + i, n - i) / splat(scale), n - i);
}

template <typename T, typename Fp8>
void widen_all(T* to, const Fp8* from, int64_t n, float scale) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(to + i, load(from + i) * splat(scale));
  if (i < n) store_partial(to + i, load_partial(from + i, n - i) * splat(scale), n - i);
}

template <typename Body>
void dispatch_fp8(DType dtype, Body&& body) {
  dtype == DType::kFp8E5M2 ? body(Fp8E5M2{}) : body(Fp8E4M3{});
}

int64_t num_tasks(const ConvertFp8Params& p) {
  return ceil_div(p.count, kElements);
}

void run(const ConvertFp8Params& p, int64_t begin, int64_t end) {
  const int64_t first = begin * kElements;
  const int64_t count = (end * kElements < p.count ? end * kElements : p.count) - first;
  const bool narrows = size_of(p.output_dtype) == 1;
  dispatch_float(narrows ? p.input_dtype : p.output_dtype, [&](auto wide) {
    using T = decltype(wide);
    dispatch_fp8(narrows ? p.output_dtype : p.input_dtype, [&](auto eight) {
      using Fp8 = decltype(eight);
      if (narrows) {
        narrow_all(static_cast<Fp8*>(p.output) + first, static_cast<const T*>(p.input) + first,
                   count, p.scale);
      } else {
        widen_all(static_cast<T*>(p.output) + first, static_cast<const Fp8*>(p.input) + first,
                  count, p.scale);
      }
    });
  });
}

}  // namespace
}  // namespace vllm_kernels::cpu

VLLM_KERNELS_CPU_KERNEL(vllm_kernels::ConvertFp8Params, vllm_kernels::cpu::num_tasks,
                        vllm_kernels::cpu::run)
