// The launchers of the prefill kernels. sm90/instantiations/ has one small file per head size,
// sm80/instantiations/ one per cache type, so that they compile in parallel.
#pragma once
#include "cuda/attention/common/kernel_choice.h"
#include "cuda/attention/common/workspace.h"
#include "cuda/base/launch.cuh"
#include "ops/paged_attention.h"

namespace vllm_kernels::cuda {

struct PrefillLaunch {
  int min_query_len;           // sequences of fewer query tokens are left out
  bool has_concurrent_launch;  // a concurrent decode launch follows, for the sequences left out
  uint32_t* next;              // work tiles handed out; 0 before and after every launch
  // Sm90: not null if one launch has the gathered sequences, and another one the rest
  // (GatheredKeys::starts).
  const int32_t* gathered_starts = nullptr;
  bool takes_gathered = false;
  const int32_t* value_starts = nullptr;  // sm90 with e4m3 queries: Fp8Keys::value_starts
  // Sm90: not null if work tiles may be split.
  const DecodeWorkspace* workspace = nullptr;
};

// Queries have 16 bits; the cache has the same type or 8 bits. Keys are contiguous or in pages: of
// 16 tokens, or of a longer power of two.
template <int kHeadSize>
struct PrefillSm90Kernels {
  static void launch(const PagedAttentionParams& params, KvForm form, const PrefillLaunch& launch,
                     void* stream);
};

// Prefill sm90 with e4m3 queries. `params` is that of an Fp8Keys.
void launch_prefill_fp8(const PagedAttentionParams& params, const PrefillLaunch& launch,
                        void* stream);

// T: type of query and cache. kCacheIs8Bit: any 8-bit cache, with any 16-bit query; T is Half.
template <typename T, bool kCacheIs8Bit>
struct PrefillSm80Kernels {
  static void launch(const PagedAttentionParams& params, const KernelChoice& choice,
                     const PrefillLaunch& launch, void* stream);
};

// Calls body(Constant<size>{}) with the head size of the instantiations.
template <typename Body>
void dispatch_prefill_head_size(int head_size, Body&& body) {
  switch (head_size) {
    case 64:
      return body(Constant<64>{});
    case 96:
      return body(Constant<96>{});
    case 128:
      return body(Constant<128>{});
    case 192:
      return body(Constant<192>{});
    default:
      return body(Constant<256>{});
  }
}

}  // namespace vllm_kernels::cuda
