// Thresholds of the attention kernels. Each has its unit, and the measured row that supports it
// with the page of docs/lab. Rows are from an H200 unless they say H100. docs/lab/README.md
// explains their names. "No row" means that no measurement of the value was kept.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "ops/paged_kv.h"
#include "ops/rows.h"

namespace vllm_kernels::cuda {

// Query rows (max_query_len * G) up to which the decode kernels take a whole batch.
// (decode/axes.md, 32 x 4k: 64 rows hold 0.92 of the bandwidth of one token in bf16, and 0.65 in
// e4m3.) The second: if prefill sm90 can split its tiles. (prefill/splits.md, 32x10_on_4k, 40 rows:
// 148 to 131 us; 32x16_on_4k, 64 rows: 153 to 131. No row below 40.)
constexpr int kDecodeRows = 64, kDecodeRowsOfSplits = 32;
// The same for heads above 128 where prefill sm90 takes the call: there decode has no wgmma.
// (prefill/heads_above_128.md, d160_16x8_on_4k, 32 rows: 154 to 94 us; d160_16x16_on_4k, 64 rows:
// 340 to 94.)
constexpr int kDecodeRowsOfWideHeads = 16;
// Decode also takes work tiles for less than this part of the SMs, where prefill cannot split them.
// The second is for the same heads. (prefill/heads_above_128.md, 16 tiles: d256_1x64_on_8k 182 us,
// 184 by prefill; 24 tiles: d256_3x32_on_8k 328 to 186. Heads of 96, 48 tiles: 97 us, 101 by
// prefill.)
constexpr int kSmsOfFewTiles = 2, kSmsOfFewTilesOfWideHeads = 8;
// Query rows of a sequence up to which a concurrent decode launch takes it from a mixed batch. It
// also takes single tokens of larger groups. (decode/axes.md, 32 x 4k, bf16: up to 32 rows decode
// holds the bandwidth of one token.)
constexpr int kConcurrentDecodeRows = 32;

// Packed query rows of a prefill work tile. If there are fewer such tiles than half of the SMs,
// decode takes the batch, because it splits sequences, unless prefill can, too.
// (prefill/mixed_batches.md, 60 decodes at 2k with 256 tokens, 64 tiles: one decode launch 137.0
// us, two calls 140.2 us.)
constexpr int kPrefillTileRows = 128;

// Decode, 8-bit caches. CTAs of half an SM with half the warps: two an SM with more query tiles
// than SMs. One copies while the other combines. (decode/tile_scheduling.md, ragged128_fp8: 157.9
// to 144.8 us.) Heads up to 128 have them with more query tiles than half of the SMs, too. There
// the bound on the lengths decides, in bytes of K in a KV head. Up to the first the grid has one an
// SM, from the second on two. (decode/ragged_batches.md, heads of 128: 16 x 130 7.0 to 5.7 us, 16 x
// 1000 13.2 to 13.0, 16 x 2000 20.0 to 21.0. Two: 9 x 8000 54 to 44. Heads of 256, 12 x 192: 7.3 to
// 8.1.)
constexpr int kBytesOfShortPairs = 131072, kBytesOfLongPairs = 524288;
// Two CTAs an SM for up to as many query tiles as SMs: the min bytes of K of a split. (The same
// page, 12 x 192 in wide tables: 7.0 to 5.7.)
constexpr int kMinSplitBytesOfPairs = 65536;
// Min stages of a decode pipeline. 3 hide the latency of a page, and 2 suffice with two CTAs per
// SM. (decode/tile_scheduling.md, ragged128_fp8: 6 warps with 2 stages 144.8 us, 4 with 3 stages
// 151 us.)
constexpr int kMinStages = 3, kMinStagesOfTwoCtas = 2;

// Min tokens of a split. Decode, more query tiles than CTAs. Shorter splits cost more to combine
// than they balance. (decode/floor.md, b8_c8k with fixed splits: 67.7 us with 1024 tokens, 75.5
// with 512.)
constexpr int kMinSplitTokens = 1024;
// Max length of a split, as a fraction of one SM's even share of the work. Decode, more query
// tiles than CTAs. (0.25: decode/tile_scheduling.md, a ragged batch 449 us, 470 with finer splits.
// 0.5: decode/verification.md, c_b32_n8_fp8: 111 to 87 us.)
constexpr float kMaxSplitShare = 0.25f, kWgmmaMaxSplitShare = 0.5f;

// Decode. A small batch is split for half of the SMs. Then the CTAs of two launches fit side by
// side, and the next one starts early. A batch is small if the longest query tile's splits then
// have at most kBytesOfSmallTile bytes of K. Several sequences in 16 bits have the second limit,
// and 8 bits have half of the first. int4 counts as 8 bits. (decode/small_batches.md, heads of 128.
// 1 x 2048: bf16 7.7 to 6.4 us, e4m3 7.5 to 5.7. With a CTA for each SM: 2 x 1024, e4m3, 32768
// bytes, 7.0 to 6.0. 4 x 700, e4m3, 45056, 6.8 to 7.4. 2 x 1000, bf16, 65536, 7.0 to 6.5. 2 x 800,
// bf16, 69632, 6.1 to 6.7.)
constexpr int kBytesOfSmallTile = 73728, kBytesOfSmallTileOfSeveral = 65536;
// If the longest query tile then is not split, it may have so many times kValuesOfWholeTile. (The
// same page: e4m3, 7 x 390 tokens, 7.2 to 6.3 us; 6 x 793, 8.2 to 9.5. bf16, 8 x 345, 8.1 to 6.9;
// 6 x 393, 7.2 to 7.7.)
constexpr float kSmallWholeTile = 1.5f;
// Decode with few query tiles. A round is a stage for each pipeline. Splits of one round get so
// many shares of a CTA, as far as they keep to a round. Idle SMs start the next launch. (The same
// page, e4m3: 3 x 640 6.8 to 6.5 us, 2 x 1200 6.7 to 6.6.) There is one split more if that saves a
// round and a split still has so many shares. (bf16: 1 x 300 5.2 to 4.7, three of 200 and one
// of 1000 6.7 to 6.0. e4m3, 8 x 400 with 1.03 shares: 6.3 to 7.8.)
constexpr float kShareOfOneRound = 4.0f / 3, kShareOfMoreSplits = 1.1f;
// Decode. If splits make more work tiles than CTAs, splits are made longer, so that no CTA has two.
// A work tile may then have so many bytes of K more than an average split before. With two CTAs an
// SM it has the second limit. (decode/ragged_batches.md: bf16, 12 of 1 to 1000 tokens, 11.6 to 6.9
// us. Without a limit: e4m3, one of 3000 and 15 of 1, 12.9 to 16.7; bf16, 16 of 1 to 4000, 19.2 to
// 27.6. Two CTAs an SM, 196608 more: 12 of 1 to 30000, 39.5 to 41.5.)
constexpr int kBytesOfOneWave = 262144, kBytesOfOneWaveOfPairs = 131072;
// One step of that search multiplies the splits per stage by this.
constexpr float kLongerSplits = 0.8f;
// Decode. Long query tiles that leave CTAs idle take several waves of work tiles. A wave costs as
// much as so many bytes of K in 16 bits. In 8 bits it costs twice as much, and with wgmma 1.5
// times. A split has the second number of bytes of K at least. (decode/waves.md, on an H200: bf16,
// 9 x 8000, 101 to 75 us; e4m3, 12 x 8000, 60 to 53. With 0.7 of the second number, bf16, 6 x 2000
// took 1.15 times as long.)
constexpr int kWaveCostBytes = 32768, kMinWaveSplitBytes = 131072;
// Such waves take 1.05 equal shares of a CTA at least, since memory bandwidth is the limit. They
// are taken if they save 5%, or 25% where lengths are less than 0.9 of the longest on average. The
// search ends after 8 splits more. (With 5% for all, some uneven lengths took 1.15 times as long.)
constexpr float kShareOfBandwidth = 1.05f, kWorthWaves = 0.95f, kWorthUnevenWaves = 0.75f,
                kEqualLengths = 0.9f, kMoreSplitsOfWaves = 8.0f;
// So a sequence of 0.81 of the longest one's length has three splits if that has three.
constexpr float kSplitsRoundedUp = 0.7f;
// Decode. If no sequence has more values of K in a KV head (tokens x head size), none is split.
// (decode/small_batches.md, heads of 128. bf16: 1 x 256 5.0 to 4.3 us, 1 x 384 4.6 to 5.2. e4m3: 1
// x 256 5.0 to 4.3, 1 x 512 5.0 to 5.4.)
constexpr int kValuesOfWholeTile = 32768, kValuesOfWholeTile8Bit = 49152;

// Min length of a work tile whose first pages are prefetched into L2, as a multiple of its
// pipelines' stages. With shorter tiles the prefetch delays the primary kernel more than it saves.
// (decode/speculative_prologue.md: b8_c8k 66.9 to 65.9 us; for shorter tiles, b1_c8k 13.8
// to 14.8.)
constexpr int kPrefetchLength = 4;

// Length classes, by stages: longer than 1/2, 1/4 ... 1/64 of the longest sequence, in this order.
// All shorter sequences come with class 2. Their work tiles are mostly latency, which the copies of
// longer ones hide. (decode/tile_scheduling.md, ragged128: 262.1 us, 266.7 with the
// shortest last.)
constexpr int kLengthClasses = 6, kShortestClass = 2;

// Prefill: length classes of tiles, equal shares of the longest one's tokens, longest first. (No
// row.)
constexpr int kPrefillClasses = 16;
// Prefill: cost of a tile's prologue and epilogue, in tokens of an H200.
// (prefill/mixed_batches.md.)
constexpr float kEndTokens = 150.0f;

// Prefill sm90, splits of a work tile. Stores and the second launch, in tokens. The fewest tokens
// of a split. The estimated time below which splits are taken, as a fraction of the time without
// them. (No row.)
constexpr float kSplitEndTokens = 500.0f, kWorthSplitting = 0.9f;
constexpr int kMinPrefillSplitTokens = 512, kMaxPrefillSplits = 32;
// Contiguous keys, if the host knows their sum alone: a sequence counts as an equal share of all
// tokens, or as an eighth of them, if that is longer. (No row.)
constexpr int kSkew = 8;
// Kernels that may split also serve several sequences, since lengths may differ. They cost 2 us. So
// the estimated time, in tokens, and the longest sequence have a minimum. The work tiles of an SM
// and the sequences, whose classes each CTA counts, have a maximum. (prefill/splits.md,
// 16x16_one_11k: 98 to 31 us; 16x32_on_4k, an estimate of 4428: 75 us, 77 with such a kernel;
// 128x16_one_40k: 379 to 152.)
constexpr float kTimeOfUnequalSplits = 5500.0f, kUnequalTokens = 3000.0f, kUnequalRounds = 8.0f;
constexpr int kUnequalSeqs = 128;
// 8-bit caches, more than kDecodeRowsOfSplits rows of a sequence, up to kDecodeRows: prefill sm90
// takes them up to so many estimated tokens of a CTA. The second is for scales of tokens.
// (prefill/dequantize.md, e4m3, NHD: 32x16_on_500, 1001 tokens: 41 to 26 us; 16x16_on_4k, 3988: 63
// to 57; 16x9_on_8k, 7950: 99 to 109.)
constexpr float kTokensOfFewRows = 5000.0f, kTokensOfFewRowsOfScales = 1900.0f;

// Prefill sm90: the estimated time of `tiles` work tiles if each is split, in tokens of a CTA.
// `average` and `widest`: tokens of a tile.
VLLM_KERNELS_HOST_DEVICE inline float split_time(float tiles, float average, float widest,
                                                 float splits, float ctas) {
  const float by_rounds = ceilf(tiles * splits / ctas) * (average / splits + 2 * kEndTokens);
  const float by_longest = widest / splits + 2 * kEndTokens;
  return (by_rounds > by_longest ? by_rounds : by_longest) +
         (splits > 1.0f ? kSplitEndTokens : 0.0f);
}
// The same if lengths differ. The longest tiles have `splits`, and shorter ones fewer, so there are
// `items`. Long ones come first, so half an average one is left over. `tokens`: of all tiles.
VLLM_KERNELS_HOST_DEVICE inline float unequal_split_time(float items, float tokens, float widest,
                                                         float splits, float ctas) {
  const float by_work = (tokens + items * 2 * kEndTokens) / ctas + 0.5f * (tokens / items);
  const float by_longest = widest / splits + 2 * kEndTokens;
  return (by_work > by_longest ? by_work : by_longest) + (splits > 1.0f ? kSplitEndTokens : 0.0f);
}

// Prefill sm90: work tiles of an SM from which on memory is busy, if each reads pages of its own.
// (prefill/splits.md, NHD: 1.45 tiles 211 to 207 us, 1.03 tiles 125 to 129.)
constexpr float kTilesOfShortReads = 1.4f;

// Prefill: max bytes of K and V of a section of KV heads, and the same as a fraction of L2. The
// smaller one counts: 24 MB on an H200 (60 MiB of L2) and on an H100 (50 MiB).
// (prefill/sm90_mainloop.md, H200, d_mha_4x2k: 282 to 247 us. On an H100 the build with 20 MB took
// 9% longer at b_8x256p4k; the cause was not isolated, docs/lab/house.md.)
constexpr float kMaxSectionBytes = 24e6f, kSectionShareOfL2 = 0.4578f;

// Prefill with a concurrent decode launch: SM cycles per (row, token, dimension), for 16-bit
// caches, 8-bit caches, and scores with a softcap or ALiBi. At 1.98 GHz they are 0.75, 1.15 and 1.3
// ps. (a_1x8k takes 782 us in 16 bits and 1184 us in e4m3: prefill/sm90_mainloop.md,
// contiguous_and_8bit.md. The third: prefill/mixed_batches.md.)
constexpr float kPrefillCycles = 1.485e-3f, kPrefillCycles8Bit = 2.277e-3f,
                kPrefillCyclesAdjusted = 2.574e-3f;
// The same for 8-bit products. (prefill/fp8_queries.md, d128_1x8k: 683 us.)
constexpr float kPrefillCyclesFp8 = 1.297e-3f;
// Achieved rate of reads of K and V, as a fraction of the memory bus's rate. (4200 of an H200's
// 4917 GB/s. decode/axes.md: 4.16 TB/s in layout vllm.)
constexpr float kReadShareOfBus = 0.854f;
// Prefill with a concurrent decode launch: it takes so many CTAs that it lasts kConcurrentShare of
// the decode launch's time. From kAlmostAllCtas of the grid on it takes all CTAs.
// (prefill/mixed_batches.md, f_mix60_1k: 258 us. No row for either value.)
constexpr float kConcurrentShare = 0.55f, kAlmostAllCtas = 0.9f;

// Prefill sm90: from so many query rows of a sequence on, K and V are gathered to 16-bit keys
// first. The first is for 8-bit rows of NHD and HND that it reads slowly or not at all.
// (prefill/dequantize.md, 4x128_on_8k, 512 rows, int8 with scales of tokens, 232 to 184 us.) The
// second is for all other caches that it cannot read where they lie, and for heads above 128.
constexpr int kGatherRowsOfSlow = 512, kManyGatherRows = 1024;
// Likewise for other 8-bit caches: heads up to 64, layout vllm with heads up to 96, up to 128, NHD
// and HND. (prefill/dequantize.md, us, gathered last. Heads of 64: 4096 rows 206, 233; 8192 rows
// 422, 360. Heads of 96, layout vllm: 2048 rows 123, 134. 128: 1536 rows 119, 127; 2048 rows 138,
// 136. NHD: 1024 rows 77, 86; 1536 rows 119, 118.) Heads up to 64 have kManyGatherRows if a batch
// has so many tiles of kPrefillTileRows an SM: gathered keys have tiles of 192 rows, and fewer of
// these leave SMs idle. (The same page, d64_8x1k_fp8, 16 an SM, NHD: 130, 113.)
constexpr int kGatherRowsOfSmallHeads = 6144, kGatherRowsOfVllm96 = 4096, kGatherRowsOfVllm = 2048,
              kGatherRows = 1536, kGatherTilesOfSmallHeads = 3;
// 8-bit caches of heads above 128, whose tiles are not split: the first, if up to so many sequences
// have a longest one of so many tokens or more. The gather's time grows with their sum, and few
// tiles take as long as one. Caches that sm90 reads slowly or not at all need neither.
// (prefill/heads_above_128.md, us, gathered last. d192_1x256_on_8k: 254, 160; d192_4x128_on_8k,
// layout vllm: 239, 288; d192_4x100_on_500: 26, 37.)
constexpr int kGatherRowsOfWideHeads = 128, kGatherSeqsOfWideHeads = 3;
constexpr int64_t kGatherTokensOfWideHeads = 4096;
// Likewise for 16-bit rows of NHD and HND that begin within a sector of 32 bytes. (No row. With
// 4096 rows it loses: any_shape.md, d72_8x1k 136 to 155 us.)
constexpr int kGatherSlowRows = 16384;
// Likewise for int4, which prefill sm90 reads in no other way. (decode/int4.md, H200, 8 sequences
// on 4k: 256 rows 335 to 198 us; 128 rows take 145 us.)
constexpr int kGatherRowsOfInt4 = 256;
// What else the number depends on. The last two: kGatherSeqsOfWideHeads and
// kGatherTokensOfWideHeads hold, and kGatherTilesOfSmallHeads.
struct GatherCall {
  bool is_slow, has_few_seqs, has_many_tiles;
};
inline int gather_rows(const PagedKv& kv, const GatherCall& call) {
  if (values_of(kv.dtype) > 1) return kGatherRowsOfInt4;
  if (size_of(kv.dtype) > 1) return kManyGatherRows;
  if (kv.head_size > 128) {
    return call.is_slow || call.has_few_seqs ? kGatherRowsOfWideHeads : kManyGatherRows;
  }
  const bool has_rows = kv.layout != KvLayout::kVllm;
  if (call.is_slow) return has_rows && kv.head_size > 64 ? kGatherRowsOfSlow : kManyGatherRows;
  if (kv.head_size <= 64) return call.has_many_tiles ? kManyGatherRows : kGatherRowsOfSmallHeads;
  if (has_rows) return kGatherRows;
  return kv.head_size <= 96 ? kGatherRowsOfVllm96 : kGatherRowsOfVllm;
}
// Prefill sm90: from so many query rows of a sequence on, e4m3 queries are multiplied in 8 bits.
// (prefill/fp8_queries.md, 300x96_fp8: 384 rows 422 to 232 us.)
constexpr int kRowsOfFp8Products = 256;
// The same: from so many query rows on, K of pages is copied to contiguous rows, which TMA reads
// faster than boxes of 16 tokens. (prefill/fp8_queries.md, d64_1x8k, 32,768 rows: 540 to 522 us;
// d128_8x1k, 4096 rows: 131.5 to 134.9. No row between these.)
constexpr int kRowsOfCopiedKeys = 8192;
// Max bytes of the gathered K and V. (No row.)
constexpr int64_t kMaxGatherBytes = int64_t{256} << 20;

// Decode over pages of one token: max query rows of a sequence. A warp has 8 rows and reads K and V
// again for the next 8. (small_ops/pages.md, H100, 32 x 4k: 16 rows 425 to 284 us; 32 rows 426 to
// 555.)
constexpr int kSingleTokenRows = 16;

// SIMT: min tokens of a split, as in vLLM's paged_attention_v2. (v1_v2_on_decode.md, float32, 1 x
// 8k: 4160 us without splits, 289 us with them.)
constexpr int kSimtSplitTokens = 512;
// SIMT: resident CTAs per SM, which limits a thread to 128 registers. Loads of other CTAs hide the
// latency of one. (v1_v2_on_decode.md, float32, 8 x 4k: 609 us with 3 CTAs, 355 us with 4.)
constexpr int kSimtCtasPerSm = 4;

// The same limit in query tokens, for `group` query heads per KV head. Prefill takes what remains,
// so heads above 128 have the limit of decode.
constexpr int concurrent_decode_tokens(int group, bool is_wide) {
  return std::max(1, (is_wide ? kDecodeRowsOfWideHeads : kConcurrentDecodeRows) / group);
}

// Head sizes whose rows in NHD or HND are faster as plain rows than as swizzled rows. These rows do
// not fill whole lines of 128 bytes. `contiguous`: the rows of a page and head follow each other
// (HND as allocated). (decode/row_copies.md, HND e4m3, 80, 96, 112 and 192: 76.9 to 92.7 us as
// swizzled rows, 66.8 to 71.7 us as plain rows. decode/lines.md, 160: 139 to 117; 224: 162 to 145.
// No row for these two with scales of tokens, or before Hopper.)
constexpr bool prefers_plain_rows(int head_size, bool is_16_bit, bool contiguous) {
  switch (head_size) {
    case 80:
    case 112:
      return is_16_bit || contiguous;
    case 96:
      return is_16_bit != contiguous;
    case 160:
    case 192:
    case 224:
      return !is_16_bit;
    default:
      return false;
  }
}

// The same for rows of `bytes` bytes of int4. As swizzled rows those of 64 bytes that do not follow
// each other take a line of 128 bytes each, so there is room for half as many warps. (No row.)
constexpr bool prefers_plain_int4_rows(int bytes, bool contiguous) {
  return bytes == 64 && !contiguous;
}

// Decode, layout vllm, pages above 16 tokens, 8 bits, heads above 128: query tiles of a batch from
// which on a stage has 32 tokens. Boxes of 16 have rows of V of 16 bytes, which are slow to copy.
// (decode/large_pages.md, 256: 8 tiles 10.3 to 11.2 us, 192 tiles 225 to 166. 160: 16 tiles 17.2 to
// 17.8. No row between.)
constexpr int kTilesOfHalvedStages = 24;

// Form kLines: the KV heads of a work tile, for the head sizes of decode's kernels. Their rows of 8
// bits in NHD fill whole lines of 128 bytes together. Heads of 128 fill lines alone, and two read
// memory 256 bytes at a time. 1: no kernel. (decode/lines.md, e4m3, 24 sequences, 160: 166 to 98
// us. 128: b256_c4k 508 to 486.)
constexpr int lines_heads(int head_size) {
  switch (head_size) {
    case 64:
    case 128:
    case 192:
      return 2;
    case 96:
    case 160:
    case 224:
      return 4;
    case 80:
    case 112:
      return 8;
    default:
      return 1;
  }
}
// A batch has so many query tiles at least, and a longest sequence of more tokens. Lines lack the
// speculative prologue, and one CTA combines the splits of several heads. (The same page. 80: 12
// ragged tiles 28 to 31 us, 24 x 300 tokens 10.7 to 14.0, 24 x 1000 19.8 to 18.2. 64: 24 x 1000
// 14.7 to 15.7. 160: 24 ragged tiles 30 to 37. 128: 256 tiles, 64 x 2048, 67.6 to 78.8; 400
// tiles, 100 x 500 in wide tables, 36.5 to 41.3; 1024 tiles, 256 x 300, 68.1 to 66.2.)
constexpr int kLengthOfShortLines = 1024;
constexpr int lines_min_tiles(int head_size) {
  return head_size == 128 ? 1024 : head_size > 128 ? 32 : 24;
}
// Min stages of a pipeline. (The same page. 96: 12 warps with 2 stages 234 us, 8 with 4 stages
// 252.)
constexpr int kMinStagesOfLines = 2;
// Query tiles for more than this part of the CTAs are split as more tiles than CTAs are. (The same
// page. 160, 96 tiles: 246 to 182 us.)
constexpr int kCtasOfFewLines = 2;

// Tile shape of a CTA. Registers (65536 in all) and shared memory limit it.
struct PrefillTuning {
  int consumers = 2;  // consumer warpgroups, 64 rows of a work tile each
  int tokens;         // of a KV tile
  // Buffers in shared memory: tiles of K, tiles of V, queries of work tiles.
  int key_stages, value_stages;
  int query_stages = 1;
  bool query_in_registers = false;  // saves a fifth of the shared-memory reads
  int consumer_registers;           // of a thread, by setmaxnreg
  int producer_registers = 56;
};

// adjusts: scores have a softcap or ALiBi. Rows of prefill/sm90_mainloop.md, in us. Heads
// of 64 (e_d64_4x2k): 162; two consumers with 128 tokens 173; 112 tokens 163. Heads of 128
// (a_1x8k): 771; 785 with queries in shared memory. Heads of 256: 80 tokens instead of 64 spill
// (409 to 406). 8-bit caches, heads of 128: 128 tokens and two stages take 38.7 us, 96 and
// three 34.4 (prefill/dequantize.md, 1x64_on_8k).
constexpr PrefillTuning prefill_tuning(int head_size, bool adjusts, bool cache_is_8bit) {
  if (cache_is_8bit) {
    if (head_size <= 64) {
      return {.tokens = 128,
              .key_stages = 3,
              .value_stages = 3,
              .query_stages = 2,
              .query_in_registers = true,
              .consumer_registers = 192,
              .producer_registers = 64};
    }
    if (head_size <= 128) {
      return {.tokens = 96,
              .key_stages = 3,
              .value_stages = 3,
              .query_in_registers = true,
              .consumer_registers = head_size <= 96 ? 176 : 200,
              .producer_registers = head_size <= 96 ? 80 : 56};
    }
    return {.tokens = 64,
            .key_stages = 2,
            .value_stages = 2,
            .consumer_registers = 192,
            .producer_registers = 64};
  }
  if (adjusts) {
    if (head_size <= 64) {
      return {.consumers = 3,
              .tokens = 80,
              .key_stages = 3,
              .value_stages = 3,
              .query_stages = 2,
              .consumer_registers = 152};
    }
    if (head_size <= 128) {
      return {.tokens = 128,
              .key_stages = 3,
              .value_stages = 2,
              .query_stages = 2,
              .consumer_registers = 224};
    }
    if (head_size <= 192) {
      return {.tokens = 80, .key_stages = 2, .value_stages = 2, .consumer_registers = 224};
    }
    return {.tokens = 64,
            .key_stages = 2,
            .value_stages = 2,
            .consumer_registers = 232,
            .producer_registers = 40};
  }
  if (head_size <= 64) {
    return {.consumers = 3,
            .tokens = 96,
            .key_stages = 3,
            .value_stages = 3,
            .query_stages = 2,
            .query_in_registers = true,
            .consumer_registers = 152};
  }
  if (head_size <= 128) {
    return {.tokens = 128,
            .key_stages = 3,
            .value_stages = 2,
            .query_stages = 2,
            .query_in_registers = true,
            .consumer_registers = 224};
  }
  if (head_size <= 192) {
    return {.tokens = 96, .key_stages = 2, .value_stages = 2, .consumer_registers = 224};
  }
  return {.tokens = 64,
          .key_stages = 2,
          .value_stages = 2,
          .consumer_registers = 232,
          .producer_registers = 40};
}

// The same for e4m3 queries, up to kMaxHeadSizeFp8. (prefill/fp8_queries.md, H200: d128_1x8k 683
// us, d64_1x8k 522 us. No other tuning was timed.)
constexpr PrefillTuning prefill_fp8_tuning(int head_size) {
  if (head_size <= 64) {
    return {.tokens = 128,
            .key_stages = 3,
            .value_stages = 3,
            .query_stages = 2,
            .query_in_registers = true,
            .consumer_registers = 224};
  }
  return {.tokens = 128,
          .key_stages = 4,
          .value_stages = 4,
          .query_stages = 2,
          .consumer_registers = 232,
          .producer_registers = 40};
}

}  // namespace vllm_kernels::cuda
