// paged_attention and varlen_attention: launches the kernel that choose_kernel() names. A mixed
// batch gets two launches: prefill, then a concurrent decode launch. So does prefill that may split
// work tiles: the second one adds them up. ops/paged_attention.h has the shapes, and the head of
// each kernel's file has its grid and its early reads. e4m3 queries that no kernel multiplies in 8
// bits are first converted to 16 bits.
#include <optional>

#include "cuda/attention/common/heuristics.h"
#include "cuda/attention/common/workspace.h"
#include "cuda/attention/decode/decode.h"
#include "cuda/attention/dispatch.h"
#include "cuda/attention/prefill/gather_fp8_keys.h"
#include "cuda/attention/prefill/gather_keys.h"
#include "cuda/attention/prefill/prefill.h"
#include "cuda/attention/simt/simt_kernel.cuh"
#include "cuda/attention/upcast_query.h"
#include "cuda/launchers.h"
#include "ops/report.h"

namespace vllm_kernels::cuda {
namespace {

void launch_decode(const PagedAttentionParams& p, const KernelChoice& choice,
                   const DecodeWorkspace& workspace, Stream stream) {
  if (p.kv.dtype == DType::kInt4x2) {
    return DecodeKernels<ScaledInt4>::launch(p, choice, workspace, stream);
  }
  if (p.token_scales.any()) {
    return DecodeKernels<ScaledInt8>::launch(p, choice, workspace, stream);
  }
  dispatch_16_bit(p.dtype, [&](auto query) {
    dispatch_cache<decltype(query)>(p.kv.dtype, [&](auto cache) {
      DecodeKernels<decltype(cache)>::launch(p, choice, workspace, stream);
    });
  });
}

void launch_prefill_sm90(const PagedAttentionParams& p, const AttentionChoice& choice,
                         PrefillLaunch launch, void* scratch, Stream stream) {
  dispatch_prefill_head_size(choice.main.padded_head_size, [&](auto head_size) {
    const auto run = PrefillSm90Kernels<decltype(head_size)::value>::launch;
    const KvForm form = choice.main.form;
    if (choice.gathered_rows == 0) return run(p, form, launch, stream);
    const GatheredKeys keys = gather_keys(p, choice, scratch, stream);
    cuda::launch(keys.gather, stream);
    launch.gathered_starts = keys.starts;
    if (choice.gathers_some) {
      PrefillLaunch others = launch;
      others.has_concurrent_launch = false;  // it follows the last launch
      run(p, prefill_form(p.kv), others, stream);
    }
    launch.takes_gathered = true;
    run(keys.params, form, launch, stream);
  });
}

void launch_prefill_sm80(const PagedAttentionParams& p, const KernelChoice& choice,
                         const PrefillLaunch& launch, Stream stream) {
  const auto kernel = size_of(p.kv.dtype) == 1     ? PrefillSm80Kernels<Half, true>::launch
                      : p.dtype == DType::kFloat16 ? PrefillSm80Kernels<Half, false>::launch
                                                   : PrefillSm80Kernels<BFloat16, false>::launch;
  kernel(p, choice, launch, stream);
}

void launch_main(const PagedAttentionParams& p, const AttentionChoice& choice,
                 const PrefillLaunch& launch, const DecodeWorkspace& workspace, void* scratch,
                 Stream stream) {
  switch (choice.main.kernel) {
    case AttentionKernel::kSimt:
      return launch_simt(p, choice.main, workspace, stream);
    case AttentionKernel::kDecode:
    case AttentionKernel::kDecodeWgmma:
      return launch_decode(p, choice.main, workspace, stream);
    case AttentionKernel::kPrefillSm90:
      return launch_prefill_sm90(p, choice, launch, scratch, stream);
    case AttentionKernel::kPrefillSm80:
      launch_prefill_sm80(p, choice.main, launch, stream);
  }
}

// Converts the queries to 16 bits, in scratch memory. Beside 8-bit products only the concurrent
// launch reads them.
PagedAttentionParams upcast(const PagedAttentionParams& p, const E4M3Query& query,
                            const AttentionChoice& choice, void* scratch, Stream stream) {
  void* out = static_cast<char*>(scratch) + attention_scratch(p, choice).query_offset;
  upcast_query(choice.fp8_rows > 0 ? concurrent_params(p, choice) : p, query, out, stream);
  return with_upcast_query(p, out);
}

AttentionChoice choose(const PagedAttentionParams& p, const E4M3Query& query) {
  const DeviceModel& device = current_device_model();
  return query.on ? choose_e4m3_kernel(p, device) : choose_kernel(p, device);
}

PagedAttentionParams with_rows(const PagedAttentionParams& given) {
  PagedAttentionParams p = given;
  p.kv = given.kv.with_rows();
  return p;
}

}  // namespace

int64_t attention_scratch_bytes(const PagedAttentionParams& given, const E4M3Query& query) {
  const PagedAttentionParams p = with_rows(given);
  // A lower bound: whether prefill sm90 can read the cache where it lies is not known yet.
  const int64_t fewest_rows = gather_rows(p.kv, {true, true, true});
  if (!query.on && int64_t{p.max_query_len} * p.num_heads < fewest_rows * p.kv.num_kv_heads) {
    return 0;
  }
  return attention_scratch(p, choose(p, query)).total;
}

void launch_paged_attention(const PagedAttentionParams& given, const E4M3Query& query, void* memory,
                            void* scratch, Stream stream) {
  const PagedAttentionParams p = with_rows(given);
  const AttentionChoice choice = choose(p, query);
  check_fixed_split(p, choice.main);
  if (choice.has_concurrent_decode) {
    check_fixed_split(concurrent_params(p, choice), choice.concurrent_decode);
  }
  if (report("paged_attention", [&] { return describe(choice); })) return;
  const DecodeWorkspace workspace = decode_workspace(memory, stream);
  PrefillLaunch launch = {.min_query_len = choice.min_query_len,
                          .has_concurrent_launch = choice.has_concurrent_decode,
                          .next = prefill_next(workspace),
                          .workspace = choice.may_split ? &workspace : nullptr};
  std::optional<PagedAttentionParams> upcasted;
  if (choice.upcasts_query) upcasted = upcast(p, query, choice, scratch, stream);
  const PagedAttentionParams& wide = upcasted ? *upcasted : p;
  if (choice.fp8_rows > 0) {
    const Fp8Keys keys = gather_fp8_keys(p, query, choice, scratch, stream);
    launch.value_starts = keys.value_starts;
    launch_prefill_fp8(keys.params, launch, stream);
  } else {
    launch_main(wide, choice, launch, workspace, scratch, stream);
  }
  if (choice.has_concurrent_decode) {
    launch_decode(concurrent_params(wide, choice), choice.concurrent_decode, workspace, stream);
  }
}

}  // namespace vllm_kernels::cuda
