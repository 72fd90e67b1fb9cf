// See dispatch_splits.h. Of the lengths the host has a maximum at most. It estimates here what the
// device decides (prefill/tile_scheduler.cuh).
#include "cuda/attention/dispatch_splits.h"

#include <algorithm>

#include "cuda/attention/common/heuristics.h"
#include "cuda/attention/common/workspace.h"

namespace vllm_kernels::cuda {
namespace {

int64_t rows_of(const PagedAttentionParams& p, int64_t query_len) {
  return query_len * (p.num_heads / p.kv.num_kv_heads);
}

bool estimates_longest(const PagedAttentionParams& p) {
  return p.key_start_loc != nullptr && p.max_key_len == 0;
}

// Work tiles of a batch and the tokens that the widest may see, as the host estimates them. Of
// contiguous keys only the sum of the lengths may be known.
struct PrefillWork {
  float tiles, tiles_of_longest, widest;
};
PrefillWork prefill_work(const PagedAttentionParams& p) {
  const int64_t seqs = std::max(1, p.num_seqs);
  const auto tiles_of = [&](int64_t query_len) {
    return (rows_of(p, query_len) + kPrefillTileRows - 1) / kPrefillTileRows * p.kv.num_kv_heads;
  };
  auto widest = static_cast<float>(p.max_seq_len);
  if (estimates_longest(p)) {
    widest /= static_cast<float>(std::min<int64_t>(seqs, kSkew));
  } else if (p.key_start_loc != nullptr) {
    widest = std::min(widest, static_cast<float>(p.max_key_len));
  }
  if (p.sliding_window > 0) widest = std::min(widest, p.sliding_window + float{kPrefillTileRows});
  return {static_cast<float>(seqs * tiles_of((p.num_tokens + seqs - 1) / seqs)),
          static_cast<float>(tiles_of(p.max_query_len)), widest};
}

// Bytes of K in a KV head, by the bound on the lengths.
int64_t seen_bytes(const PagedAttentionParams& p) {
  return seen_tokens(p) * p.head_size() * size_of(p.kv.dtype);
}

}  // namespace

bool gains_by_splits(const PagedAttentionParams& p, const DeviceModel& device,
                     bool has_8_bit_products) {
  const auto [tiles, tiles_of_longest, widest] = prefill_work(p);
  const auto ctas = static_cast<float>(device.num_sms);
  const float whole = split_time(tiles, widest, widest, 1, ctas);
  const bool dequantizes = size_of(p.kv.dtype) == 1 && !has_8_bit_products;
  const bool is_costly = estimates_longest(p) && dequantizes;
  if (!is_costly && p.num_seqs > 1 && p.num_seqs <= kUnequalSeqs && whole >= kTimeOfUnequalSplits &&
      widest >= kUnequalTokens && tiles <= kUnequalRounds * ctas && 2 * tiles_of_longest <= ctas) {
    return true;
  }
  const int slot_rows = rows_of(p, p.max_query_len) <= 64 ? 64 : kPrefillTileRows;
  const auto slots = static_cast<float>(prefill_slots(slot_rows, p.head_size() <= 64 ? 64 : 128));
  for (int splits = 2; splits <= kMaxPrefillSplits && splits * kMinPrefillSplitTokens <= widest;
       ++splits) {
    if (tiles * splits > slots) break;
    if (split_time(tiles, widest, widest, splits, ctas) < kWorthSplitting * whole) return true;
  }
  return false;
}

bool beats_decode(const PagedAttentionParams& p, const DeviceModel& device) {
  if (size_of(p.kv.dtype) > 1) return true;
  const auto [tiles, _, widest] = prefill_work(p);
  const float tokens = p.token_scales.any() ? kTokensOfFewRowsOfScales : kTokensOfFewRows;
  return tiles * widest <= tokens * static_cast<float>(device.num_sms);
}

int64_t seen_tokens(const PagedAttentionParams& p) {
  const bool has_window = p.sliding_window > 0 && p.window_right == 0;
  return has_window ? std::min<int64_t>(p.max_seq_len, p.sliding_window) : p.max_seq_len;
}

int ctas_of_half_an_sm(const PagedAttentionParams& p, const DeviceModel& device, int padded) {
  if (size_of(p.kv.dtype) > 1) return 0;
  const int64_t tiles = int64_t{p.num_seqs} * p.kv.num_kv_heads;
  if (tiles > device.num_sms) return 2;
  if (2 * tiles <= device.num_sms || device.architecture < 90 || padded > 128 || p.concurrent ||
      p.token_scales.any()) {
    return 0;
  }
  const int64_t bytes = seen_bytes(p);
  return bytes <= kBytesOfShortPairs ? 1 : bytes >= kBytesOfLongPairs ? 2 : 0;
}

void set_decode_grid(const PagedAttentionParams& p, const DeviceModel& device,
                     KernelChoice& choice) {
  choice.grid.x = device.num_sms * choice.ctas_per_sm;
  // Only a launch that overlaps with the previous one gains.
  const bool overlaps = device.architecture >= 90 && !choice.multi_warp && !choice.halves_stages &&
                        choice.ctas_per_sm == 1 && !p.concurrent &&
                        rows_of(p, p.max_query_len) <= 8;
  if (!overlaps) return;
  choice.few_ctas = device.num_sms / 2;
  const int64_t splits = choice.few_ctas / p.kv.num_kv_heads;
  if (p.num_seqs == 1 && p.fixed_split_size == 0 && seen_bytes(p) <= splits * kBytesOfSmallTile) {
    choice.grid.x = choice.few_ctas;
  }
}

}  // namespace vllm_kernels::cuda
