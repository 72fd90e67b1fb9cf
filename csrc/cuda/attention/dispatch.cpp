// The decision tree of attention, from the top of the file to choose_kernel() at its end:
//   1  float32, block-sparse, or a cache without blocks                       SIMT
//   2  K or V that is not aligned to 16 bytes, unless 5 gathers it            SIMT
//   3  few query rows, causal, in pages                                       decode
//      up to 8 rows per KV head: a warp per pipeline, or several (dispatch_lines.h); more: wgmma
//   4  as 3 with many rows, if prefill cannot take query, out or scale        decode
//   5  many query rows on Hopper, pages of 16 tokens or more                  prefill sm90
//   6  many query rows otherwise                                              prefill sm80
//   7  scales of tokens, which sm80 lacks, where decode can                   decode
//   8  anything else                                                          SIMT
// e4m3 queries take the same way as 16-bit ones. Where 5 takes them, it may multiply in 8 bits
// (dispatch_e4m3.cpp). It may split the keys of its work tiles (dispatch_splits.cpp). Decode may
// take several KV heads a work tile (dispatch_lines.cpp). After 5 and 6, a mixed batch gets a
// concurrent decode launch for its short sequences.
// ../README.md has the same table with exact conditions. Thresholds are in heuristics.h.
// KernelChoice::obstacles has the reasons against each faster kernel; dispatch_words.cpp puts them
// in words. Host code: it makes no CUDA call.
#include "cuda/attention/dispatch.h"

#include <algorithm>
#include <bit>
#include <stdexcept>

#include "cuda/attention/alignment.h"
#include "cuda/attention/common/heuristics.h"
#include "cuda/attention/common/workspace.h"
#include "cuda/attention/dispatch_lines.h"
#include "cuda/attention/dispatch_splits.h"

