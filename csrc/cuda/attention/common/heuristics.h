// Thresholds that choose between attention kernels, each with the measured rows behind it.
// Figures are of an H200; docs/lab has the pages.
#pragma once
#include <algorithm>
#include <cstdint>

namespace vllm_kernels::cuda {

// Query rows (max_query_len * G) up to which the decode kernels take a whole batch: they split a
// sequence over CTAs, prefill kernels do not. (verify16_b32_4k: 64 rows, 141 us against 164 us.)
constexpr int kDecodeRows = 64;
// Query rows of a sequence up to which a concurrent decode launch takes it from a mixed batch. A
// single token always counts. (docs/lab/prefill/mixed_batches.md)
constexpr int kConcurrentDecodeRows = 32;

// Packed query rows of a prefill work tile. Fewer such tiles than half of the SMs leave most of the
// GPU idle; a split sequence does not. (1k_on_50k with 8 KV heads is the first row above it.)
constexpr int kPrefillTileRows = 128;

// Decode, 8-bit pages, more query tiles than SMs: two CTAs an SM with half the warps each. One
// copies while the other combines. (b64_c2k_fp8: 6% faster.)
constexpr int kCtasPerSmOf8Bit = 2;
// Stages of a warp's pipeline, at least: 3 hide the latency of a page, 2 suffice with two CTAs.
constexpr int kMinStages = 3, kMinStagesOfTwoCtas = 2;

// Decode, more query tiles than CTAs: tokens of a split, at least. Shorter ones cost more to
// combine than they balance. (docs/lab/decode/tile_scheduling.md)
constexpr int kMinSplitTokens = 1024;
// A split is at most this share of an even share of the work of one CTA. (ragged128: shorter splits
// balance; longer ones combine less.)
constexpr float kMaxSplitShare = 0.25f, kWgmmaMaxSplitShare = 0.5f;

// Prefill: K and V of a section of KV heads, as a share of L2. (H200: 24 MB of 60 MiB.)
constexpr float kSectionShareOfL2 = 0.3815f;

// Prefill beside a concurrent decode launch: SM cycles of a (row, token, dimension), for 16-bit
// caches, 8-bit caches, and scores with a softcap or ALiBi. (H200, 1.98 GHz: 0.75, 1.15, 1.3 ps.)
constexpr float kPrefillCycles = 1.485e-3f, kPrefillCycles8Bit = 2.277e-3f,
                kPrefillCyclesAdjusted = 2.574e-3f;
// Reads of K and V reach this share of the memory bus's rate. (H200: 4200 of 4917 GB/s.)
constexpr float kReadShareOfBus = 0.854f;
// The prefill launch lasts this share of the decode launch's time, unless it needs nearly all SMs.
constexpr float kConcurrentShare = 0.55f, kAlmostAllCtas = 0.9f;

// SIMT: tokens of a split, at least, as in vLLM's paged_attention_v2.
constexpr int kSimtSplitTokens = 512;

// Query tokens of a sequence up to which a concurrent decode launch takes it.
constexpr int concurrent_decode_tokens(int group) {
  return std::max(1, kConcurrentDecodeRows / group);
}

// Head sizes of layouts NHD and HND whose 16- or 8-bit rows are no whole lines of 128 bytes, and
// are faster as plain rows than as swizzled ones. `contiguous`: the rows of a page and head follow
// each other (HND as allocated). (d80_g8_p32_b150: HND 66.8 to 71.7 us, before 76.9 to 92.7.)
constexpr bool prefers_plain_rows(int head_size, bool is_16_bit, bool contiguous) {
  switch (head_size) {
    case 80:
    case 112:
      return is_16_bit || contiguous;
    case 96:
      return is_16_bit != contiguous;
    case 192:
      return !is_16_bit;
    default:
      return false;
  }
}

}  // namespace vllm_kernels::cuda
