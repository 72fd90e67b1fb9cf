// How the decode kernels split query tiles (tile_scheduler.cuh says what these are).
//
// Up to few_tiles query tiles are split into about one work tile per CTA. These are as many as
// CTAs, or half as many in form kLines. A small batch is split for half of the SMs (few_ctas), and
// very short sequences are not split (whole_stages). A round is a stage for each pipeline, and more
// rounds take longer (round_stages). If splits have one round, three quarters of the CTAs suffice.
// If one split more saves a round, there is one more. If there would be more work tiles than CTAs,
// splits may be made longer (one_wave_stages). If CTAs are left over, long splits may be made
// shorter, for several waves of work tiles (splits_of_waves()).
//
// With more query tiles, equal shares gain nothing: memory bandwidth is the limit, and a CTA's
// share of it grows when others are done. Then only long query tiles are split. A split is at most
// a quarter of an SM's share, or half of it with wgmma.
//
// The device applies the rule, because only it knows the sequence lengths. The C++ tests apply it
// on the host. There divisions are exact, on the device within 2 ulp. So the number of splits may
// differ by one where a quotient is near an integer.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cuda/attention/common/divide.h"
#include "cuda/attention/common/heuristics.h"
#include "cuda/attention/common/kernel_choice.h"
#include "ops/paged_attention.h"