namespace vllm_kernels::cuda {
namespace {

int group_of(const PagedAttentionParams& p) {
  return p.num_heads / p.kv.num_kv_heads;
}

uint32_t when(bool condition, Obstacle obstacle) {
  return condition ? obstacle : kNoObstacle;
}

// The head sizes of the decode kernels, in values. An int4 cache has none of 64.
int padded_for_decode(const PagedKv& kv) {
  const int head_size = kv.head_values();
  return head_size <= 64 && values_of(kv.dtype) == 1 ? 64 : head_size <= 128 ? 128 : 256;
}

// Whether decode has no wgmma for heads of this size.
bool has_wide_heads(const PagedAttentionParams& p) {
  return padded_for_decode(p.kv) > kWgmmaMaxHeadSize;
}

// The head sizes of the prefill kernels.
int padded_for_prefill(int head_size) {
  for (const int size : {64, 96, 128, 192}) {
    if (head_size <= size) return size;
  }
  return 256;
}

// Whether lanes copy pages of one token (kv_pipeline.cuh). launch_paged_attention() describes such
// pages of layout vllm as HND. Scales of tokens are copied 4 at a time.
bool has_single_tokens(const PagedAttentionParams& p) {
  const bool few_rows = int64_t{p.max_query_len} * group_of(p) <= kSingleTokenRows;
  return p.kv.block_size == 1 && p.kv.layout != KvLayout::kVllm && !p.token_scales.any() &&
         (few_rows || p.tree_mask.any());  // prefill has no tree mask, and SIMT is far slower
}

// Obstacles of the tensor-core kernels for pages: decode and prefill sm90.
uint32_t tensor_core_obstacles(const PagedAttentionParams& p, const DeviceModel& device) {
  const PagedKv& kv = p.kv;
  const int element = size_of(kv.dtype), padded = padded_for_decode(kv);
  const int query_alignment = element == 1 ? 4 : 2;  // elements
  const int min_page = element == 1 && kv.layout == KvLayout::kVllm ? 16 : 8;
  // Two warps with two stages each, and 20 KiB to combine.
  const int stage = 2 * padded / values_of(kv.dtype) * element * (padded <= 128 ? 32 : 16);
  return when(p.sparse.on(), kBlockSparse) | when(p.dtype == DType::kFloat32, kFloat32) |
         when(4 * stage + 20 * 1024 > device.shared_memory_per_block, kSharedMemoryTooSmall) |
         when(kv.block_size < min_page && !has_single_tokens(p), kSmallPages) |
         when(kv.num_blocks <= 0, kEmptyCache) | when(!cache_is_aligned(p), kUnalignedCache) |
         when(!is_aligned(p.query, query_alignment * 2) || p.query_stride % query_alignment != 0,
              kUnalignedQuery) |
         when(!is_aligned(p.out, 8) || p.out_stride % 4 != 0, kUnalignedOut);
}

// Further obstacles of the decode kernels.
uint32_t decode_obstacles(const PagedAttentionParams& p) {
  return when(p.key_start_loc != nullptr, kContiguousKeys) | when(p.window_right != 0, kNotCausal);
}

// Obstacles of both prefill kernels.
uint32_t prefill_obstacles(const PagedAttentionParams& p) {
  return when(!is_aligned(p.query, 16) || p.query_stride % 8 != 0 || p.query_stride <= 0,
              kUnalignedQuery) |
         when(!is_aligned(p.out, 16) || p.out_stride % 8 != 0, kUnalignedOut) |
         when(p.kv.num_blocks <= 0, kEmptyCache) | when(!(p.scale > 0.0f), kScaleNotPositive) |
         when(p.tree_mask.any(), kTreeMask) | when(p.stripe.any(), kStripe);
}

uint32_t prefill_sm90_obstacles(const PagedAttentionParams& p, const DeviceModel& device) {
  const PagedKv& kv = p.kv;
  const bool is_8_bit = size_of(kv.dtype) == 1;
  return when(!device.has_wgmma, kNoWgmma) |
         when(p.key_start_loc == nullptr && kv.block_size < 16, kPageSize) |
         when(!is_8_bit && kv.dtype != p.dtype, kCacheType) |
         when(is_8_bit && kv.head_size > kMaxHeadSize8Bit, kHeadSizeOn8Bit) |
         when(is_8_bit && p.modifies_scores(), kSoftcapOrAlibiOn8Bit) |
         when(p.token_scales.any() &&
                  (values_of(kv.dtype) > 1 || !takes_token_scales(prefill_form(kv), kv.head_size)),
              kTokenScales);
}

uint32_t prefill_sm80_obstacles(const PagedAttentionParams& p) {
  const PagedKv& kv = p.kv;
  const int element = size_of(kv.dtype);
  const bool vllm_pages =
      kv.block_size % 8 == 0 && fits_stride(kv, kv.key_chunk_stride) &&
      fits_stride(kv, kv.value_dim_stride, kv.block_size % 16 == 0 ? 16 : 8 * element);
  return when(p.sparse.on(), kBlockSparse) | when(p.dtype == DType::kFloat32, kFloat32) |
         when(element != 1 && kv.dtype != p.dtype, kCacheType) |
         when(!cache_is_aligned(p) || (kv.layout == KvLayout::kVllm && !vllm_pages),
              kUnalignedCache) |
         when(p.token_scales.any(), kTokenScales) |
         when(p.max_seq_len > kMaxLength, kLongSequences);
}

// Obstacles of prefill sm90 that do not count once K and V are gathered.
constexpr uint32_t kGone = kSmallPages | kPageSize | kUnalignedCache | kSoftcapOrAlibiOn8Bit |
                           kHeadSizeOn8Bit | kTokenScales;

// Whether prefill sm90 is faster with K and V gathered to contiguous 16-bit keys.
bool should_gather(const PagedAttentionParams& p, const DeviceModel& device,
                   uint32_t sm90_obstacles) {
  const bool is_8_bit = size_of(p.kv.dtype) == 1;
  const bool has_slow_rows = p.kv.layout != KvLayout::kVllm && p.kv.head_size % 16 != 0;
  const int64_t rows = int64_t{p.max_query_len} * group_of(p);
  // gather_paged_kv's kernel has one set of strides for the scales of K and V.
  const TokenScales& scales = p.token_scales;
  const bool can_scale = scales.key_block_stride == scales.value_block_stride &&
                         scales.key_head_stride == scales.value_head_stride;
  const int64_t tiles = int64_t{p.num_tokens} * group_of(p) / kPrefillTileRows * p.kv.num_kv_heads;
  const GatherCall call = {
      .is_slow = scales.any() || sm90_obstacles != kNoObstacle,
      .has_few_seqs =
          p.num_seqs <= kGatherSeqsOfWideHeads && p.max_seq_len >= kGatherTokensOfWideHeads,
      .has_many_tiles = tiles >= int64_t{kGatherTilesOfSmallHeads} * device.num_sms};
  // The room depends on the batch. With fixed_split_size the kernel must not.
  return p.fixed_split_size == 0 && can_scale && (sm90_obstacles & ~kGone) == kNoObstacle &&
         (((is_8_bit || sm90_obstacles != kNoObstacle) && rows >= gather_rows(p.kv, call)) ||
          (has_slow_rows && rows >= kGatherSlowRows));
}

// Sets which K and V are gathered. The host has only a bound on the lengths. If they may not fit,
// a second launch must be possible: only contiguous keys are gathered all or none.
void choose_gather(const PagedAttentionParams& p, const DeviceModel& device,
                   uint32_t sm90_obstacles, AttentionChoice& choice) {
  if (!should_gather(p, device, sm90_obstacles)) return;
  const bool is_contiguous = p.key_start_loc != nullptr;
  const int64_t longest = std::min(p.max_seq_len, kMaxGatherBytes);  // no overflow
  const int64_t bound = is_contiguous ? int64_t{p.kv.block_size} : p.num_seqs * longest;
  const int64_t room = kMaxGatherBytes / gather_bytes(p, 1);
  if (bound <= room) {
    choice.gathered_rows = bound;
  } else if (!is_contiguous && sm90_obstacles == kNoObstacle &&
             int64_t{p.max_query_len} * group_of(p) >= kManyGatherRows) {
    choice.gathered_rows = room;
    choice.gathers_some = true;
  }
}

// Whether the batch can have sequences of few query tokens beside longer ones.
bool is_mixed(const PagedAttentionParams& p) {
  return p.key_start_loc == nullptr && p.num_seqs > 1 &&
         p.num_tokens < int64_t{p.num_seqs} * p.max_query_len;
}

// Whether prefill sm90 can split the keys of its work tiles. A concurrent launch uses the same
// workspace. With fixed_split_size the result must not depend on the batch.
bool can_split(const PagedAttentionParams& p, bool has_8_bit_products) {
  const int padded = has_8_bit_products ? kMaxHeadSizeFp8 : padded_for_prefill(p.head_size());
  return (padded == 64 || padded == 128) && !p.modifies_scores() && p.fixed_split_size <= 0 &&
         !is_mixed(p);
}

// Reasons to run decode where both kinds of kernel could run. `by_sm90`: prefill would be sm90.
// `splits`: it can split its tiles. If it cannot, tiles for few of the SMs are a reason, too. With
// fixed_split_size the kernel must not depend on the batch.
uint32_t prefers_decode(const PagedAttentionParams& p, const DeviceModel& device, bool by_sm90,
                        bool splits) {
  const int64_t group = group_of(p);
  // The most tokens that one sequence can have, if every other is a decode of one token.
  const int64_t tokens = std::max(0, p.num_tokens - p.num_seqs + 1);
  const int64_t tiles =
      (tokens * group + kPrefillTileRows - 1) / kPrefillTileRows * p.kv.num_kv_heads;
  const int64_t rows = p.max_query_len * group;
  const bool is_wide = by_sm90 && has_wide_heads(p);
  const bool few_rows =
      p.max_query_len <= 1 || rows <= (is_wide ? kDecodeRowsOfWideHeads : kDecodeRowsOfSplits) ||
      (rows <= kDecodeRows && !is_wide && !(splits && beats_decode(p, device))) ||
      ((is_wide ? kSmsOfFewTilesOfWideHeads : kSmsOfFewTiles) * tiles < device.num_sms && !splits);
  return when(few_rows, kFewRows) | when(p.fixed_split_size > 0, kFixedSplit);
}

// Sets the decode kernel's warps, stages and shared memory. Returns false if fewer than
// `min_threads` threads fit.
bool set_decode_shape(const PagedAttentionParams& p, const DeviceModel& device, int min_threads,
                      bool fused, KernelChoice& choice) {
  const PagedKv& kv = p.kv;
  const int element = size_of(kv.dtype), padded = choice.padded_head_size;
  const bool multi_warp = choice.multi_warp;
  const int64_t rows = int64_t{p.max_query_len} * group_of(p);
  // At least two warps share a stage in 16 bits, whose shared stages are larger, and of wide heads.
  choice.consumer_shift = multi_warp && (element == 2 || padded > 128) ? 1 : 0;
  choice.warp_shift =
      decode_row_blocks(padded, multi_warp) > 1 && rows > 8 << choice.consumer_shift ? 4 : 3;
  while (multi_warp && choice.consumer_shift < 2 && rows > 1 << choice.row_shift()) {
    ++choice.consumer_shift;
  }
  const int halves = choice.halves_stages ? 1 : 0;
  const int tokens = decode_stage_tokens(element, padded, multi_warp) << halves;
  const int pipeline_shift = choice.consumer_shift + halves;  // log2 of the warps of a pipeline
  const int arrays = scale_arrays(p), head_size = p.head_size();
  const int stage =
      stage_bytes(kv, choice.form, padded / values_of(kv.dtype), tokens, device.architecture).total;
  const int row_bytes = partial_row_bytes(head_size);
  const int max_rows = static_cast<int>(std::min<int64_t>(rows, 8));  // combined at a time
  const int fixed = decode_static_smem(element, padded, multi_warp || halves, fused);
  int memory = device.shared_memory_per_block - fixed;
  int warps = decode_threads(element, padded, multi_warp) / 32;
  int min_rows = multi_warp ? max_rows : std::min(max_rows, halves ? 2 : 4);  // combined at a time
  const auto pipeline_memory = [&](int count) { return memory - count * min_rows * row_bytes; };
  const auto stages_for = [&](int count) {
    return stages_within(pipeline_memory(count) / (count >> pipeline_shift), stage, tokens, arrays);
  };
  // CTAs of half an SM. Not with fixed_split_size: the launch shape may not depend on the batch.
  int min_stages = kMinStages;
  const int ctas_per_sm = multi_warp || min_threads > 0 || p.fixed_split_size > 0
                              ? 0
                              : ctas_of_half_an_sm(p, device, padded);
  if (ctas_per_sm > 0) {
    const int all = memory, all_rows = min_rows;
    memory = (all - (fixed + 1024)) / 2;
    // Scales leave room for two stages only beside two rows. (decode/int4.md, H200, b64_c2k, int8
    // with a scale a token: 75.4 to 70.6 us.)
    if (arrays > 0) min_rows = std::min(min_rows, 2);
    if (stages_for(warps / 2) >= kMinStagesOfTwoCtas) {
      choice.ctas_per_sm = ctas_per_sm;
      min_stages = kMinStagesOfTwoCtas;
      warps /= 2;
    } else {
      memory = all;
      min_rows = all_rows;
    }
  }
  // As many warps as have room for `min_stages` and for a few rows to combine.
  const int step = std::max(2, 1 << pipeline_shift);
  while (warps > step && stages_for(warps) < min_stages) warps -= step;
  if (warps * 32 < min_threads) return false;
  choice.warps = warps;
  set_decode_grid(p, device, choice);
  choice.stages = std::min(stages_for(warps), kMaxPipelineStages);
  const int all_pipelines =
      (warps >> pipeline_shift) * pipeline_bytes(choice.stages, stage, tokens, arrays);
  choice.combine_rows = std::min(
      {max_rows, (memory - all_pipelines) / (warps * row_bytes), warps * 32 * 4 / head_size});
  choice.shared_bytes = all_pipelines + warps * choice.combine_rows * row_bytes;
  return true;
}

void set_wgmma_shape(const PagedAttentionParams& p, const DeviceModel& device,
                     KernelChoice& choice) {
  const int64_t rows = int64_t{p.max_query_len} * group_of(p);
  const int row_blocks = rows <= 32 ? 4 : 8;
  choice.warp_shift = rows <= 16 ? 4 : rows <= 32 ? 5 : 6;
  const int consumers = wgmma_consumers(row_blocks);
  const int stage = stage_bytes(p.kv, choice.form, choice.padded_head_size, kWgmmaStageTokens,
                                device.architecture)
                        .total;
  const int scratch =
      wgmma_scratch_bytes(row_blocks, 1 << choice.row_shift(), choice.padded_head_size);
  const int memory = device.shared_memory_per_block - wgmma_static_smem(row_blocks) - scratch;
  choice.warps = 4 * (consumers + 1);
  choice.grid.x = device.num_sms;
  const int arrays = scale_arrays(p);
  choice.stages = std::min(stages_within(memory / consumers, stage, kWgmmaStageTokens, arrays),
                           kMaxPipelineStages);
  choice.shared_bytes =
      consumers * pipeline_bytes(choice.stages, stage, kWgmmaStageTokens, arrays) + scratch;
}

KvForm decode_form(const PagedKv& kv) {
  if (kv.layout != KvLayout::kVllm) return KvForm::kSwizzledRows;
  return kv.block_size <= 16 ? KvForm::kPackedPages : KvForm::kPackedBoxes;
}

// Whether the decode kernel takes rows of NHD or HND in form kPlainRows.
bool takes_plain_rows(const PagedKv& kv, const DeviceModel& device) {
  const bool contiguous = rows_are_contiguous(kv);
  const bool prefers = values_of(kv.dtype) > 1
                           ? prefers_plain_int4_rows(kv.head_size, contiguous)
                           : prefers_plain_rows(kv.head_size, size_of(kv.dtype) == 2, contiguous);
  return kv.layout != KvLayout::kVllm && kv.block_size >= 8 &&
         (contiguous || device.architecture >= 90) && prefers;
}

KernelChoice choose_decode(const PagedAttentionParams& p, const DeviceModel& device) {
  const int64_t rows = int64_t{p.max_query_len} * group_of(p);
  KernelChoice choice = {.kernel = AttentionKernel::kDecode,
                         .form = decode_form(p.kv),
                         .padded_head_size = padded_for_decode(p.kv),
                         .multi_warp = rows > 8 && !has_single_tokens(p)};
  if (const int heads = heads_of_lines(p, device); heads > 1 && !choice.multi_warp) {
    set_lines_shape(p, device, heads, choice);
    return choice;
  }
  if (!choice.multi_warp && takes_plain_rows(p.kv, device)) {
    choice.form = KvForm::kPlainRows;
    choice.padded_head_size = p.head_size();
  }
  choice.halves_stages = halves_stages(p, device, choice);
  const uint32_t wgmma = when(!device.has_wgmma, kNoWgmma) |
                         when(choice.padded_head_size > kWgmmaMaxHeadSize, kWgmmaHeadSize) |
                         when(values_of(p.kv.dtype) > 1, kWgmmaInt4);
  if (choice.multi_warp && wgmma == kNoObstacle) {
    choice.kernel = AttentionKernel::kDecodeWgmma;
    set_wgmma_shape(p, device, choice);
  } else {
    choice.obstacles = choice.multi_warp ? wgmma : kNoObstacle;
    set_decode_shape(p, device, 0, false, choice);
  }
  return choice;
}

// With few CTAs, sequences are split as far as the workspace has room. With fixed_split_size
// nothing is split, because the result must not depend on the batch.
KernelChoice choose_simt(const PagedAttentionParams& p, const DeviceModel& device) {
  const int chunks = (group_of(p) + kSimtHeads - 1) / kSimtHeads, head_size = p.head_size();
  SimtShape shape = {.head_chunks = chunks, .max_splits = 1, .split_tokens = INT32_MAX / 2};
  const int64_t tiles = int64_t{p.num_tokens} * p.kv.num_kv_heads * chunks;
  const int64_t rows = std::max<int64_t>(1, int64_t{p.num_tokens} * p.num_heads);
  constexpr int64_t kMaxGridY = 65535;
  const int64_t room =
      std::min({kDecodeStatsBytes / 8 / rows, kDecodeOutBytes / (head_size * 4) / rows, kMaxGridY});
  const int64_t longest = seen_tokens(p);
  const int64_t splits = std::min(room, (longest + kSimtSplitTokens - 1) / kSimtSplitTokens);
  if (tiles < 4 * device.num_sms && tiles <= kMaxDecodeSlots && p.fixed_split_size == 0 &&
      splits >= 2) {
    const int64_t tokens = (longest + splits - 1) / splits;
    shape.split_tokens = static_cast<int>((tokens + 31) / 32 * 32);
    shape.max_splits = static_cast<int>((longest + shape.split_tokens - 1) / shape.split_tokens);
  }
  // Shared memory: in the loop the queries and p of each warp, after it the warps' partials.
  const int loop = kSimtHeads * (head_size + kSimtWarps * 32);
  const int partials = kSimtWarps * kSimtHeads * (head_size + 2);
  return {.warps = kSimtWarps,
          .shared_bytes = std::max(loop, partials) * static_cast<int>(sizeof(float)),
          .grid = {p.num_tokens, shape.max_splits, p.kv.num_kv_heads * chunks},
          .simt = shape};
}

// Returns false if shared memory is too small.
bool set_prefill_sm80_shape(const PagedAttentionParams& p, const DeviceModel& device,
                            KernelChoice& choice) {
  choice.padded_head_size = padded_for_prefill(p.head_size());
  const PrefillSm80Sizes sizes(choice.padded_head_size, size_of(p.kv.dtype) == 1);
  const int max_rows = PrefillSm80Sizes::kMaxWarps * sizes.warp_rows();
  const int64_t tiles =
      (int64_t{p.num_tokens} * group_of(p) + max_rows - 1) / max_rows * p.kv.num_kv_heads;
  // Fewer work tiles than SMs: twice as many, of half the rows.
  int warps =
      tiles < device.num_sms ? PrefillSm80Sizes::kMaxWarps / 2 : PrefillSm80Sizes::kMaxWarps;
  int stages = sizes.max_stages;
  const int room = device.shared_memory_per_block - PrefillSm80Sizes::kStaticSmem;
  if (sizes.shared_bytes(warps, stages) > room) stages = 2;
  while (warps > 2 && sizes.shared_bytes(warps, stages) > room) warps /= 2;
  choice.warps = warps;
  choice.grid.x = device.num_sms;
  choice.stages = stages;
  choice.shared_bytes = sizes.shared_bytes(warps, stages);
  return choice.shared_bytes <= room;
}

}  // namespace

AttentionChoice choose_kernel(const PagedAttentionParams& p, const DeviceModel& device,
                              bool has_8_bit_products) {
  const uint32_t tensor_cores = tensor_core_obstacles(p, device);
  const uint32_t sm90 = tensor_cores | prefill_sm90_obstacles(p, device);
  const uint32_t decode = tensor_cores | decode_obstacles(p);
  uint32_t obstacles = prefill_obstacles(p);
  const auto few_rows = [&]() -> AttentionChoice {
    AttentionChoice choice;
    choice.main = decode == kNoObstacle ? choose_decode(p, device) : choose_simt(p, device);
    choice.main.obstacles |= obstacles | decode;
    return choice;
  };
  if (p.sparse.on() || obstacles != kNoObstacle) return few_rows();
  // Most calls are decode steps. What else decides needs more time.
  const uint32_t always =
      decode == kNoObstacle ? prefers_decode(p, device, true, true) : kNoObstacle;
  if ((always & kFewRows) != 0) {
    obstacles |= always;
    return few_rows();
  }
  AttentionChoice choice;
  choose_gather(p, device, sm90, choice);
  // With 8-bit products nothing is gathered to 16 bits. Two launches that split were not timed.
  const bool can = sm90 == kNoObstacle && can_split(p, has_8_bit_products) &&
                   (has_8_bit_products || !choice.gathers_some);
  const bool splits = can && gains_by_splits(p, device, has_8_bit_products);
  if (decode == kNoObstacle) {
    // Short sequences are not split, but also take less time than in decode. With 8-bit products
    // that was not timed: K and V may be copied first.
    const bool by_sm90 = sm90 == kNoObstacle || choice.gathered_rows > 0;
    obstacles |= prefers_decode(p, device, by_sm90, has_8_bit_products ? splits : can);
    if (obstacles != kNoObstacle) return few_rows();
  }
  if (sm90 == kNoObstacle || choice.gathered_rows > 0) {
    choice.main = {.kernel = AttentionKernel::kPrefillSm90,
                   .form = choice.gathered_rows > 0 ? KvForm::kSwizzledRows : prefill_form(p.kv),
                   .padded_head_size = padded_for_prefill(p.head_size()),
                   .grid = {.x = device.num_sms}};
    choice.may_split = splits;
  } else {
    const uint32_t sm80 = prefill_sm80_obstacles(p);
    choice.main = {
        .kernel = AttentionKernel::kPrefillSm80,
        .form = p.kv.layout == KvLayout::kVllm ? KvForm::kPackedPages : KvForm::kSwizzledRows,
        .obstacles = sm90};
    if (sm80 != kNoObstacle || !set_prefill_sm80_shape(p, device, choice.main)) {
      obstacles = sm90 | sm80 | when(sm80 == kNoObstacle, kSharedMemoryTooSmall);
      return few_rows();
    }
  }
  // If the batch can have sequences of few query tokens, a concurrent decode launch takes them.
  // With a right window it takes only sequences of one token. Nothing follows a sequence's last
  // token, so decode, which is causal, gives the same result. With fixed_split_size one kernel
  // takes all sequences, since the kernel must not depend on the batch.
  if (tensor_cores == kNoObstacle && p.fixed_split_size == 0 && is_mixed(p)) {
    const bool is_wide = choice.main.kernel == AttentionKernel::kPrefillSm90 && has_wide_heads(p);
    const int few = p.window_right == 0 ? concurrent_decode_tokens(group_of(p), is_wide) : 1;
    choice.has_concurrent_decode = true;
    choice.min_query_len = few + 1;
    choice.concurrent_decode = choose_decode(concurrent_params(p, choice), device);
  }
  return choice;
}

PagedAttentionParams concurrent_params(const PagedAttentionParams& p,
                                       const AttentionChoice& choice) {
  PagedAttentionParams others = p;
  others.max_query_len = choice.min_query_len - 1;
  others.window_right = 0;
  others.concurrent = true;
  return others;
}

KernelChoice choose_fused_decode(const PagedAttentionParams& p, const DeviceModel& device,
                                 int new_token_threads) {
  const PagedKv& kv = p.kv;
  const bool has_kernel =
      kv.layout == KvLayout::kVllm &&
      (kv.dtype == DType::kFloat16 || kv.dtype == DType::kBFloat16 || kv.dtype == DType::kFp8E4M3);
  KernelChoice choice = {.kernel = AttentionKernel::kDecode,
                         .form = KvForm::kPackedPages,
                         .padded_head_size = kv.head_size <= 64 ? 64 : 128};
  choice.obstacles = tensor_core_obstacles(p, device) | when(!has_kernel, kFusedCache) |
                     when(kv.block_size > 16, kFusedPageSize) |
                     when(kv.head_size > 128, kFusedHeadSize) |
                     when(group_of(p) > kMaxNewTokenRows, kFusedGroup);
  if (choice.obstacles == kNoObstacle &&
      !set_decode_shape(p, device, new_token_threads, true, choice)) {
    choice.obstacles = kSharedMemoryTooSmall;
  }
  return choice;
}

void check_fixed_split(const PagedAttentionParams& p, const KernelChoice& choice) {
  const bool wgmma = choice.kernel == AttentionKernel::kDecodeWgmma;
  if (p.fixed_split_size <= 0 || (choice.kernel != AttentionKernel::kDecode && !wgmma)) return;
  const int padded = choice.padded_head_size;
  const int stage = wgmma ? kWgmmaStageTokens
                          : decode_stage_tokens(size_of(p.kv.dtype), padded, choice.multi_warp);
  const int64_t slots = workspace_slots(choice.row_shift(), wgmma ? padded : p.head_size());
  const int64_t tokens = std::min(p.max_seq_len, int64_t{p.max_blocks_per_seq} * p.kv.block_size);
  const int64_t stages = tokens / stage + 2;  // a window may begin inside of a stage
  const int64_t step = std::max(1, p.fixed_split_size / stage);
  const int64_t m_blocks =
      ((int64_t{p.num_tokens} * group_of(p)) >> choice.row_shift()) + p.num_seqs;
  const int64_t num_splits = (stages + step - 1) / step * m_blocks * p.kv.num_kv_heads;
  if (num_splits > slots && stages > step) {
    throw std::runtime_error(
        "paged_attention: fixed_split_size: block_tables has room for sequences of " +
        std::to_string(tokens) + " tokens, up to " + std::to_string(num_splits) +
        " splits, and the workspace holds " + std::to_string(slots) +
        ": use a longer split, or slice block_tables to the longest sequence");
  }
}

}  // namespace vllm_kernels::cuda