namespace vllm_kernels::cuda {

// What the host decides.
struct SplitRule {
  uint32_t few_tiles = 0;    // up to so many query tiles are split into about one work tile per CTA
  int min_split_stages = 0;  // of a split then, about; shorter ones are not worth a CTA
  int combine_share = 0;     // flag-in-data: stages fewer for the last split, which combines
  uint32_t few_ctas = 0;     // a small batch is split for so many CTAs
  float small_stages = 0;    // it is small if its longest query tile has splits of up to so many
  uint32_t whole_stages = 0;  // if no sequence has more, none is split; see also kSmallWholeTile
  float max_split_share = 0;  // with more query tiles: largest split / a CTA's share
  int one_wave_stages = 0;    // so many more than an average split may make one wave of tiles
  float round_stages = 0;     // a stage for each pipeline; 0: launches do not overlap
  // For several waves of work tiles. These two are rarely read, so they are at the end.
  float min_wave_stages = 0;  // of a split
  float wave_stages = 0;      // stages of a CTA in the time that a wave costs
};

// For a decode launch.
SplitRule split_rule(const PagedAttentionParams& p, const KernelChoice& choice, int stage_shift);

// From so many stages of a KV head several waves of work tiles may pay: equal shares for all CTAs
// are long then. `kv_heads`: of the scheduler.
inline uint16_t min_stages_of_waves(const SplitRule& rule, int kv_heads, uint32_t ctas) {
  const uint32_t stages = static_cast<uint32_t>(rule.min_wave_stages) * ctas / kv_heads;
  return static_cast<uint16_t>(std::clamp<uint32_t>(stages, 1, UINT16_MAX));
}

// What the device knows of a batch.
struct BatchStages {
  uint32_t all;          // of the query tiles of one KV head
  uint32_t longest;      // of a query tile
  uint32_t query_tiles;  // of all KV heads
};

// Stages of one of `shares` equal shares. It is a bit less than the quotient, so that rounding does
// not take a share away.
VLLM_KERNELS_HOST_DEVICE inline float equal_share(float stages, float shares) {
  return fast_quotient(0.9999f * stages, shares);
}

// Stages of a split with few query tiles. `all`: stages of the batch. `share`: of them, a CTA's.
VLLM_KERNELS_HOST_DEVICE inline float split_of_few_tiles(const SplitRule& rule,
                                                         const BatchStages& batch, float all,
                                                         float share) {
  const float longest = batch.longest, round = rule.round_stages, min_split = rule.min_split_stages;
  float split = fmaxf(fmaxf(ceilf(share), fminf(round, share * kShareOfOneRound)), min_split);
  float min_share = share * kShareOfMoreSplits;
  if (batch.query_tiles <= rule.few_ctas) {
    // For half of the SMs, if the longest query tile has short splits then, or one split more. If
    // it then is not split, it has a limit of its own.
    const float share_of_few = equal_share(all, static_cast<float>(rule.few_ctas));
    float longer = fmaxf(ceilf(share_of_few), min_split);
    float splits = fmaxf(floorf(fast_quotient(longest, longer)), 1.0f);
    if (longest > rule.small_stages * splits && longest >= share_of_few * (splits + 1.0f)) {
      splits += 1.0f;
      longer = equal_share(longest, splits);
    }
    const bool is_small = splits == 1.0f ? longest <= rule.whole_stages * kSmallWholeTile
                                         : longest <= rule.small_stages * splits;
    if (is_small) split = longer;
    // Splits that fit half of the SMs do not get one more that does not.
    if (longest >= share_of_few * floorf(fast_quotient(longest, split))) min_share = share_of_few;
  }
  // One split more, if the longest then takes one round in place of two.
  const float splits = floorf(fast_quotient(longest, split)), more = splits + 1.0f;
  const bool one_round = longest > round * splits && longest <= round * more;
  return one_round && longest >= min_share * more ? equal_share(longest, more) : split;
}

// Splits of a query tile per stage of it. `kv_heads`: of the scheduler, in form kLines groups of
// heads. `ctas`: of the grid. `stage_shift`: log2 of the tokens of a stage.
template <bool kSmallBatches>
VLLM_KERNELS_HOST_DEVICE inline float splits_per_stage(const SplitRule& rule,
                                                       const BatchStages& batch, int kv_heads,
                                                       uint32_t ctas, int stage_shift) {
  if (kSmallBatches && batch.longest <= rule.whole_stages) return 0.0f;
  const float all = static_cast<float>(batch.all) * kv_heads,
              share = fast_quotient(all, static_cast<float>(ctas));
  float split;
  if (batch.query_tiles > rule.few_tiles) {
    split = fmaxf(ceilf(share * rule.max_split_share),
                  static_cast<float>(kMinSplitTokens >> stage_shift));
  } else if (kSmallBatches) {
    split = split_of_few_tiles(rule, batch, all, share);
  } else {
    split = fmaxf(ceilf(share), static_cast<float>(rule.min_split_stages));
  }
  return fast_quotient(1.0f, split);
}

// Splits and the work tiles that `waves` of them may make.
struct Waves {
  float splits_per_stage;
  uint32_t max_work_tiles;
};

// One wave may leave CTAs idle: 72 query tiles that are not split need 72 of 132. With three splits
// each they take two waves, whose work tiles have a third of the length. Returns more splits per
// stage if that takes less time, else the same. The unit of time is a CTA's time for the longest
// query tile. `longest_tile`: stages of the longest work tile now.
VLLM_KERNELS_HOST_DEVICE inline Waves splits_of_waves(const SplitRule& rule,
                                                      const BatchStages& batch, int kv_heads,
                                                      uint32_t ctas, float longest_tile,
                                                      float splits_per_stage) {
  const float longest = batch.longest, stage = fast_quotient(1.0f, longest);
  const float all = static_cast<float>(batch.all) * kv_heads * stage,
              wave_cost = rule.wave_stages * stage;
  const float share = equal_share(all, static_cast<float>(ctas));
  Waves result = {.splits_per_stage = splits_per_stage, .max_work_tiles = 0};
  if (longest_tile * stage <= share * kShareOfBandwidth) return result;
  const bool is_even = all >= kEqualLengths * batch.query_tiles;
  // Even lengths have equal numbers of splits. Uneven ones have about as many as their share.
  const float waves_per_split =
      is_even ? equal_share(batch.query_tiles, static_cast<float>(ctas)) : share;
  float min_time = (longest_tile * stage + wave_cost) * (is_even ? kWorthWaves : kWorthUnevenWaves);
  float splits = fmaxf(floorf(longest * splits_per_stage), 1.0f);
  const float max_splits = splits + kMoreSplitsOfWaves;
#if defined(__CUDA_ARCH__)
#pragma unroll 1
#endif
  while ((splits += 1.0f) <= max_splits && splits * rule.min_wave_stages <= longest) {
    const float waves = ceilf(waves_per_split * splits);
    const float time =
        fmaxf(fast_quotient(waves, splits), share * kShareOfBandwidth) + waves * wave_cost;
    if (time < min_time) {
      min_time = time;
      // Sequences that are a bit shorter have as many splits.
      result = {.splits_per_stage = (splits + kSplitsRoundedUp) * stage,
                .max_work_tiles = static_cast<uint32_t>(waves) * ctas};
    }
  }
  return result;
}

// Changes the splits of a batch with few query tiles, if they make more or fewer work tiles than
// CTAs. `splits_per_stage` made `work_tiles` of them. count() applies it: it returns the work
// tiles, and sets `is_long` if one of them has more than `max_stages`. longest_tile() returns the
// stages of the longest one now.
//
// With more, some CTAs would take two, one after the other. Splits get longer, until no CTA takes
// two. That ends, because there are no more query tiles than CTAs. It is given up if a work tile
// gets too long. With fewer, there may be several waves from `min_stages` on, the result of
// min_stages_of_waves(). They are given up if there are more work tiles than expected.
template <bool kSmallBatches, typename Count, typename LongestTile>
VLLM_KERNELS_HOST_DEVICE inline void change_waves(const SplitRule& rule, const BatchStages& batch,
                                                  int kv_heads, uint32_t ctas, uint32_t work_tiles,
                                                  uint32_t min_stages, float& splits_per_stage,
                                                  const Count& count,
                                                  const LongestTile& longest_tile) {
  const bool to_one = work_tiles > ctas;
  if (to_one ? !kSmallBatches || batch.query_tiles > ctas : batch.all < min_stages) return;
  const float at_first = splits_per_stage;
  const float max_stages = to_one ? rule.one_wave_stages + fast_quotient(1.0f, at_first)
                                  : static_cast<float>(batch.longest);
  const Waves next =
      to_one ? Waves{.splits_per_stage = at_first * kLongerSplits, .max_work_tiles = ctas}
             : splits_of_waves(rule, batch, kv_heads, ctas, longest_tile(), at_first);
  splits_per_stage = next.splits_per_stage;
  if (splits_per_stage == at_first) return;
  for (;;) {
    bool is_long = false;
    const bool is_enough = count(max_stages, is_long) <= next.max_work_tiles && !is_long;
    if (is_enough || splits_per_stage == at_first) return;
    splits_per_stage = to_one && !is_long ? splits_per_stage * kLongerSplits : at_first;
  }
}

// Splits of a query tile of `stages` stages.
VLLM_KERNELS_HOST_DEVICE inline int splits_of(int stages, float splits_per_stage) {
  return std::max(1, static_cast<int>(static_cast<float>(stages) * splits_per_stage));
}

// How many stages fewer than the others the last of `splits` splits has, because it combines. They
// take over at most about half a stage each. In a short split that would be one stage more for a
// pipeline. `fixed`: the splits have fixed_split_size.
template <bool kSmallBatches>
VLLM_KERNELS_HOST_DEVICE inline int combine_share(const SplitRule& rule, int stages, int splits,
                                                  bool fixed) {
  const int share = fixed ? 0 : std::min(rule.combine_share, splits / 2);
  const int max_share = kSmallBatches ? rule.combine_share : share;
  return stages < 4 * max_share * splits ? 0 : share;
}

struct StageRange {
  int first, count;
};

// The stages of split `split` of `splits`. The last one has `share` fewer than the others.
VLLM_KERNELS_HOST_DEVICE inline StageRange stages_of_split(int stages, int splits, int split,
                                                           int share) {
  const int shared = stages + share;
  const int min_stages = divide(shared, splits);
  const int longer_splits = shared - min_stages * splits;  // the first ones have one stage more
  StageRange range = {.first = split * min_stages + std::min(split, longer_splits),
                      .count = min_stages + (split < longer_splits ? 1 : 0)};
  if (split + 1 == splits) range.count -= share;
  return range;
}

}  // namespace vllm_kernels::cuda
